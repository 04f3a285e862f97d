"""What every policy is, and the half that most of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from engine.policies.spend import n_tokens_of, top_tokens

if TYPE_CHECKING:
    from engine.selection import SelectionContext


@runtime_checkable
class Policy(Protocol):
    """Chooses the positions of a prompt that are repaired.

    Attributes:
        name: as in the registry.
        layout: `reordered`: chunks are rotated to where they stand in the prompt; `composite`: the prompt is to be
            planned with `engine.composite_plan`.
    """

    name: str
    layout: str

    def select(self, context: SelectionContext, budget: float) -> torch.Tensor:
        """Positions to repair: int64, sorted, each a chunk token whose row is not exact already.

        Args:
            context: the prompt.
            budget: share of all chunk tokens that may be computed again, 0 to 1.
        """


@runtime_checkable
class Scored(Protocol):
    """A policy whose choice rests on one number per token."""

    def score(self, context: SelectionContext) -> torch.Tensor:
        """`[n_ctx]` fp32, larger is more urgent; meaningless where `context.eligible` is False."""


class ScoredPolicy(ABC):
    """Spends the budget on the tokens with the highest scores, wherever they are."""

    name: str
    layout = "reordered"

    @abstractmethod
    def score(self, context: SelectionContext) -> torch.Tensor:
        """See `Scored.score`."""

    def select(self, context: SelectionContext, budget: float) -> torch.Tensor:
        """See `Policy.select`."""
        n = n_tokens_of(context, budget)
        return top_tokens(self.score(context), context.eligible, n) if n else torch.empty(0, dtype=torch.int64)
