"""`prophet`: mean attention of the question over all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.policies.interface import ScoredPolicy
from engine.scoring import MEAN

if TYPE_CHECKING:
    from engine.selection import SelectionContext


class ProphetPolicy(ScoredPolicy):
    """score(t) = mean over all layers l, heads h and question rows i of A^l[h, i, t].

    The softmax runs over all keys that a row sees. Source: ProphetKV (arXiv 2602.02579), as third parties describe
    it: there is no code by its authors. The full question pass needs the rows of every layer before any repair.
    """

    name = "prophet"

    def score(self, context: SelectionContext) -> torch.Tensor:
        """See `Scored.score`."""
        return context.attention(range(context.spec.n_layers), MEAN).mean(0)
