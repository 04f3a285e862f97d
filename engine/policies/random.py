"""`random`: the control."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.policies.interface import ScoredPolicy

if TYPE_CHECKING:
    from engine.selection import SelectionContext


class RandomPolicy(ScoredPolicy):
    """Tokens drawn without replacement: what any policy must beat.

    The draw depends on the seed and the length of the prompt only, so that it is the same again.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        """Draw by `seed`."""
        self._seed = seed

    def score(self, context: SelectionContext) -> torch.Tensor:
        """See `Scored.score`."""
        return torch.rand(context.n_ctx, generator=torch.Generator().manual_seed(self._seed))
