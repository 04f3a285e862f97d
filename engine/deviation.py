"""How much rows change when they are computed again: the signal of `cacheblend`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.hf_adapter import Enough
from engine.passes import PassRows
from engine.rows import Base
from kernels import position_mask


class DeviationRows(PassRows):
    """A dense pass over all tokens behind the prefix up to one layer, whose rows are compared with the base's."""

    def __init__(self, base: Base, positions: torch.Tensor, layer: int, of: str) -> None:
        """For `positions` that cover all chunks; compared are `of` = `v` or `k` (rotated) at `layer`."""
        super().__init__(base, positions)
        self._layer, self._of = layer, of
        self.deviation = torch.zeros(0)  # [rows of the base], 0 where the pass has no row

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `RowSet.store`."""
        super().store(layer, k, v)
        if layer == self._layer:
            change = self._change(layer)
            at = torch.searchsorted(self.positions, self.base_positions).clamp_max(len(self.positions) - 1)
            computed = self.positions[at] == self.base_positions
            self.deviation = torch.where(computed, change[at], 0.0)
            raise Enough

    def _change(self, layer: int) -> torch.Tensor:
        """`[S]`: Σ over heads and dimensions of (new - old)²; 0 for rows that the base does not have."""
        new = self.now[0 if self._of == "k" else 1]
        old = (self.base_k if self._of == "k" else self.base_v)[layer]
        at = _slots(self.base_positions, self.positions)
        change = (new.float() - old[:, at.clamp_min(0)].float()).square().sum((0, 2)).cpu()
        return torch.where(at >= 0, change, 0.0)


class FilteringRows(DeviationRows):
    """A pass whose set of recomputed rows shrinks from layer to layer; rows that left it are the base's again."""

    def __init__(
        self,
        base: Base,
        positions: torch.Tensor,
        candidates: torch.Tensor,
        keep: Sequence[tuple[int, int]],
        of: str,
    ) -> None:
        """For all `positions` behind the prefix; `candidates [S]` bool may leave, the others stay to the end."""
        super().__init__(base, positions, keep[-1][0], of)
        self._candidates, self._keep = candidates, dict(keep)
        self.alive = torch.ones(len(positions), dtype=torch.bool)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `RowSet.store`."""
        PassRows.store(self, layer, k, v)
        if layer in self._keep:
            change = self._change(layer).masked_fill(~(self.alive & self._candidates), -1.0)
            best = change.topk(self._keep[layer]).indices
            self.alive = ~self._candidates
            self.alive[best] = True
            replaced = torch.isin(self.base_positions, self.positions[self.alive])
            self.base_mask = self._mask_of_base(replaced)
            self.own_mask = position_mask(self.positions, self.positions, ~self.alive)
        if layer == self._layer:
            raise Enough


def _slots(sorted_positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Where in `sorted_positions` each wanted one is; -1 where it is not."""
    at = torch.searchsorted(sorted_positions, wanted).clamp_max(len(sorted_positions) - 1)
    return torch.where(sorted_positions[at] == wanted, at, -1)
