"""`cacheblend`: tokens whose rows change most when they are computed in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.policies.spend import n_tokens_of, top_tokens
from schemas.errors import InputError

if TYPE_CHECKING:
    from engine.selection import SelectionContext

MODES = ("single_layer", "gradual")
_CHECK_LAYER = 1
_SHARES = (2.0, 1.5, 1.0)  # of the budget, kept at the check layer and the two behind it


class CacheBlendPolicy:
    """score(t) = Σ over heads and dimensions of (V_new - V_old)² at layer 1, all tokens run through the layers before.

    Source: CacheBlend (arXiv 2405.16444, YaoJiayi/CacheBlend). Blind to the question.

    `single_layer` is the public code: one check layer, V only, the highest scores. `gradual` is the paper: keep twice
    the budget at layer 1, one and a half times at layer 2, the budget at layer 3, the rows that left the set being
    the cached ones again from there on; there the average over layers is the budget, here the last set is, and all
    layers repair that one set.

    Where public code differs: the reference masks with a triangle over the rows of P, so that a repaired row sees
    keys of its future, its scripts let the question compete for the budget, and it assumes a BOS token; LMCache
    scores K² after RoPE, unified-cache-management Σ|ΔK| at layer 1 (`of="k"` is near to both). All of it is left out
    here: exact mask, question always fresh, no assumption about BOS.
    """

    name = "cacheblend"
    layout = "reordered"

    def __init__(self, mode: str = "single_layer", of: str = "v") -> None:
        """Compare `of` = `v` or `k`.

        Raises:
            InputError: an unknown mode or tensor.
        """
        if mode not in MODES or of not in ("v", "k"):
            raise InputError(f"cacheblend has modes {MODES} and compares 'v' or 'k' (got {mode!r} and {of!r})")
        self._mode, self._of = mode, of

    def score(self, context: SelectionContext) -> torch.Tensor:
        """See `Scored.score`."""
        return context.deviation(min(_CHECK_LAYER, context.spec.n_layers - 1), self._of)

    def select(self, context: SelectionContext, budget: float) -> torch.Tensor:
        """See `Policy.select`."""
        n, most = n_tokens_of(context, budget), int(context.eligible.sum())
        if not n:
            return torch.empty(0, dtype=torch.int64)
        if self._mode == "single_layer":
            return top_tokens(self.score(context), context.eligible, n)
        layers = range(min(_CHECK_LAYER, context.spec.n_layers - 1), context.spec.n_layers)
        steps = list(zip(layers, _SHARES[-len(layers) :], strict=False))
        return context.filtered([(layer, min(round(share * n), most)) for layer, share in steps], self._of)
