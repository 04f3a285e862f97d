"""`none`: nothing is repaired."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.policies.spend import n_tokens_of

if TYPE_CHECKING:
    from engine.selection import SelectionContext


class NonePolicy:
    """The stitched rows as they are: P is empty, whatever the budget.

    Source: TurboRAG's *reordered positions* (arXiv 2410.07590), without its fine-tuning. Its code rotates the whole
    cache again at every step; ours once.
    """

    name = "none"
    layout = "reordered"

    def select(self, context: SelectionContext, budget: float) -> torch.Tensor:
        """See `Policy.select`."""
        n_tokens_of(context, budget)
        return torch.empty(0, dtype=torch.int64)
