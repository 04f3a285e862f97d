"""`fusionrag`: attention of the question at the last layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.policies.interface import ScoredPolicy
from engine.policies.spend import n_tokens_of, top_tokens
from engine.scoring import SUM

if TYPE_CHECKING:
    from engine.selection import SelectionContext


class FusionRagPolicy(ScoredPolicy):
    """score(t) = Σ over heads h and question rows i of A^{L-1}[h, i, t]: attention at the last layer, summed.

    With `group` the unit is a run of so many tokens of a chunk, and its score the highest in it. Source: FusionRAG
    (arXiv 2601.12904, qiyuxinlin/FusionRAG), its selector alone: the offline fusion of chunks is a prefill variant.

    Where the public code differs: it decodes and splits text on "Question: " and may score other ids than it serves,
    and runs the text from there on only; ours are the ids behind the last separator. The paper words the softmax per
    chunk, so that a score does not depend on where its chunk stands; the code, and we, take it over all keys.
    """

    name = "fusionrag"

    def __init__(self, group: int = 1) -> None:
        """Choose single tokens, or whole groups."""
        self._group = group

    def score(self, context: SelectionContext) -> torch.Tensor:
        """See `Scored.score`."""
        scores = context.attention([context.spec.n_layers - 1], SUM)[0]
        if self._group > 1:
            for chunk in context.chunks:
                for start in range(chunk.start, chunk.end, self._group):
                    group = scores[start : min(start + self._group, chunk.end)]
                    group.fill_(float(group.max()))
        return scores

    def select(self, context: SelectionContext, budget: float) -> torch.Tensor:
        """See `Policy.select`."""
        n = n_tokens_of(context, budget)
        if not n:
            return torch.empty(0, dtype=torch.int64)
        scores = self.score(context).double()
        scores -= torch.arange(len(scores)) * 1e-12  # members of a group are equal: take them in order
        return top_tokens(scores, context.eligible, n)
