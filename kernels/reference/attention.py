"""Position-exact attention over disjoint sets of keys, merged by their log-sum-exp.

A set is `(k [H, T, D], v [H, T, D], mask)`. The mask says which keys each query row may see; `position_mask` makes it
once per forward pass, for all layers, cut into tiles: what nobody may see is never computed, and what everybody may
see is computed without a mask.

On a CPU every tile is one call of aten's flash kernel, which returns the natural log-sum-exp. The G query heads of
a kv head are packed as query rows of that head: no key is copied, and one pass over the keys serves all G.
Known traps of that kernel, each handled here and held by a test: an empty key set kills the process; a row that
sees nothing comes back with log-sum-exp 0; its mask must have the dtype of the query; `is_causal` is top-left.
docs/log.md has what was measured and which other forms were slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise

import torch

QUERY_BLOCK = 128  # query rows per tile of a mask: 64 to 256 are equally fast, smaller and larger ones slower
BLOCK_COST = 8  # what a block more costs, in query rows: aten packs the keys again for every call
_UNPACKED_ROWS = 40  # masked tiles of so many rows take grouped heads as they are; smaller ones would be slow
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, eq=False)
class Tile:
    """Query rows [q_start, q_end) against keys [k_start, k_end); everything is seen where `hidden` is None."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    hidden: Callable[[], torch.Tensor] | None = None  # makes bool [q rows, keys], or [1, keys] for all rows; not kept
    _bias: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False)

    def bias(self, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """`[G * q rows, keys]`: 0 where seen, -inf where hidden; made on first use and kept for the other layers.

        `[1, keys]` where `hidden` is: the same for every row.
        """
        if self.hidden is None:
            return None
        if (groups, dtype) not in self._bias:
            hidden = self.hidden()
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._bias[groups, dtype] = bias.repeat(groups, 1) if len(bias) > 1 else bias
        return self._bias[groups, dtype]

    @cached_property
    def blind(self) -> torch.Tensor | None:
        """`[q rows]` bool: rows that see no key of this tile; None where every row sees one."""
        rows = None if self.hidden is None else self.hidden().all(1)
        return rows if rows is not None and bool(rows.any()) else None


@dataclass(frozen=True, eq=False)
class PositionMask:
    """Which of `n_keys` keys each of `n_queries` query rows may see. Valid for every layer of one forward pass."""

    n_queries: int
    n_keys: int
    tiles: tuple[Tile, ...]
    causal: bool = False  # the plain lower triangle: S == T, row j sees keys 0 … j


KeySet = tuple[torch.Tensor, torch.Tensor, PositionMask | torch.Tensor | None]
_Part = tuple[Tile, torch.Tensor, torch.Tensor]  # out [Hq, rows, D] and lse [Hq, rows] of one tile


def later(q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
    """`[S, T]` bool: True where the key lies after the query, and is hidden from it."""
    return k_pos[None, :] > q_pos[:, None]


def position_mask(
    q_pos: torch.Tensor, k_pos: torch.Tensor, replaced: torch.Tensor | None = None
) -> PositionMask | None:
    """Plan the tiles of one set of keys; None where every row may see every key.

    Args:
        q_pos: `[S]` int64 absolute positions of the query rows, in any order; ascending is fastest.
        k_pos: `[T]` int64 absolute positions of the keys, in any order; ascending is fastest.
        replaced: `[T]` bool: keys that nobody may see, because a repaired row has taken their place.
    """
    n_queries, n_keys = len(q_pos), len(k_pos)
    if replaced is not None and not bool(replaced.any()):
        replaced = None
    if not n_queries or not n_keys or (replaced is None and int(k_pos.max()) <= int(q_pos.min())):
        return None
    ordered = n_queries == n_keys and torch.equal(q_pos, k_pos) and bool((k_pos.diff() > 0).all())
    causal = ordered and replaced is None
    tiles = () if causal else _tiles(q_pos, k_pos, replaced)
    return PositionMask(n_queries, n_keys, tuple(tiles), causal)


def _tiles(q_pos: torch.Tensor, k_pos: torch.Tensor, replaced: torch.Tensor | None) -> list[Tile]:
    ascending = bool((k_pos.diff() >= 0).all())
    tiles: list[Tile] = []
    for start, end in pairwise(_cuts(q_pos)):
        rows = q_pos[start:end]
        seen_by_all, seen_by_any = 0, len(k_pos)
        if ascending:
            seen_by_all = int(torch.searchsorted(k_pos, rows.min(), right=True))
            seen_by_any = int(torch.searchsorted(k_pos, rows.max(), right=True))
        if seen_by_all:
            tiles += _without_replaced(start, end, seen_by_all, replaced)
        if seen_by_any > seen_by_all:
            keys = slice(seen_by_all, seen_by_any)
            hidden = partial(_hidden, rows, k_pos[keys], None if replaced is None else replaced[keys])
            if not bool(hidden().all()):
                tiles.append(Tile(start, end, seen_by_all, seen_by_any, hidden))
    return tiles


def _hidden(q_pos: torch.Tensor, k_pos: torch.Tensor, replaced: torch.Tensor | None) -> torch.Tensor:
    hidden = later(q_pos, k_pos)
    return hidden if replaced is None else hidden.logical_or_(replaced)


def _cuts(q_pos: torch.Tensor) -> list[int]:
    """Where blocks of query rows begin and end.

    Rows of a block are computed against the keys that its last row sees. So a block ends where what this wastes would
    become more than another block costs.
    """
    cuts, wasted = [0], 0
    positions = q_pos.tolist()
    for row, (before, position) in enumerate(pairwise(positions), 1):
        wasted += (row - cuts[-1]) * (position - before)  # in rows x keys
        if row - cuts[-1] >= QUERY_BLOCK or wasted > BLOCK_COST * before:
            cuts.append(row)
            wasted = 0
    return [*cuts, len(q_pos)]


def _without_replaced(q_start: int, q_end: int, n_keys: int, replaced: torch.Tensor | None) -> list[Tile]:
    """The tile of the first `n_keys` keys, which these rows all see, except those that are replaced."""
    if replaced is None:
        return [Tile(q_start, q_end, 0, n_keys)]
    kept = (~replaced[:n_keys]).nonzero()
    if not len(kept):
        return []
    first, end = int(kept[0]), int(kept[-1]) + 1
    hidden = replaced[first:end][None]
    return [Tile(q_start, q_end, first, end, (lambda: hidden) if bool(hidden.any()) else None)]


def attend(q: torch.Tensor, key_sets: Sequence[KeySet], scale: float) -> torch.Tensor:
    """Attention over the union of the key sets; arguments and result as in `kernels.api.attend`, which checks them."""
    sets = [entry for entry in key_sets if entry[0].shape[1]]  # an empty set kills the process in aten
    n_rows = q.shape[1]
    if not sets or not n_rows:
        return torch.zeros_like(q)
    masks = [mask for _, _, mask in sets]
    if len(sets) == 1 and isinstance(masks[0], PositionMask) and masks[0].causal:
        return _causal(q, sets[0][0], sets[0][1], scale)[0].to(q.dtype)
    parts: list[_Part] = []
    for k, v, mask in sets:
        if isinstance(mask, PositionMask) and mask.causal:
            parts.append((Tile(0, n_rows, 0, n_rows), *_causal(q, k, v, scale)))
            continue
        parts += [(tile, *_one_tile(q, k, v, tile, scale)) for tile in _tiles_of(mask, n_rows, k.shape[1])]
    if len(parts) == 1 and parts[0][1].shape[1] == n_rows:
        return parts[0][1].to(q.dtype)
    return _merge_tiles(parts, q)


def merge_states(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint key sets into attention over their union, in fp32 or wider; in any order.

    Args:
        outs: each `[..., S, D]`.
        lses: each `[..., S]`, natural log; -inf where a row saw nothing.

    Returns:
        `out [..., S, D]` and `lse [..., S]`; zero and -inf for a row that saw nothing in any set.
    """
    lse = torch.stack(list(lses))
    total = torch.logsumexp(lse, 0)
    weight = (lse - torch.where(total.isinf(), 0.0, total)).exp_()  # a row that saw nothing anywhere: all weights 0
    out = outs[0] * weight[0, ..., None]
    for part, share in zip(outs[1:], weight[1:], strict=True):
        out.addcmul_(part.to(out.dtype), share[..., None])
    return out, total


def _merge_tiles(parts: Sequence[_Part], q: torch.Tensor) -> torch.Tensor:
    """`[Hq, S, D]`: for every range of rows that the same tiles cover, their merged state; zero where none does."""
    out = torch.zeros_like(q)
    cuts = sorted({cut for tile, _, _ in parts for cut in (tile.q_start, tile.q_end)})
    for start, end in pairwise(cuts):
        outs, lses = [], []
        for tile, part, lse in parts:
            if tile.q_start <= start and end <= tile.q_end:
                rows = slice(start - tile.q_start, end - tile.q_start)
                outs.append(part[:, rows])
                lses.append(lse[:, rows])
        merged = _merged_out(outs, lses) if outs else None
        if cuts == [0, q.shape[1]] and merged is not None:
            return merged.to(q.dtype)
        if merged is not None:
            out[:, start:end] = merged
    return out


def _merged_out(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """`merge_states` without its log-sum-exp; two states, the case of every decode step, in a third of the time."""
    if len(outs) == 1:
        return outs[0]
    if len(outs) > 2:
        return merge_states(outs, lses)[0]
    share = torch.sigmoid(lses[1] - lses[0]).nan_to_num_(0.0)  # NaN: the row saw nothing in either, both outs are 0
    return torch.lerp(outs[0].to(share.dtype), outs[1].to(share.dtype), share[..., None])


def _tiles_of(mask: PositionMask | torch.Tensor | None, n_queries: int, n_keys: int) -> Sequence[Tile]:
    if isinstance(mask, PositionMask):
        return mask.tiles
    return [Tile(0, n_queries, 0, n_keys, None if mask is None else (lambda: mask))]


def _one_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out [Hq, rows, D]` and `lse [Hq, rows]` of one tile."""
    n_query_heads, n_heads, n_rows = q.shape[0], k.shape[0], tile.q_end - tile.q_start
    groups = n_query_heads // n_heads
    rows = q[:, tile.q_start : tile.q_end]
    packed = rows.reshape(n_heads, groups * n_rows, -1)
    keys, values = k[:, tile.k_start : tile.k_end], v[:, tile.k_start : tile.k_end]
    if q.device.type == "cpu" and n_rows >= _UNPACKED_ROWS and tile.hidden is not None:
        # one mask for all heads instead of G copies of it: masks are what a repair pass needs memory for
        bias = tile.bias(1, q.dtype)
        assert bias is not None
        out, lse = _flash_cpu(rows[None], keys[None], values[None], 0.0, False, attn_mask=bias[None, None], scale=scale)
        out, lse = out[0], lse[0]
    elif q.device.type == "cpu":
        bias = tile.bias(groups, q.dtype)
        mask = None if bias is None else bias[None, None]
        out, lse = _flash_cpu(packed[None], keys[None], values[None], 0.0, False, attn_mask=mask, scale=scale)
        out, lse = out[0], lse[0]
    else:
        out, lse = _plain(packed, keys, values, tile.bias(groups, torch.float32), scale)
    out, lse = out.reshape(n_query_heads, n_rows, -1), lse.reshape(n_query_heads, n_rows)
    if tile.blind is not None:
        lse = lse.masked_fill(tile.blind, float("-inf"))
        out = out.masked_fill(tile.blind[:, None], 0.0)
    return out, lse


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with log-sum-exp in ordinary torch operations, scores in fp32 or wider; any device."""
    wide = torch.promote_types(q.dtype, torch.float32)
    score = torch.matmul(q.to(wide), k.to(wide).mT).mul_(scale)
    if bias is not None:
        score += bias.to(score.device)
    lse = torch.logsumexp(score, -1)
    weight = score.sub_(torch.where(lse.isinf(), 0.0, lse)[..., None]).exp_()
    return torch.matmul(weight, v.to(wide)), lse


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Full prefill: S == T and the plain lower triangle, in one call on a CPU. `out [Hq, S, D]`, `lse [Hq, S]`."""
    if q.device.type == "cpu":
        out, lse = _flash_cpu(q[None], k[None], v[None], 0.0, True, scale=scale)  # takes grouped heads as they are
        return out[0], lse[0]
    groups, n_rows = q.shape[0] // k.shape[0], q.shape[1]
    rows = torch.arange(n_rows, device=q.device)
    bias = torch.zeros(n_rows, n_rows, device=q.device).masked_fill_(later(rows, rows), float("-inf"))
    out, lse = _plain(q.reshape(k.shape[0], groups * n_rows, -1), k, v, bias.repeat(groups, 1), scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])
