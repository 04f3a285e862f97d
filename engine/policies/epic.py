"""`epic`: the heads of the chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.policies.spend import head_tokens, n_tokens_of

if TYPE_CHECKING:
    from engine.selection import SelectionContext


class EpicPolicy:
    """score(t) = 1 if t is among the first N tokens of a chunk other than the first, else 0.

    Source: EPIC, LegoLink-N (arXiv 2410.15332, DerekHJH/epic, Apache-2.0). A chunk computed apart grows an attention
    sink of its own; recomputing its head takes it away. N is a count there, 2 to 32; `n_head` gives it, and without it
    N follows from the budget, equal for all chunks. Either way the budget is never exceeded.

    Where the public code differs: it keeps a BOS token in front of every chunk, prefilled and counted with it, and
    slices `[1:]` on the assumption that the tokenizer adds one; ours have none. Its mask is exact, as ours.
    """

    name = "epic"
    layout = "reordered"

    def __init__(self, n_head: int | None = None) -> None:
        """Repair `n_head` tokens of each chunk, or as many as the budget allows."""
        self._n_head = n_head

    def score(self, context: SelectionContext) -> torch.Tensor:
        """See `Scored.score`: falls from 1 at the head to 0 at the end of each chunk."""
        scores = torch.zeros(context.n_ctx)
        for chunk in context.chunks:
            scores[chunk.start : chunk.end] = torch.linspace(1.0, 0.0, len(chunk))
        return scores

    def select(self, context: SelectionContext, budget: float) -> torch.Tensor:
        """See `Policy.select`."""
        n = n_tokens_of(context, budget)
        if self._n_head is not None:
            n = min(n, sum(min(self._n_head, len(chunk)) for chunk in context.chunks))
        return head_tokens(context.chunks, n)
