"""Position-exact attention over disjoint sets of keys, merged by their log-sum-exp.

A set is `(k [H, T, D], v [H, T, D], mask)`. The mask says which keys each query row may see and is made once per
forward pass, for all layers, by `position_mask`: it is cut into tiles, so that what nobody may see is never
computed and what everybody may see is computed without a mask.

On a CPU every tile is one call of aten's flash kernel, which returns the natural log-sum-exp. The G query heads of
a kv head are packed as query rows of that head: no key is copied, and one pass over the keys serves all G.
Known traps of that kernel, each handled here and held by a test: an empty key set kills the process; a row that
sees nothing comes back with log-sum-exp 0; its mask must have the dtype of the query; `is_causal` is top-left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

QUERY_BLOCK = 128  # query rows per tile; fewer rows waste less on keys that only the last of them may see
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, eq=False)
class Tile:
    """Query rows [q_start, q_end) against keys [k_start, k_end); everything seen where `hidden` is None."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    hidden: torch.Tensor | None = None  # [q rows, keys] bool
    _bias: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False)

    def bias(self, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """`[G * q rows, keys]`: 0 where seen, -inf where hidden; made on first use and kept for the other layers."""
        if self.hidden is None:
            return None
        if (groups, dtype) not in self._bias:
            bias = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
            self._bias[groups, dtype] = bias.masked_fill_(self.hidden, float("-inf")).repeat(groups, 1)
        return self._bias[groups, dtype]

    def blind(self) -> torch.Tensor | None:
        """`[q rows]` bool: rows that see no key of this tile; None where every row sees one."""
        rows = None if self.hidden is None else self.hidden.all(1)
        return rows if rows is not None and bool(rows.any()) else None


@dataclass(frozen=True, eq=False)
class PositionMask:
    """Which of `n_keys` keys each of `n_queries` query rows may see. Valid for every layer of one forward pass."""

    n_queries: int
    n_keys: int
    tiles: tuple[Tile, ...]
    causal: bool = False  # the plain lower triangle: S == T, key i is hidden from row j < i


KeySet = tuple[torch.Tensor, torch.Tensor, "PositionMask | torch.Tensor | None"]


def later(q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
    """`[S, T]` bool: True where the key lies after the query and is hidden from it."""
    return k_pos[None, :] > q_pos[:, None]


def position_mask(q_pos: torch.Tensor, k_pos: torch.Tensor) -> PositionMask | None:
    """Plan the tiles of a set; None where every row may see every key.

    Args:
        q_pos: `[S]` int64 absolute positions of the query rows, any order (ascending is fastest).
        k_pos: `[T]` int64 absolute positions of the keys, any order (ascending is fastest).
    """
    n_queries, n_keys = len(q_pos), len(k_pos)
    if not n_queries or not n_keys or int(k_pos.max()) <= int(q_pos.min()):
        return None
    if n_queries == n_keys and bool((q_pos == k_pos).all()) and bool((k_pos.diff() > 0).all()):
        return PositionMask(n_queries, n_keys, tuple(_tiles(q_pos, k_pos)), causal=True)
    return PositionMask(n_queries, n_keys, tuple(_tiles(q_pos, k_pos)))


def _tiles(q_pos: torch.Tensor, k_pos: torch.Tensor) -> list[Tile]:
    ascending = bool((k_pos.diff() >= 0).all())
    tiles = []
    for start in range(0, len(q_pos), QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, len(q_pos))
        rows = q_pos[start:end]
        seen_by_all, seen_by_any = 0, len(k_pos)
        if ascending:
            seen_by_all = int(torch.searchsorted(k_pos, rows.min(), right=True))
            seen_by_any = int(torch.searchsorted(k_pos, rows.max(), right=True))
        if seen_by_all:
            tiles.append(Tile(start, end, 0, seen_by_all))
        if seen_by_any > seen_by_all:
            hidden = later(rows, k_pos[seen_by_all:seen_by_any])
            tiles.append(Tile(start, end, seen_by_all, seen_by_any, hidden))
    return tiles


def attend(q: torch.Tensor, key_sets: Sequence[KeySet], scale: float) -> torch.Tensor:
    """Softmax attention of every query row over the union of the key sets.

    Args:
        q: `[Hq, S, D]`, rotated; Hq = G * H, the G heads of a kv head side by side.
        key_sets: `(k [H, T, D], v [H, T, D], mask)`, rotated keys, D contiguous, any other strides. The mask is
            None (all seen), a `PositionMask`, or a bool tensor `[S, T]` with True = hidden. T may be 0.
        scale: factor on the scores.

    Returns:
        `[Hq, S, D]` in the dtype of `q`. A row that sees no key at all is zero.
    """
    sets = [entry for entry in key_sets if entry[0].shape[1]]  # an empty set kills the process in aten
    n_rows = q.shape[1]
    if not sets or not n_rows:
        return torch.zeros_like(q)
    if len(sets) == 1 and isinstance(sets[0][2], PositionMask) and sets[0][2].causal:
        return _causal(q, sets[0][0], sets[0][1], scale)
    parts: list[tuple[Tile, torch.Tensor, torch.Tensor]] = []
    for k, v, mask in sets:
        for tile in _tiles_of(mask, n_rows, k.shape[1]):
            out, lse = _one_tile(q, k, v, tile, scale)
            parts.append((tile, out, lse))
    if len(parts) == 1 and parts[0][1].shape[1] == n_rows:
        return parts[0][1].to(q.dtype)
    out = torch.zeros(q.shape, dtype=parts[0][1].dtype, device=q.device)
    for start, end in _row_ranges(parts):
        covering = [
            (part[:, start - tile.q_start : end - tile.q_start], lse[:, start - tile.q_start : end - tile.q_start])
            for tile, part, lse in parts
            if tile.q_start <= start and end <= tile.q_end
        ]
        if covering:
            out[:, start:end] = merge_states(*zip(*covering, strict=True))[0]
    return out.to(q.dtype)


def merge_states(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint key sets into attention over their union; order does not matter.

    Args:
        outs: each `[..., S, D]`.
        lses: each `[..., S]`, natural log; -inf where a row saw nothing.

    Returns:
        `out [..., S, D]` and `lse [..., S]`; zero and -inf for a row that saw nothing in any set.
    """
    if len(outs) == 1:
        return outs[0], lses[0]
    lse = torch.stack(list(lses))
    total = torch.logsumexp(lse, 0)
    weight = (lse - torch.where(total.isinf(), 0.0, total)).exp()  # a row that saw nothing has weight 0 everywhere
    out = outs[0] * weight[0, ..., None]
    for part, share in zip(outs[1:], weight[1:], strict=True):
        out = out.addcmul_(part, share[..., None])
    return out, total


def _tiles_of(mask: PositionMask | torch.Tensor | None, n_queries: int, n_keys: int) -> Sequence[Tile]:
    if mask is None:
        return [Tile(0, n_queries, 0, n_keys)]
    if isinstance(mask, torch.Tensor):
        return [Tile(0, n_queries, 0, n_keys, mask)]
    assert (mask.n_queries, mask.n_keys) == (n_queries, n_keys), "checked by kernels.api"
    return mask.tiles


def _row_ranges(parts: Sequence[tuple[Tile, torch.Tensor, torch.Tensor]]) -> list[tuple[int, int]]:
    cuts = sorted({cut for tile, _, _ in parts for cut in (tile.q_start, tile.q_end)})
    return list(pairwise(cuts))


def _one_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out [Hq, rows, D]` and `lse [Hq, rows]` of one tile."""
    n_query_heads, n_heads, n_rows = q.shape[0], k.shape[0], tile.q_end - tile.q_start
    groups = n_query_heads // n_heads
    packed = q[:, tile.q_start : tile.q_end].reshape(n_heads, groups * n_rows, -1)
    keys, values = k[:, tile.k_start : tile.k_end], v[:, tile.k_start : tile.k_end]
    bias = tile.bias(groups, q.dtype)
    if q.device.type == "cpu":
        mask = None if bias is None else bias[None, None]
        out, lse = _flash_cpu(packed[None], keys[None], values[None], 0.0, False, attn_mask=mask, scale=scale)
        out, lse = out[0], lse[0]
    else:
        out, lse = _plain(packed, keys, values, bias, scale)
    out, lse = out.reshape(n_query_heads, n_rows, -1), lse.reshape(n_query_heads, n_rows)
    blind = tile.blind()
    if blind is not None:
        lse = lse.masked_fill(blind, float("-inf"))
    return out, lse


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with log-sum-exp in ordinary torch operations, scores in fp32 or better; any device."""
    wide = torch.promote_types(q.dtype, torch.float32)
    score = torch.matmul(q.to(wide), k.to(wide).mT).mul_(scale)
    if bias is not None:
        score += bias
    lse = torch.logsumexp(score, -1)
    weight = (score - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp_()
    return torch.matmul(weight, v.to(wide)), lse


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Full prefill: S == T, the plain lower triangle, one call."""
    if q.device.type == "cpu":
        result: torch.Tensor = _flash_cpu(q[None], k[None], v[None], 0.0, True, scale=scale)[0][0]
        return result
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
    )
    return out[0]
