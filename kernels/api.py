"""The operations with their checks: every argument is validated here, once, and handed to an implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.layout import RopeLayout, chunks_of_pool
from kernels.reference import attention as _attention
from kernels.reference import stitch as _reference

IMPLEMENTATIONS = ("auto", "reference", "triton")
Rows = torch.Tensor | Sequence[torch.Tensor]


def stitch_kv(
    k: Rows,
    v: Rows,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
    *,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pos_base: int,
    layout: RopeLayout,
    chunk_lens: Sequence[int] | None = None,
    table_of_layer: Sequence[int] | None = None,
    impl: str = "auto",
) -> None:
    """Rotate the keys of many chunks to their absolute positions and put K and V into a cache, all layers at once.

    Writes into `dst_k` and `dst_v`, into the named slots and nowhere else. fp32 arithmetic, one rounding.

    Args:
        k, v: one tensor `[L, H, T, D]` per chunk, or flat pools `[rows, D]` with `chunk_lens`; keys before RoPE.
        dst_k, dst_v: `[L, H, slots, D]`, D contiguous, any other strides, not overlapping the sources. A paged
            cache `[L, slots, H, D]` is passed as its `.transpose(1, 2)`.
        positions: `[n_tokens]` integer, absolute, chunk after chunk.
        slots: `[n_tokens]` integer, -1 = skip this token; no slot twice.
        cos, sin: `[span, R/2]` or `[tables, span, R/2]` fp32 for positions `pos_base … pos_base + span - 1`.
        pos_base: position of the first table row.
        layout: pairs, rotary dimension and sign.
        chunk_lens: tokens per chunk; needed for pools, checked against a list of chunks.
        table_of_layer: table number of each layer; needed with more than one table.
        impl: `reference`, `triton`, or `auto` (Triton on a CUDA device).

    Raises:
        ValueError: an argument does not fit; the message names it, what was expected and what came.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS} (got {impl!r})")
    n_layers, n_heads, n_slots, head_dim = _destination(dst_k, dst_v)
    k_chunks = _chunks("k", k, chunk_lens, n_layers, n_heads, head_dim)
    v_chunks = _chunks("v", v, chunk_lens, n_layers, n_heads, head_dim)
    lens = [chunk.shape[2] for chunk in k_chunks]
    if lens != [chunk.shape[2] for chunk in v_chunks]:
        raise ValueError(f"v must have the chunk lengths of k, {lens} (got {[c.shape[2] for c in v_chunks]})")
    cos, sin = (table if table.dim() == 3 else table[None] for table in (cos, sin))
    if layout.rotary_dim > head_dim:
        raise ValueError(f"layout rotates {layout.rotary_dim} elements of rows that have {head_dim}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32 or table.dim() != 3 or table.shape[2] * 2 != layout.rotary_dim:
            expected = f"float32 [span, {layout.rotary_dim // 2}] or [tables, span, {layout.rotary_dim // 2}]"
            raise ValueError(f"{name} must be {expected} (got {table.dtype} {tuple(table.shape)})")
    if cos.shape != sin.shape:
        raise ValueError(f"sin must have the shape of cos, {tuple(cos.shape)} (got {tuple(sin.shape)})")
    table_of_layer = _tables(table_of_layer, n_layers, cos.shape[0])
    positions, slots = _places(positions, slots, sum(lens), n_slots, pos_base, cos.shape[1])
    if not sum(lens):
        return
    if impl == "triton" or (impl == "auto" and dst_k.device.type == "cuda"):
        from kernels.triton.stitch import stitch as launch  # triton is imported only where it runs

        launch(k, v, dst_k, dst_v, lens, positions, slots, cos, sin, table_of_layer, pos_base, layout)
        return
    _reference.stitch(k_chunks, v_chunks, dst_k, dst_v, positions, slots, cos, sin, table_of_layer, pos_base, layout)


def _destination(dst_k: torch.Tensor, dst_v: torch.Tensor) -> tuple[int, int, int, int]:
    for name, dst in (("dst_k", dst_k), ("dst_v", dst_v)):
        if dst.dim() != 4 or (dst.shape[3] > 1 and dst.stride(3) != 1):
            raise ValueError(
                f"{name} must be [L, H, slots, D] with D contiguous (got {tuple(dst.shape)}, {dst.stride()})"
            )
    if dst_k.shape != dst_v.shape or dst_k.dtype != dst_v.dtype or dst_k.device != dst_v.device:
        raise ValueError(
            f"dst_v must be like dst_k, {dst_k.dtype} {tuple(dst_k.shape)} on {dst_k.device} "
            f"(got {dst_v.dtype} {tuple(dst_v.shape)} on {dst_v.device})"
        )
    n_layers, n_heads, n_slots, head_dim = dst_k.shape
    return n_layers, n_heads, n_slots, head_dim


def _chunks(
    name: str, rows: Rows, chunk_lens: Sequence[int] | None, n_layers: int, n_heads: int, head_dim: int
) -> list[torch.Tensor]:
    if isinstance(rows, torch.Tensor):
        if chunk_lens is None:
            raise ValueError(f"chunk_lens is needed: {name} is a flat pool")
        expected = n_layers * n_heads * sum(chunk_lens)
        if rows.dim() != 2 or tuple(rows.shape) != (expected, head_dim) or not rows.is_contiguous():
            raise ValueError(f"{name} must be a contiguous pool [{expected}, {head_dim}] (got {tuple(rows.shape)})")
        return chunks_of_pool(rows, chunk_lens, n_layers, n_heads)
    for n, chunk in enumerate(rows):
        if chunk.dim() != 4 or (chunk.shape[0], chunk.shape[1], chunk.shape[3]) != (n_layers, n_heads, head_dim):
            expected_shape = f"[{n_layers}, {n_heads}, T, {head_dim}]"
            raise ValueError(f"{name}[{n}] must be {expected_shape} like the destination (got {tuple(chunk.shape)})")
    lens = [chunk.shape[2] for chunk in rows]
    if chunk_lens is not None and list(chunk_lens) != lens:
        raise ValueError(f"chunk_lens must be the lengths of {name}, {lens} (got {list(chunk_lens)})")
    return list(rows)


def _tables(table_of_layer: Sequence[int] | None, n_layers: int, n_tables: int) -> list[int]:
    if table_of_layer is None:
        if n_tables != 1:
            raise ValueError(f"table_of_layer is needed: cos has {n_tables} tables")
        return [0] * n_layers
    if len(table_of_layer) != n_layers or not all(0 <= n < n_tables for n in table_of_layer):
        raise ValueError(f"table_of_layer must hold {n_layers} numbers below {n_tables} (got {list(table_of_layer)})")
    return list(table_of_layer)


def _places(
    positions: torch.Tensor, slots: torch.Tensor, n_tokens: int, n_slots: int, pos_base: int, span: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and slots as int64 on the CPU, where they are made anyway; checking them there costs no sync."""
    for name, values in (("positions", positions), ("slots", slots)):
        if values.shape != (n_tokens,) or values.is_floating_point():
            raise ValueError(f"{name} must hold {n_tokens} integers (got {values.dtype} {tuple(values.shape)})")
    positions, slots = positions.to("cpu", torch.int64), slots.to("cpu", torch.int64)
    if n_tokens:
        low, high = int(positions.min()), int(positions.max())
        if low < pos_base or high >= pos_base + span:
            raise ValueError(f"positions {low}..{high} must lie in the tables' {pos_base}..{pos_base + span - 1}")
        if int(slots.min()) < -1 or int(slots.max()) >= n_slots:
            raise ValueError(f"slots must be -1 or below {n_slots} (got {int(slots.min())}..{int(slots.max())})")
        used = slots[slots >= 0]
        if bool((used.sort().values.diff() == 0).any()):
            raise ValueError("slots must not name a slot twice")
    return positions, slots


def attend(q: torch.Tensor, key_sets: Sequence[_attention.KeySet], scale: float) -> torch.Tensor:
    """Softmax attention of every query row over the union of disjoint key sets, exact for any masks.

    Args:
        q: `[Hq, S, D]`, rotated; the G = Hq / H heads of a kv head side by side.
        key_sets: `(k [H, T, D], v [H, T, D], mask)`: rotated keys, D contiguous, any other strides; T may be 0. The
            mask is None (all seen), a `PositionMask`, or bool `[S, T]` with True = hidden (as `later` returns).
        scale: factor on the scores.

    Returns:
        `[Hq, S, D]` in the dtype of `q`; zero for a row that sees no key at all.

    Raises:
        ValueError: an argument does not fit; the message names it, what was expected and what came.
    """
    if q.dim() != 3 or not q.is_floating_point():
        raise ValueError(f"q must be a float tensor [Hq, S, D] (got {q.dtype} {tuple(q.shape)})")
    for n, (k, v, mask) in enumerate(key_sets):
        if k.dim() != 3 or k.shape != v.shape or k.shape[2] != q.shape[2] or q.shape[0] % max(k.shape[0], 1):
            raise ValueError(
                f"key set {n} must be k and v [H, T, {q.shape[2]}] with H dividing {q.shape[0]} "
                f"(got {tuple(k.shape)} and {tuple(v.shape)})"
            )
        if k.dtype != q.dtype or v.dtype != q.dtype:
            raise ValueError(f"key set {n} must have the dtype of q, {q.dtype} (got {k.dtype} and {v.dtype})")
        if mask is not None:
            _check_mask(n, mask, (q.shape[1], k.shape[1]))
    return _attention.attend(q, key_sets, scale)


def _check_mask(n: int, mask: _attention.PositionMask | torch.Tensor, expected: tuple[int, int]) -> None:
    if isinstance(mask, torch.Tensor):
        shape, kind, fits = tuple(mask.shape), str(mask.dtype), mask.dtype == torch.bool
    else:
        shape, kind, fits = (mask.n_queries, mask.n_keys), "PositionMask", True
    if shape != expected or not fits:
        raise ValueError(f"the mask of key set {n} must be bool or a PositionMask for {expected} (got {kind} {shape})")
