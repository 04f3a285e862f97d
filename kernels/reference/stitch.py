"""Stitch in PyTorch: the specification of the operation, and what runs where there is no GPU.

Arguments were checked by `kernels.api`. Work goes chunk by chunk and layer by layer, so that one block of rows is
rotated while it is in the cache of the core; all arithmetic is fp32 with one rounding at the store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.layout import RopeLayout


def stitch(
    k_chunks: Sequence[torch.Tensor],  # each [L, H, T, D]
    v_chunks: Sequence[torch.Tensor],  # each [L, H, T, D]
    dst_k: torch.Tensor,  # [L, H, slots, D]
    dst_v: torch.Tensor,  # [L, H, slots, D]
    positions: torch.Tensor,  # [n_tokens] int64, CPU
    slots: torch.Tensor,  # [n_tokens] int64, CPU, -1 = skip
    cos: torch.Tensor,  # [tables, span, R/2] fp32
    sin: torch.Tensor,
    table_of_layer: Sequence[int],  # L table numbers
    pos_base: int,
    layout: RopeLayout,
) -> None:
    """Rotate K to its absolute position and put K and V of every token into its slot, in all layers."""
    n_tables = cos.shape[0]
    start = 0
    for k, v in zip(k_chunks, v_chunks, strict=True):
        end = start + k.shape[2]
        where, at = slots[start:end], positions[start:end] - pos_base
        start = end
        if bool((where < 0).any()):
            live = where >= 0
            where, at = where[live], at[live]
            k, v = k[:, :, live.to(k.device)], v[:, :, live.to(v.device)]
        if not len(where):
            continue
        at = at.to(cos.device)
        chunk_cos, chunk_sin = cos[:, at], sin[:, at]  # [tables, T, R/2]
        if layout.sign < 0:
            chunk_sin = -chunk_sin
        tables = [(chunk_cos[n], chunk_sin[n]) for n in range(n_tables)]
        first = int(where[0])
        consecutive = bool((where == torch.arange(first, first + len(where))).all())
        target = slice(first, first + len(where)) if consecutive else where.to(dst_k.device)
        _put_chunk(k, v, dst_k, dst_v, target, [tables[n] for n in table_of_layer], layout)


def _put_chunk(
    k: torch.Tensor,
    v: torch.Tensor,
    dst_k: torch.Tensor,
    dst_v: torch.Tensor,
    target: slice | torch.Tensor,
    tables: Sequence[tuple[torch.Tensor, torch.Tensor]],  # per layer: cos, sin [T, R/2]
    layout: RopeLayout,
) -> None:
    """One chunk, all layers. `target` is a slice of slots, or their indices."""
    dst_v[:, :, target] = v.to(dst_v.dtype)
    (first, second), n_rotated = layout.pairs, layout.rotary_dim
    x = torch.empty(k.shape[1:], dtype=torch.float32, device=k.device)  # [H, T, D], reused for every layer
    y, scratch = torch.empty_like(x), torch.empty_like(x[..., : n_rotated // 2])
    for layer, (cos, sin) in enumerate(tables):
        x.copy_(k[layer])
        y[..., n_rotated:] = x[..., n_rotated:]
        a, b, rotated_a, rotated_b = x[..., first], x[..., second], y[..., first], y[..., second]
        torch.mul(a, cos, out=rotated_a)
        rotated_a.sub_(torch.mul(b, sin, out=scratch))
        torch.mul(b, cos, out=rotated_b)
        rotated_b.add_(torch.mul(a, sin, out=scratch))
        dst_k[layer][:, target] = y.to(dst_k.dtype)
