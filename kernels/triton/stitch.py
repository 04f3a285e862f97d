"""One Triton launch stitches every layer of a chunk list into a cache.

Grid (token tiles, layers); a program moves K and V of up to 16 tokens and all heads of one layer. Its addresses are row
number x constexpr row size, which is what makes the accesses 128 bits wide; loads of the rotated halves are
contiguous in both layouts. No loop with a run-time bound, no atomics, disjoint stores: deterministic. No dot, so
no tensor-core rounding. All arithmetic is fp32 with one rounding at the store.
"""

# A kernel's parameters are pointers and constexprs, and its decorator has no types.
# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.layout import RopeLayout, descriptors
from kernels.triton.primitives import join_pairs, rotate_pair, split_pairs

# Elements of K per program and per warp. On sm_90 this gives 56 to 84 registers for 16-bit rows, at most 126 for fp32.
# Twice the tile (16 tokens of 8 heads x 128) took 138; half the elements per warp spill 8 bytes, twice as many take
# 166 to 255 registers. tests/kernels/aot holds the bounds.
TILE_ELEMENTS, ELEMENTS_PER_WARP, MAX_BLOCK_T = 8192, 1024, 16
ALIGNMENT = 16  # bytes: below it the compiler falls back to 16-bit accesses


@triton.jit
def stitch_kernel(
    src_k,  # [rows, D] chunks one after the other, each [L, H, T, D]; a row is one layer, head and token
    src_v,  # [rows, D]
    dst_k,  # [L, H, slots, D] any strides, D contiguous
    dst_v,  # [L, H, slots, D] with the strides of dst_k
    cos,  # [tables, span, R / 2] fp32
    sin,  # [tables, span, R / 2] fp32, sign of the layout included
    table,  # [L] int32 table number of each layer
    src_row,  # [n_tokens] int64 row of this token in layer 0, head 0
    src_step,  # [n_tokens] int32 tokens in this token's chunk: rows from one head to the next
    table_row,  # [n_tokens] int32 position - pos_base
    slot,  # [n_tokens] int64 destination slot, -1 = skip
    n_tokens,
    span,
    stride_layer,  # of the destinations, in elements
    stride_head,
    stride_slot,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,  # powers of two that cover H, R, D and D - R
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Move BLOCK_T tokens x all heads of one layer."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    layer = tl.program_id(1).to(tl.int64)
    live = t < n_tokens
    step = tl.load(src_step + t, mask=live, other=0).to(tl.int64)
    first = tl.load(src_row + t, mask=live, other=0) + layer * H * step
    angle_row = tl.load(table_row + t, mask=live, other=0).to(tl.int64) + tl.load(table + layer).to(tl.int64) * span
    to = tl.load(slot + t, mask=live, other=-1)
    live = live & (to >= 0)
    h = tl.arange(0, BLOCK_H)[None, :, None]
    th = live[:, None, None] & (h < H)
    at = (first[:, None, None] + h * step[:, None, None]) * D
    out = layer * stride_layer + h * stride_head + to[:, None, None] * stride_slot
    dtype = dst_k.dtype.element_ty
    if R > 0:
        half = tl.arange(0, BLOCK_R // 2)
        angle = angle_row[:, None] * (R // 2) + half[None, :]
        ok = live[:, None] & (half[None, :] < R // 2)
        c = tl.load(cos + angle, mask=ok, other=1.0)[:, None, :]
        s = tl.load(sin + angle, mask=ok, other=0.0)[:, None, :]
        if INTERLEAVED:
            r = tl.arange(0, BLOCK_R)[None, None, :]
            x = tl.load(src_k + at + r, mask=th & (r < R), other=0.0).to(tl.float32)
            a, b = split_pairs(x, BLOCK_T, BLOCK_H, BLOCK_R // 2)
            a, b = rotate_pair(a, b, c, s)
            y = join_pairs(a, b, BLOCK_T, BLOCK_H, BLOCK_R // 2)
            tl.store(dst_k + out + r, y.to(dtype), mask=th & (r < R))
        else:
            r = half[None, None, :]
            m = th & (r < R // 2)
            a = tl.load(src_k + at + r, mask=m, other=0.0).to(tl.float32)
            b = tl.load(src_k + at + R // 2 + r, mask=m, other=0.0).to(tl.float32)
            a, b = rotate_pair(a, b, c, s)
            tl.store(dst_k + out + r, a.to(dtype), mask=m)
            tl.store(dst_k + out + R // 2 + r, b.to(dtype), mask=m)
    if R < D:  # partial rotary: the tail is copied
        n = R + tl.arange(0, BLOCK_TAIL)[None, None, :]
        x = tl.load(src_k + at + n, mask=th & (n < D), other=0.0)
        tl.store(dst_k + out + n, x.to(tl.float32).to(dtype), mask=th & (n < D))
    d = tl.arange(0, BLOCK_D)[None, None, :]
    v = tl.load(src_v + at + d, mask=th & (d < D), other=0.0)
    tl.store(dst_v + out + d, v.to(tl.float32).to(dtype), mask=th & (d < D))


def stitch(
    k: torch.Tensor | Sequence[torch.Tensor],  # pool [rows, D], or one [L, H, T, D] per chunk
    v: torch.Tensor | Sequence[torch.Tensor],
    dst_k: torch.Tensor,  # [L, H, slots, D]
    dst_v: torch.Tensor,
    chunk_lens: Sequence[int],
    positions: torch.Tensor,  # [n_tokens] int64, CPU
    slots: torch.Tensor,  # [n_tokens] int64, CPU, -1 = skip
    cos: torch.Tensor,  # [tables, span, R/2] fp32
    sin: torch.Tensor,
    table_of_layer: Sequence[int],
    pos_base: int,
    layout: RopeLayout,
) -> None:
    """Launch once. Chunks in separate tensors are joined into a pool first, which is one more copy."""
    device = dst_k.device
    n_layers, n_heads, _, _ = dst_k.shape
    src_k, src_v = _pool(k, device), _pool(v, device)
    if dst_k.stride() != dst_v.stride():
        raise ValueError(f"dst_v must have the strides of dst_k, {dst_k.stride()} (got {dst_v.stride()})")
    for name, tensor in (("k", src_k), ("v", src_v), ("dst_k", dst_k), ("dst_v", dst_v)):
        _check_alignment(name, tensor)
    src_row, src_step = descriptors(chunk_lens, n_layers, n_heads)
    sin = -sin if layout.sign < 0 else sin
    n_tokens = len(positions)
    sizes = constants(n_heads, dst_k.shape[3], layout)
    stitch_kernel[(triton.cdiv(n_tokens, sizes["BLOCK_T"]), n_layers)](
        src_k,
        src_v,
        dst_k,
        dst_v,
        cos.to(device).contiguous(),
        sin.to(device).contiguous(),
        torch.tensor(table_of_layer, dtype=torch.int32).to(device),
        src_row.to(device),
        src_step.to(device),
        (positions - pos_base).to(torch.int32).to(device),
        slots.to(device),
        n_tokens,
        cos.shape[1],
        *(dst_k.stride(axis) for axis in (0, 1, 2)),
        **sizes,
        **options(sizes),
    )


def options(sizes: dict[str, Any]) -> dict[str, Any]:
    """Compiler options for a launch with these constants.

    Without fused multiply-add a GPU rounds every product, as torch does: rows are bit-equal to the reference's. The
    kernel waits for memory, so the extra instructions cost nothing.
    """
    tile = sizes["BLOCK_T"] * sizes["BLOCK_H"] * sizes["BLOCK_D"]
    return {"num_warps": max(1, min(8, tile // ELEMENTS_PER_WARP)), "enable_fp_fusion": False}


@lru_cache
def constants(n_heads: int, head_dim: int, layout: RopeLayout) -> dict[str, Any]:
    """The constexpr arguments of a launch; also what the compile-only tests build."""

    def cover(n: int) -> int:
        return int(triton.next_power_of_2(max(n, 1)))

    return {
        "H": n_heads,
        "D": head_dim,
        "R": layout.rotary_dim,
        "BLOCK_T": max(1, min(MAX_BLOCK_T, TILE_ELEMENTS // (cover(n_heads) * cover(head_dim)))),
        "BLOCK_H": cover(n_heads),
        "BLOCK_R": max(2, cover(layout.rotary_dim)),
        "BLOCK_D": cover(head_dim),
        "BLOCK_TAIL": cover(head_dim - layout.rotary_dim),
        "INTERLEAVED": layout.interleaved,
    }


def _pool(rows: torch.Tensor | Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if isinstance(rows, torch.Tensor):
        return rows.to(device)
    return torch.cat([chunk.to(device).reshape(-1, chunk.shape[3]) for chunk in rows])


def _check_alignment(name: str, tensor: torch.Tensor) -> None:
    """Bases and strides must be 16-byte multiples, or every access becomes 16 bits wide: refused, not slow."""
    if tensor.data_ptr() % ALIGNMENT or any(
        stride * tensor.element_size() % ALIGNMENT for stride in tensor.stride()[:-1]
    ):
        raise ValueError(
            f"{name} must start at a multiple of {ALIGNMENT} bytes and have strides that are "
            f"(got address {tensor.data_ptr() % ALIGNMENT} past one, strides {tensor.stride()} of {tensor.dtype})"
        )
