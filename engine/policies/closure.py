"""`closure`: contiguous blocks that do not read stale neighbours. Ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.policies.layers import layers_at, named_layers
from engine.policies.spend import BlockRule, n_tokens_of, spend_on_blocks
from engine.scoring import NORM

if TYPE_CHECKING:
    from engine.selection import SelectionContext

DEPTHS = (0.4, 0.467, 0.534, 0.6)


class ClosurePolicy:
    """Blocks of 16 tokens by their infoflow score, every chunk's head block first, runs preferred.

        a(b) = Σ over tokens t of block b of: mean over layers l of ‖ mean over heads of A^l[h, :, t] ‖₂
        worth(b) = a(b) · (1 + run_bonus, if the block before it is taken)
        head blocks first; then `floor` tokens in every chunk; then the block worth most, until the budget is spent

    Why: a token repaired alone reads stale neighbours, and importance is not repairability (arXiv 2609.17983); a
    chunk computed apart grows an attention sink at its head, which recomputing the head takes away (EPIC).

    Small models attend most to the chunk nearest to the question and would spend up to three quarters of the budget
    there. `balance` divides the scores of a chunk by their mean to that power: 0 leaves them, 1 makes chunks equal.

    With `fitted` the worth follows the closure form of IBM's spans work on vLLM (one policy file, unpublished):

        worth(b) = a(b) · (1 + b)^-0.33 · (0.1 + Σ over taken j < b of w(b - j)) / (0.1 + Σ over all j < b of w(b - j))
        w(d) = 0.06 · d^-1.25 + 0.0085, plus 0.554 if j is the chunk's head block

    b and j count blocks within their chunk. Its constants were fitted on Qwen3-32B, not on the model at hand. That
    the sums of a block run over its own chunk only is our reading. Differences to both: layers at 40 to 60 % of the
    depth with the pass ending there, the exact mask, no budget on rows that are exact already, and exactly the
    budget is spent: the last block is cut.
    """

    name = "closure"
    layout = "reordered"

    def __init__(
        self,
        layers: Sequence[int] | None = None,
        block: int = 16,
        heads: bool = True,
        floor: int = 16,
        run_bonus: float = 0.5,
        fitted: bool = False,
        balance: float = 0.0,
    ) -> None:
        """Score at `layers`, or at the default depths; `balance` as above; the rest as in `BlockRule`."""
        self._layers, self._balance = layers, balance
        worth, reads = (_fitted_worth, _fitted_reads) if fitted else (None, None)
        bonus = 0.0 if fitted else run_bonus
        self._rule = BlockRule(size=block, heads=heads, floor=floor, run_bonus=bonus, worth=worth, reads=reads)

    def score(self, context: SelectionContext) -> torch.Tensor:
        """See `Scored.score`."""
        n_layers = context.spec.n_layers
        layers = layers_at(n_layers, DEPTHS) if self._layers is None else named_layers(self._layers, n_layers)
        scores = context.attention(layers, NORM).mean(0)
        for chunk in context.chunks if self._balance else ():
            of_chunk = scores[chunk.start : chunk.end]
            of_chunk /= of_chunk.mean().clamp_min(1e-12) ** self._balance
        return scores

    def select(self, context: SelectionContext, budget: float) -> torch.Tensor:
        """See `Policy.select`."""
        n = n_tokens_of(context, budget)
        if not n:
            return torch.empty(0, dtype=torch.int64)
        return spend_on_blocks(self.score(context), context.chunks, n, self._rule)


def _fitted_worth(number: torch.Tensor, fresh: torch.Tensor, everything: torch.Tensor) -> torch.Tensor:
    return (1.0 + number).pow(-0.33) * (0.1 + fresh) / (0.1 + everything)


def _fitted_reads(distance: torch.Tensor, head: bool) -> torch.Tensor:
    return 0.06 * distance.pow(-1.25) + (0.0085 + 0.554 if head else 0.0085)
