"""Chunk prefill: many chunks in one forward pass, each seeing the shared prefix and itself.

packed ids        |- chunk 0 -|- chunk 1 -|-- chunk 2 --|      one row, no padding
positions          p .. p+T0   p .. p+T1   p .. p+T2           p = length of the prefix
may see            prefix, and the part of the own chunk that is not later
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.capture import Capture, rotate_back, tables_at
from engine.hf_adapter import HfModel
from engine.rows import Base, KvRows, Part
from engine.smoothed import Smoothed
from engine.turns import Turns
from kernels import RopeTables, attend, position_mask
from kernels.reference.attention import KeySet
from schemas.errors import Cancelled

_PREFIXES = 4  # prefixes whose rows are kept; a process normally has one
_PACE_TOKENS = 64  # a pass of fewer tokens says little of the pace


@dataclass(frozen=True, eq=False)
class PrefixRows:
    """Rows of the shared prefix at positions 0 ..: `k` (rotated) and `v`, each `[L, H, P, D]`."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def n_tokens(self) -> int:
        """P."""
        return int(self.k.shape[2])


class PackedChunks:
    """The `RowSet` of one packed pass; collects the chunks' rows in canonical form."""

    def __init__(self, prefix: PrefixRows, lens: Sequence[int], capture: Capture, tables: RopeTables) -> None:
        n_layers, n_heads, _, width = prefix.k.shape
        self._prefix, self._capture, self._tables = prefix, capture, tables
        self._spans = list(_spans(lens))
        self.positions = torch.cat([torch.arange(n) for n in lens]) + prefix.n_tokens
        self._masks = [position_mask(torch.arange(n), torch.arange(n)) for n in lens]
        empty = [[torch.empty(n_layers, n_heads, n, width, dtype=prefix.k.dtype) for n in lens] for _ in ("k", "v")]
        self._k, self._v = empty
        self._now: tuple[torch.Tensor, torch.Tensor] | None = None
        if not capture.hooked:
            final_length = int(self.positions.max()) + 1
            self._cos, self._sin = tables_at(tables, self.positions, final_length, prefix.k.device)

    def keep_keys(self, layer: int, k: torch.Tensor) -> None:
        """Take a layer's keys before RoPE, `[H, S, D]`: the sink of `Capture.into`."""
        for (start, end), out in zip(self._spans, self._k, strict=True):
            out[layer] = k[:, start:end]

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `RowSet.store`."""
        if not self._capture.hooked:
            table = self._tables.table_of_layer[layer]
            self.keep_keys(layer, rotate_back(k, self._cos[table], self._sin[table], self._tables.layout))
        for (start, end), out in zip(self._spans, self._v, strict=True):
            out[layer] = v[:, start:end]
        self._now = k, v

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """See `RowSet.attend`. Windows shorter than a chunk are refused at load."""
        assert self._now is not None, "store comes first"
        k, v = self._now
        out = torch.empty_like(q)
        for (start, end), mask in zip(self._spans, self._masks, strict=True):
            sets: list[KeySet] = [
                (self._prefix.k[layer], self._prefix.v[layer], None),
                (k[:, start:end], v[:, start:end], mask),
            ]
            out[:, start:end] = attend(q[:, start:end], sets, scale)
        return out

    def rows(self) -> list[KvRows]:
        """The chunks' rows, after the pass."""
        return [KvRows(k, v) for k, v in zip(self._k, self._v, strict=True)]


class Prefixes:
    """The rows of what stands in front of everything, computed once; a few of them are kept."""

    def __init__(self, hf: HfModel, turns: Turns, like: torch.Tensor) -> None:
        """Rows are like `like [L, H, 0, D]`."""
        self._hf, self._turns, self._like = hf, turns, like
        self._kept: OrderedDict[tuple[int, ...], PrefixRows] = OrderedDict()

    def rows(self, ids: tuple[int, ...]) -> PrefixRows:
        """The prefix's rows, computed once. An empty one is of no rows."""
        if not ids:
            return PrefixRows(self._like, self._like)
        with self._turns.turn():
            if ids in self._kept:
                self._kept.move_to_end(ids)
                return self._kept[ids]
            rows = Base(Part(self._like, len(ids))).open(0)
            positions = torch.arange(len(ids))
            rows.begin(positions)
            self._hf.run(torch.tensor(ids), positions, rows)
            k, v = rows.own
            self._kept[ids] = PrefixRows(k, v)
            while len(self._kept) > _PREFIXES:
                self._kept.popitem(last=False)
            return self._kept[ids]


class ChunkPrefill:
    """Computes chunks behind what stands in front of them, several in one pass.

    Attributes:
        pace_s: seconds per token of the passes that an answer waited for.
    """

    def __init__(self, hf: HfModel, turns: Turns, capture: Capture, tables: RopeTables) -> None:
        self._hf, self._turns, self._capture, self._tables = hf, turns, capture, tables
        self.pace_s = Smoothed()

    def behind(
        self,
        prefix: PrefixRows,
        chunks: Sequence[Sequence[int]],
        batch_tokens: int,
        *,
        background: bool,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[KvRows]:
        """Rows of each chunk in canonical form; each pass, of at most `batch_tokens`, is one turn.

        Raises:
            Cancelled: `cancelled`, asked before every pass, said yes.
        """
        done: list[KvRows] = []
        for batch in batches([len(chunk) for chunk in chunks], batch_tokens):
            if cancelled():
                raise Cancelled("the request was given up while fresh chunks were computed")
            members = [chunks[n] for n in batch]
            packed = PackedChunks(prefix, [len(chunk) for chunk in members], self._capture, self._tables)
            ids = torch.tensor([token for chunk in members for token in chunk])
            with self._turns.turn(background=background), self._capture.into(packed.keep_keys):
                begin_s = time.perf_counter()
                self._hf.run(ids, packed.positions, packed)
                if not background and len(ids) >= _PACE_TOKENS:
                    self.pace_s.note((time.perf_counter() - begin_s) / len(ids))
            done += packed.rows()
        return done


def batches(lens: Sequence[int], batch_tokens: int) -> Iterator[range]:
    """Runs of chunks, in order, of at most `batch_tokens` tokens each; a longer chunk is a batch of its own."""
    start, total = 0, 0
    for n, length in enumerate(lens):
        if n > start and total + length > batch_tokens:
            yield range(start, n)
            start, total = n, 0
        total += length
    if lens:
        yield range(start, len(lens))


def _spans(lens: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for length in lens:
        yield start, start + length
        start += length
