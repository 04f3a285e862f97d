"""All rows that a repair pass sees, in order of position, one layer at a time.

    base        0 1 2 3 4 5 . 7 8 9 .. 11 12        shared; positions 6 and 10 are separators
    own         3'4'6'10'12'                        computed by this pass: they replace, or fill a gap
    ordered     0 1 2 3'4'5 6'7 8 9 10'11 12'       memory for one layer or a few of its heads, used again and again

Attention over one ordered set of keys skips what is later than a query, computes no replaced row, and has no second
set to merge with: 15 % less time than the base with holes and the own rows beside it, the copy included (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from kernels import attend, position_mask

_SHARE = 0.22  # of the memory of the pass's own rows that the ordered rows may take
_MIN_QUERIES = 64  # with fewer, the copy costs more than it saves

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # k, v [L, H, n, D]; positions, replaced [n]
_Move = tuple[slice | torch.Tensor, slice | torch.Tensor]  # rows of a part, and the slots that they go to


class OrderedRows:
    """Keys and values of several parts as one sequence; a later part's row replaces an earlier one's."""

    def __init__(self, parts: Sequence[Rows], queries: torch.Tensor, n_heads: int) -> None:
        """For the pass over rows at `queries [S]`; `n_heads` kv heads are put in order at a time."""
        last = int(queries.max())
        every = torch.cat([part[2] for part in parts]).sort().values
        first = torch.ones(len(every), dtype=torch.bool)  # of the rows at one position
        first[1:] = every.diff() > 0
        positions = every[first & (every <= last)]
        self._mask = position_mask(queries, positions)
        like = parts[0][0]
        self._parts = [(k, v, _moves(at, replaced, positions, like.device)) for k, v, at, replaced in parts]
        self._k = torch.empty(n_heads, len(positions), like.shape[3], dtype=like.dtype, device=like.device)
        self._v = torch.empty_like(self._k)

    def attend(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of `q [Hq, S, D]` at a layer whose rows are stored in the parts: `[Hq, S, D]`."""
        n_heads = self._parts[0][0].shape[1]
        groups = q.shape[0] // n_heads
        out = torch.empty_like(q)
        for start in range(0, n_heads, len(self._k)):
            heads = slice(start, min(start + len(self._k), n_heads))
            k, v = self._fill(layer, heads)
            packed = slice(heads.start * groups, heads.stop * groups)
            out[packed] = attend(q[packed], [(k, v, self._mask)], scale)
        return out

    def _fill(self, layer: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        n_heads = heads.stop - heads.start
        k, v = self._k[:n_heads], self._v[:n_heads]
        for from_k, from_v, moves in self._parts:
            for rows, slots in moves:
                k[:, slots] = from_k[layer, heads][:, rows]
                v[:, slots] = from_v[layer, heads][:, rows]
        return k, v


def ordered_rows(parts: Sequence[Rows], queries: torch.Tensor) -> OrderedRows | None:
    """Ordered rows where they pay: a pass of many rows that replaces some, and has the memory to put a head in order.

    Args:
        parts: oldest first; the last one holds the rows of this pass. Keys are rotated.
        queries: positions of this pass.
    """
    if len(queries) < _MIN_QUERIES or not any(bool(replaced.any()) for *_, replaced in parts):
        return None
    n_layers, n_heads = parts[0][0].shape[:2]
    longest = sum(int((~replaced).sum()) for *_, replaced in parts)
    heads = min(n_heads, int(_SHARE * n_layers * n_heads * len(queries) / longest))
    return OrderedRows(parts, queries, heads) if heads else None


def _moves(at: torch.Tensor, replaced: torch.Tensor, positions: torch.Tensor, device: torch.device) -> list[_Move]:
    """Which rows of a part, at positions `at [n]`, go to which slots: run by run, or all in one go by index.

    Runs may hold replaced rows: a later run of the same or of a later part overwrites them.
    """
    rows = (at <= positions[-1]).nonzero()[:, 0]
    slots = torch.searchsorted(positions, at[rows])
    breaks = ((slots.diff() != 1) | (rows.diff() != 1)).nonzero()[:, 0] + 1
    if len(breaks) > len(rows) // 64:  # short runs: many small copies are slower than one by index
        rows = rows[~replaced[rows]]
        return [(rows.to(device), torch.searchsorted(positions, at[rows]).to(device))]
    cuts = [0, *breaks.tolist(), len(rows)]
    return [
        (slice(int(rows[a]), int(rows[b - 1]) + 1), slice(int(slots[a]), int(slots[b - 1]) + 1))
        for a, b in pairwise(cuts)
        if b > a
    ]
