"""A prompt's stitched rows in one prefill variant: what the methods that are compared on it share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from engine import Model, Plan
from engine.passes import PassMemo
from engine.policies import Policy
from engine.rows import Base
from engine.variants import Variant
from quality.choices import Neighbours


@dataclass(frozen=True)
class Stitched:
    """The base of a prompt in one variant, what selection passes over it have found, and what it cost."""

    variant: Variant
    neighbours: Neighbours
    plan: Plan
    base: Base
    load_s: float
    stitch_s: float
    passes: PassMemo = field(default_factory=PassMemo)

    def select(self, model: Model, policy: Policy, budget: float) -> tuple[torch.Tensor, float]:
        """Positions to repair, and the seconds that it takes to choose them for one who shares no pass."""
        saved, begin = self.passes.saved_s, time.perf_counter()
        repair = model.select(
            self.plan,
            self.base,
            policy,
            budget,
            first_chunk_exact=self.variant.first_chunk_exact,
            fused=self.variant.fused,
            passes=self.passes,
        )
        return repair, time.perf_counter() - begin + self.passes.saved_s - saved
