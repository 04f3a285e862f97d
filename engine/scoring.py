"""The question pass: how much the question's rows attend to each chunk token, at chosen layers.

Open rows (separators and question) run over the stitched base as in a plain reuse; at each layer that is asked for,
the attention of the question's rows is reduced to one number per token, block of rows by block of rows, so that no
`[heads, rows, tokens]` of a long prompt is ever held. After the last of those layers the pass stops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.hf_adapter import Enough
from engine.passes import PassRows
from engine.rows import Base

BLOCK_ELEMENTS = 1 << 22  # of attention that are held at a time


@dataclass(frozen=True)
class Reduction:
    """From attention `[Hq, rows, T]` to a number per token.

    `per_block` is summed over blocks of question rows, then `finish` (given the sum `[T]` and the number of question
    rows) ends it. `name` tells equal reductions apart.
    """

    name: str
    per_block: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[torch.Tensor, int], torch.Tensor]


NORM = Reduction("norm", lambda a: a.mean(0).square_().sum(0), lambda total, _: total.sqrt_())
SUM = Reduction("sum", lambda a: a.sum((0, 1)), lambda total, _: total)
MEAN = Reduction("mean", lambda a: a.mean(0).sum(0), lambda total, rows: total / rows)


class ScoringRows(PassRows):
    """A question pass that collects `scores[layer] [T]`, T the rows of the base, and then stops."""

    def __init__(
        self,
        base: Base,
        positions: torch.Tensor,
        n_question: int,
        layers: Sequence[int],
        reduction: Reduction,
        block_elements: int = BLOCK_ELEMENTS,
    ) -> None:
        """For the open `positions [S]` of a plan, whose last `n_question` are the question's."""
        super().__init__(base, positions)
        self._block_elements = block_elements
        self._n_question, self._reduction = n_question, reduction
        self._layers, self._last = frozenset(layers), max(layers)
        self.scores: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """See `RowSet.attend`."""
        if layer in self._layers:
            self.scores[layer] = self._score(layer, q[:, -self._n_question :], scale)
        if layer == self._last:
            raise Enough
        return super().attend(layer, q, scale, window)

    def _score(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of `q [Hq, rows, D]` over everything before each row, reduced for the base's rows."""
        n_query_heads, n_rows, _ = q.shape
        base, own = self.base_k[layer], self.now[0]
        n_heads, n_keys, _ = base.shape
        q_positions = self.positions[-n_rows:]
        per_row = n_query_heads * (n_keys + own.shape[1])
        step = max(1, self._block_elements // per_row)
        total = torch.zeros(n_keys, dtype=torch.float32, device=q.device)
        for start in range(0, n_rows, step):
            block = q[:, start : start + step]
            packed = block.reshape(n_heads, -1, q.shape[2])
            far = torch.matmul(packed, base.mT).float().view(n_query_heads, -1, n_keys)  # all of it is earlier
            near = torch.matmul(packed, own.mT).float().view(n_query_heads, -1, own.shape[1])
            later = self.positions[None, :] > q_positions[start : start + step, None]
            near = near.masked_fill_(later.to(q.device), float("-inf"))
            weights = torch.cat([far, near], -1).mul_(scale).softmax(-1)
            total += self._reduction.per_block(weights[..., :n_keys])
        return self._reduction.finish(total, n_rows)
