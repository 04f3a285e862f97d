"""How a budget is spent: on single tokens, or on contiguous blocks.

chunk        |- head -|- 1 -|- 2 -|- 3 -|- 4 -|- 5 .. |      blocks of `size` tokens, the last one shorter
taken            x             x     x                       a run of blocks: its rows read fresh neighbours
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from schemas.errors import InputError

if TYPE_CHECKING:
    from engine.plan import Segment
    from engine.selection import SelectionContext


def n_tokens_of(context: SelectionContext, budget: float) -> int:
    """Tokens that a budget allows: a share of all chunk tokens, at most those that are not exact already.

    Raises:
        InputError: the budget is not a share.
    """
    if not 0.0 <= budget <= 1.0:
        raise InputError(f"the budget is {budget}; expected the share of chunk tokens to repair, 0 to 1")
    return min(round(budget * context.n_chunk_tokens), int(context.eligible.sum()))


def top_tokens(scores: torch.Tensor, eligible: torch.Tensor, n: int) -> torch.Tensor:
    """The `n` eligible positions with the highest `scores [n_ctx]`, sorted."""
    best = scores.masked_fill(~eligible, float("-inf")).topk(n).indices
    return best.sort().values


def head_tokens(chunks: Sequence[Segment], n: int) -> torch.Tensor:
    """The first tokens of every chunk, equally many, `n` in all; what short chunks cannot take goes to the others."""
    shares = [0] * len(chunks)
    order = sorted(range(len(chunks)), key=lambda number: len(chunks[number]))
    for place, number in enumerate(order):
        shares[number] = min(len(chunks[number]), n // (len(order) - place))
        n -= shares[number]
    spans = [torch.arange(c.start, c.start + share) for c, share in zip(chunks, shares, strict=True)]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class BlockRule:
    """How blocks are chosen.

    Attributes:
        size: tokens of a block.
        heads: take every chunk's head block first (the chunks with the highest scores first, if not all fit).
        floor: tokens that every chunk gets before the rest is spent freely; its head counts.
        run_bonus: a block behind a taken one is worth `1 + run_bonus` times its score.
        worth: how much of a block's score counts, given its number in the chunk and which share of what it reads is
            fresh; None: all of it.
        reads: weight of earlier block j in what block b reads, given `b - j` and whether j is a head; with `worth`.
    """

    size: int = 16
    heads: bool = True
    floor: int = 0
    run_bonus: float = 0.0
    worth: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    reads: Callable[[torch.Tensor, bool], torch.Tensor] | None = None


def spend_on_blocks(scores: torch.Tensor, chunks: Sequence[Segment], n: int, rule: BlockRule) -> torch.Tensor:
    """Exactly `n` positions (or all there are), sorted, block by block; the last block may be cut short.

    Args:
        scores: `[n_ctx]` per position, not negative.
        chunks: where the budget may be spent.
        n: tokens.
        rule: how blocks are chosen.
    """
    if not n or not chunks:
        return torch.empty(0, dtype=torch.int64)
    purse = _Purse(scores, chunks, n, rule)
    by_score = sorted(range(len(chunks)), key=lambda number: -float(purse.total[number]))
    if rule.heads:
        for number in by_score:
            purse.take(purse.head_of[number])
    for number in by_score:
        while purse.left and purse.spent_on[number] < min(rule.floor, len(chunks[number])):
            purse.take(purse.best(number))
    while purse.left and not bool(purse.taken.all()):
        purse.take(purse.best())
    return torch.cat(purse.spans).sort().values


class _Purse:
    """The blocks of a prompt, what each is worth now, and the tokens that are left to spend."""

    def __init__(self, scores: torch.Tensor, chunks: Sequence[Segment], n: int, rule: BlockRule) -> None:
        self.left, self._rule = n, rule
        self.spans: list[torch.Tensor] = []
        self.spent_on = [0] * len(chunks)
        blocks = [
            (number, start, min(start + rule.size, chunk.end))
            for number, chunk in enumerate(chunks)
            for start in range(chunk.start, chunk.end, rule.size)
        ]
        self._start, self._end = [b[1] for b in blocks], [b[2] for b in blocks]
        self._chunk = torch.tensor([b[0] for b in blocks])
        sums = torch.cat([torch.zeros(1, dtype=torch.float64), scores.double().cumsum(0)])
        self._score = sums[torch.tensor(self._end)] - sums[torch.tensor(self._start)]
        self.head_of = [int(number) for number in torch.searchsorted(self._chunk, torch.arange(len(chunks)))]
        self._number = torch.arange(len(blocks)) - torch.tensor(self.head_of)[self._chunk]  # within the chunk
        self.total = torch.zeros(len(chunks), dtype=torch.float64).index_add_(0, self._chunk, self._score)
        self.taken = torch.zeros(len(blocks), dtype=torch.bool)
        self._fresh = torch.zeros(len(blocks), dtype=torch.float64)  # of what it reads, already fresh
        self._all = torch.zeros(len(blocks), dtype=torch.float64)  # of what it reads
        if rule.reads is not None:
            for block in range(len(blocks)):
                self._read_by_later(block, self._all)

    def best(self, chunk: int | None = None) -> int:
        """The block worth most that is not taken, in one chunk or in all."""
        worth = self._score
        if self._rule.worth is not None:
            worth = worth * self._rule.worth(self._number, self._fresh, self._all)
        if self._rule.run_bonus:
            behind = torch.zeros_like(self.taken)
            behind[1:] = self.taken[:-1] & (self._number[1:] > 0)
            worth = worth * (1.0 + self._rule.run_bonus * behind)
        closed = self.taken if chunk is None else self.taken | (self._chunk != chunk)
        return int(worth.masked_fill(closed, float("-inf")).argmax())

    def take(self, block: int) -> None:
        """Spend on a block, as far as the budget goes."""
        n = min(self._end[block] - self._start[block], self.left)
        if not n:
            return
        self.taken[block] = True
        self.left -= n
        self.spent_on[int(self._chunk[block])] += n
        self.spans.append(torch.arange(self._start[block], self._start[block] + n))
        if self._rule.reads is not None:
            self._read_by_later(block, self._fresh)

    def _read_by_later(self, block: int, into: torch.Tensor) -> None:
        """Add the weight of `block` to all later blocks of its chunk."""
        assert self._rule.reads is not None
        end = int(torch.searchsorted(self._chunk, self._chunk[block], right=True))
        distance = torch.arange(1, end - block, dtype=torch.float64)
        into[block + 1 : end] += self._rule.reads(distance, int(self._number[block]) == 0)
