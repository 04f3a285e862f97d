"""Stitch in PyTorch: the specification of the operation, and what runs where there is no GPU.

Arguments were checked by `kernels.api`. Work goes chunk by chunk, and within a chunk by blocks of layers that are
rotated while they lie in the cache of the core. All arithmetic is fp32 with one rounding at the store.

Per element: x * cos, then minus or plus the partner * sin, each step rounded once. A fused multiply-add (`addcmul`)
would save a tenth and make the result depend on the machine; without it the rows are bit-equal to what the models
of transformers compute in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.layout import RopeLayout

# Elements of K per block. 1.6 MB in fp32: measured on 30 layers x 3 heads x 512 tokens x 64, blocks of one layer
# (98k elements) and of all 30 (2.9M) take 1.3 and 2.1 times as long as blocks of 3 to 5 layers.
BLOCK_ELEMENTS = 400_000


@dataclass(frozen=True, eq=False)
class _Angles:
    """Table rows of one chunk's tokens: `cos` [tables, T, D] for whole rows (1 in the tail), `sin` [tables, T, R/2]."""

    cos: torch.Tensor
    sin: torch.Tensor
    table_of_layer: Sequence[int]

    def of(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin of layers start … end - 1, `[layers or 1, 1, T, …]`."""
        used = self.table_of_layer[start:end]
        if len(set(used)) == 1:
            return self.cos[used[0]][None, None], self.sin[used[0]][None, None]
        return self.cos[list(used)][:, None], self.sin[list(used)][:, None]


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
    end = 0
    for k, v in zip(k_chunks, v_chunks, strict=True):
        start, end = end, end + k.shape[2]
        where, rows = slots[start:end], positions[start:end] - pos_base
        live = where >= 0
        if not bool(live.all()):
            where, rows = where[live], rows[live]
            k, v = k[:, :, live.to(k.device)], v[:, :, live.to(v.device)]
        if not len(where):
            continue
        rows, target = rows.to(cos.device), _target(where, dst_k.device)
        dst_v[:, :, target] = v.to(dst_v.device, dst_v.dtype)
        angles = _angles(cos[:, rows], sin[:, rows], table_of_layer, layout, k)
        _put_keys(k, dst_k, target, angles, layout)


def _target(where: torch.Tensor, device: torch.device) -> slice | torch.Tensor:
    """A slice where the slots follow each other, which is the rule; else their numbers."""
    first = int(where[0])
    if torch.equal(where, torch.arange(first, first + len(where))):
        return slice(first, first + len(where))
    return where.to(device)


def _angles(
    cos: torch.Tensor,  # [tables, T, R/2]
    sin: torch.Tensor,
    table_of_layer: Sequence[int],
    layout: RopeLayout,
    k: torch.Tensor,
) -> _Angles:
    n_tables, n_tokens, _ = cos.shape
    whole = torch.ones(n_tables, n_tokens, k.shape[3], dtype=cos.dtype, device=k.device)
    first, second = layout.pairs
    whole[..., first] = cos.to(k.device)
    whole[..., second] = cos.to(k.device)
    sin = sin.to(k.device)
    return _Angles(whole, -sin if layout.sign < 0 else sin, table_of_layer)


def _put_keys(
    k: torch.Tensor, dst_k: torch.Tensor, target: slice | torch.Tensor, angles: _Angles, layout: RopeLayout
) -> None:
    """Rotate one chunk's keys, `[L, H, T, D]`, into their slots."""
    n_layers, per_layer = k.shape[0], k[0].numel()
    step = max(1, BLOCK_ELEMENTS // per_layer)
    first, second = layout.pairs
    wide = angles.cos.dtype
    scratch = torch.empty((min(step, n_layers), *k.shape[1:]), dtype=wide, device=k.device)
    product = torch.empty_like(scratch[..., : layout.rotary_dim // 2])
    in_place = dst_k.dtype == wide and dst_k.device == k.device and isinstance(target, slice)
    for start in range(0, n_layers, step):
        end = min(start + step, n_layers)
        cos, sin = angles.of(start, end)
        x = k[start:end].to(wide)
        y = dst_k[start:end, :, target] if in_place else scratch[: end - start]
        torch.mul(x, cos, out=y)
        y[..., first].sub_(torch.mul(x[..., second], sin, out=product[: end - start]))
        y[..., second].add_(torch.mul(x[..., first], sin, out=product[: end - start]))
        if not in_place:
            dst_k[start:end, :, target] = y.to(dst_k.device, dst_k.dtype)
