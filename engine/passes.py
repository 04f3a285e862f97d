"""Passes that only look: their rows live for one layer and are gone, and they stop where nothing more is wanted.

A selection policy looks at how the question attends to the chunks, or at how rows change when they are computed
again. Such a pass reads a base like any request, keeps no rows of its own beyond the layer it is in, borrows no
slots, and leaves the model as soon as its last wanted layer is through.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

from engine.rows import Base
from kernels import PositionMask, attend, position_mask

Run = Callable[[torch.Tensor, torch.Tensor, "PassRows"], None]  # ids [S], positions [S], rows


class PassMemo:
    """What passes over one base found, so that policies that are compared on it need not run the same pass again.

    One memo serves one plan, its base, and one choice of what is exact in it.

    Attributes:
        saved_s: seconds that the passes took which were asked for again: what they would have cost once more.
    """

    def __init__(self) -> None:
        """Nothing found yet."""
        self.saved_s = 0.0
        self._found: dict[Hashable, tuple[torch.Tensor, float]] = {}

    def get(self, asked: Hashable, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `run` gives, or gave when the same was asked before; a copy, which the caller may change."""
        if asked in self._found:
            self.saved_s += self._found[asked][1]
        else:
            begin = time.perf_counter()
            found = run()
            self._found[asked] = found, time.perf_counter() - begin
        return self._found[asked][0].clone()


class PassRows:
    """The `RowSet` of a pass that keeps nothing: rows at `positions` take the place of the base's."""

    def __init__(self, base: Base, positions: torch.Tensor) -> None:
        """For one pass over rows at `positions [S]`, ascending."""
        self.base_k, self.base_v, self.base_positions = base.rows
        self.positions = positions
        self.base_mask = self._mask_of_base(torch.isin(self.base_positions, positions))
        self.own_mask: PositionMask | None = position_mask(positions, positions)
        self._now: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def now(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`k` (rotated) and `v` `[H, S, D]` of the layer that the pass is in."""
        assert self._now is not None, "store comes first"
        return self._now

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `RowSet.store`."""
        self._now = k, v

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """See `RowSet.attend`. Models whose windows are shorter than their prompts are refused at load."""
        k, v = self.now
        return attend(q, [(self.base_k[layer], self.base_v[layer], self.base_mask), (k, v, self.own_mask)], scale)

    def _mask_of_base(self, replaced: torch.Tensor) -> PositionMask | None:
        return position_mask(self.positions, self.base_positions, replaced)
