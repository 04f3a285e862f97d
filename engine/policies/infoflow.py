"""`infoflow`: the norm of the question's attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.policies.interface import ScoredPolicy
from engine.policies.layers import layers_at, named_layers
from engine.scoring import NORM

if TYPE_CHECKING:
    from engine.selection import SelectionContext

DEPTHS = tuple(layer / 40 for layer in (22, 23, 24, 25))  # the published choice for a model of 40 layers


class InfoFlowPolicy(ScoredPolicy):
    """score(t) = mean over layers l of ‖ mean over heads h of A^l[h, :, t] ‖₂, the norm taken over question rows.

    A^l is the question's softmax attention over the stitched rows. Source: InfoFlow KV (arXiv 2603.05353,
    tx467/InfoFlow-KV, MIT). Layers: 22 to 25 of 40 there, the same depths here, where its class defaults to the last
    two; the pass ends behind the deepest of them, theirs runs through.

    Where the public code differs: it scores with the bare question and no template, we with everything behind the
    last separator, which is what the repair pass computes too; it prefills behind one dummy token, we behind the
    shared prefix; it leaves the first chunk out always, we leave out what is exact already; it recomputes layer 0 for
    all tokens; and its reordering of chunks is left out, because it hurts chunks of fixed size.
    """

    name = "infoflow"

    def __init__(self, layers: Sequence[int] | None = None) -> None:
        """Score at `layers`, or at the published depths."""
        self._layers = layers

    def score(self, context: SelectionContext) -> torch.Tensor:
        """See `Scored.score`."""
        n_layers = context.spec.n_layers
        layers = layers_at(n_layers, DEPTHS) if self._layers is None else named_layers(self._layers, n_layers)
        return context.attention(layers, NORM).mean(0)
