"""`full`: everything is repaired."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.policies.spend import n_tokens_of

if TYPE_CHECKING:
    from engine.selection import SelectionContext


class FullPolicy:
    """Every chunk token whose row is not exact already, whatever the budget: equals a full prefill, at its price.

    The upper bound of every comparison, and the check of the operator.
    """

    name = "full"
    layout = "reordered"

    def select(self, context: SelectionContext, budget: float) -> torch.Tensor:
        """See `Policy.select`."""
        n_tokens_of(context, budget)
        return context.eligible.nonzero()[:, 0]
