"""KV rows and the set of them that a forward pass sees.

    base part    slots 0 .. n_base      prefix and chunk rows, rotated; shared, never written after the stitch
    own part     the slots after them   rows computed for one request: separators, question, answer, repaired rows

A row is known by its absolute position, not by its slot. What a query may see is decided by positions alone: every
row that is not later than the query. A row that is computed again takes the place of the base row at its position
for this request only: the request notes which rows it has replaced, and they are hidden from its queries.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.sequence import OrderedRows, ordered_rows
from kernels import PositionMask, attend, later, position_mask
from schemas.fingerprint import Fingerprint
from schemas.kv_artifact import Buffer


@dataclass(frozen=True, eq=False)
class KvRows:
    """One chunk's rows in canonical form: `k` (before RoPE) and `v`, each `[L, H, T, D]`, contiguous, on the CPU."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def n_tokens(self) -> int:
        """T."""
        return int(self.k.shape[2])

    def to_bytes(self) -> tuple[memoryview, memoryview]:
        """The raw bytes of `k` and `v`, as `KvArtifact` takes them; views, nothing is copied."""
        return _bytes_of(self.k), _bytes_of(self.v)

    @classmethod
    def from_bytes(cls, k: Buffer, v: Buffer, fingerprint: Fingerprint) -> KvRows:
        """Rows over the bytes of an artifact; nothing is copied, and the rows must not be written to.

        Raises:
            ValueError: the bytes are not a whole number of tokens of the fingerprint's shape.
        """
        dtype: torch.dtype = getattr(torch, fingerprint.dtype)
        width = fingerprint.n_layers * fingerprint.n_kv_heads * fingerprint.head_dim * dtype.itemsize
        if len(k) != len(v) or len(k) % width or not len(k):
            raise ValueError(
                f"k and v have {len(k)} and {len(v)} bytes; expected the same positive multiple of {width}"
            )
        shape = (fingerprint.n_layers, fingerprint.n_kv_heads, len(k) // width, fingerprint.head_dim)
        return cls(_tensor_over(k, dtype).view(shape), _tensor_over(v, dtype).view(shape))


class Part:
    """Slots for rows of all layers, filled from the front.

    Attributes:
        k, v: `[L, H, capacity, D]`, keys rotated.
        positions: `[capacity]` int64 on the CPU; the first `n` are valid.
        n: slots in use.
    """

    def __init__(self, like: torch.Tensor, capacity: int) -> None:
        """Room for `capacity` rows; layers, heads, width, dtype and device as of `like [L, H, any, D]`."""
        n_layers, n_heads, _, width = like.shape
        self.k = torch.empty(n_layers, n_heads, capacity, width, dtype=like.dtype, device=like.device)
        self.v = torch.empty_like(self.k)
        self.positions = torch.empty(capacity, dtype=torch.int64)
        self.n = 0

    @property
    def free(self) -> int:
        """Slots that are left."""
        return len(self.positions) - self.n


class Base:
    """Stitched rows that several requests may share. The free slots behind them are lent to one request at a time."""

    def __init__(self, part: Part) -> None:
        self._part, self._n = part, part.n
        self._lent, self._lock = False, threading.Lock()

    @property
    def n_rows(self) -> int:
        """Rows of the base."""
        return self._n

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`k`, `v` `[L, H, n_rows, D]`, keys rotated, and `positions [n_rows]`. Views: do not write."""
        return self._part.k[:, :, : self._n], self._part.v[:, :, : self._n], self._part.positions[: self._n]

    def open(self, room: int, *, private: bool = False) -> WorkingRows:
        """Rows for one request: the base, and its own rows, about `room` of them. Close it to give the slots back.

        Args:
            room: rows that the request will compute; more is found when it is needed.
            private: put them into memory of their own even while the slots behind the base are free: a request that
                replaces many rows is faster over a base in order of position.
        """
        if private:
            return WorkingRows([_View(self._part, self._n), _View(Part(self._part.k, room), 0)], lambda: None)
        with self._lock:
            lent, self._lent = self._lent, True
        if lent:
            shared = _View(self._part, self._n)
            return WorkingRows([shared, _View(Part(self._part.k, room), 0)], lambda: None)
        return WorkingRows([_View(self._part, self._n)], self._give_back)

    def _give_back(self) -> None:
        with self._lock:
            self._lent = False


class _View:
    """A part as one request sees it: how many rows, at which positions, and which it has replaced (its own copies)."""

    def __init__(self, part: Part, n: int) -> None:
        self.part, self.n = part, n
        self.positions = part.positions.clone()
        self.replaced = torch.zeros(len(part.positions), dtype=torch.bool)
        self.last = int(part.positions[:n].max()) if n else -1  # no row at a later position

    def mask(self, queries: torch.Tensor) -> PositionMask | None:
        """What rows at `queries` may see of it."""
        return position_mask(queries, self.positions[: self.n], self.replaced[: self.n])


class WorkingRows:
    """The `RowSet` of one request; serves any number of forward passes, one after the other."""

    def __init__(self, views: list[_View], on_close: Any) -> None:
        self._views, self._on_close = views, on_close
        self._slots = slice(0, 0)
        self._queries = torch.empty(0, dtype=torch.int64)
        self._masks: list[PositionMask | None] = []
        self._ordered: OrderedRows | None = None
        self._window_masks: dict[int, list[torch.Tensor]] = {}

    def begin(self, positions: torch.Tensor) -> None:
        """Make ready for a pass over rows at `positions [S]` (int64, CPU, no position twice)."""
        n_new = len(positions)
        self._hide(positions)
        own = self._views[-1]
        if len(own.positions) - own.n < n_new:
            own = _View(Part(own.part.k, max(n_new, 64)), 0)
            self._views.append(own)
        self._slots = slice(own.n, own.n + n_new)
        own.positions[self._slots] = positions
        own.n += n_new
        own.last = max(own.last, int(positions.max()))
        self._queries, self._window_masks = positions, {}
        self._ordered = ordered_rows(
            [(v.part.k, v.part.v, v.positions[: v.n], v.replaced[: v.n]) for v in self._views], positions
        )
        self._masks = [] if self._ordered is not None else [view.mask(positions) for view in self._views]

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `RowSet.store`."""
        own = self._views[-1].part
        own.k[layer][:, self._slots] = k
        own.v[layer][:, self._slots] = v

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """See `RowSet.attend`."""
        if window is not None and self._cuts_off(window):
            masks: Sequence[PositionMask | torch.Tensor | None] = self._windowed(window)
        elif self._ordered is not None:
            return self._ordered.attend(layer, q, scale)
        else:
            masks = self._masks
        sets = [
            (view.part.k[layer][:, : view.n], view.part.v[layer][:, : view.n], mask)
            for view, mask in zip(self._views, masks, strict=True)
        ]
        return attend(q, sets, scale)

    def first(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`k` (rotated) and `v` `[L, H, n, D]` of the first `n` slots; views."""
        part = self._views[0].part
        return part.k[:, :, :n], part.v[:, :, :n]

    @property
    def own(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`k` (rotated) and `v` `[L, H, n, D]` of the last part, as far as it is filled."""
        view = self._views[-1]
        return view.part.k[:, :, : view.n], view.part.v[:, :, : view.n]

    def close(self) -> None:
        """Give the slots behind the base back. The rows must not be used any more."""
        self._on_close()
        self._views, self._on_close = [], lambda: None

    def _hide(self, positions: torch.Tensor) -> None:
        """Rows at `positions` that exist already are replaced by those to come."""
        first = int(positions.min())
        for view in self._views:
            if first <= view.last:
                view.replaced[: view.n] |= torch.isin(view.positions[: view.n], positions)

    def _cuts_off(self, window: int) -> bool:
        """Some row lies behind the window of some query."""
        first = min(int(view.positions[: view.n].min()) for view in self._views if view.n)
        return int(self._queries.max()) - first >= window

    def _windowed(self, window: int) -> Sequence[PositionMask | torch.Tensor | None]:
        """Masks of layers that see the last `window` positions only."""
        if window not in self._window_masks:
            device = self._views[0].part.k.device
            self._window_masks[window] = []
            for view in self._views:
                keys = view.positions[: view.n]
                hidden = later(self._queries, keys) | (keys[None, :] <= self._queries[:, None] - window)
                self._window_masks[window].append((hidden | view.replaced[: view.n]).to(device))
        return self._window_masks[window]


def _bytes_of(rows: torch.Tensor) -> memoryview:
    raw: npt.NDArray[np.uint8] = rows.contiguous().view(-1).view(torch.uint8).numpy()
    return raw.data


def _tensor_over(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a buffer that may be read-only, without a copy. torch warns of those; rows are never written."""
    raw = np.frombuffer(buffer, np.uint8)
    return torch.from_numpy(np.asarray(_Memory(raw))).view(dtype)


class _Memory:
    """The memory of an array, offered as writable."""

    def __init__(self, raw: npt.NDArray[np.uint8]) -> None:
        self._raw = raw  # np.asarray keeps this object, and so the memory, alive
        self.__array_interface__ = {**raw.__array_interface__, "data": (raw.ctypes.data, False)}
