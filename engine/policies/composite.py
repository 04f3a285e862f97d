"""`composite`: nothing is repaired, and nothing is moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.policies.none import NonePolicy
from schemas.errors import InputError

if TYPE_CHECKING:
    from engine.selection import SelectionContext


class CompositePolicy(NonePolicy):
    """Every chunk keeps positions 0 … l-1 behind the prefix, the question starts behind the longest; P is empty.

    Source: TurboRAG's *composite positions* (arXiv 2410.07590), without its fine-tuning. The layout is made by
    `engine.composite_plan(plan)`, whose stitch keeps the chunks where they were prefilled; this policy only says so
    (`layout`). Where the public code differs: chunk text stands between document marks there and no separators exist;
    here the prompt's separators come behind the last chunk.
    """

    name = "composite"
    layout = "composite"

    def select(self, context: SelectionContext, budget: float) -> torch.Tensor:
        """See `Policy.select`.

        Raises:
            InputError: the plan is not composite: its answer would be that of `none` under another name.
        """
        if not context.plan.composite:
            raise InputError("policy composite needs a plan of its own layout; make it with engine.composite_plan")
        return super().select(context, budget)
