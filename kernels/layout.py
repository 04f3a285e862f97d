"""How rows lie in memory: the rotary layout of a model, and the descriptors that name every token's rows.

A chunk's rows are `k` and `v` `[L, H, T, D]`, keys before RoPE. Flat pools hold such blocks one after the other
as `[rows, D]`; the row of (layer l, head h, token t) of a chunk that starts at row r0 is `r0 + (l*H + h)*T + t`.
So two numbers per token are enough for all layers and heads: `src_row = r0 + t` and `src_step = T`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeLayout:
    """Which elements of a head form a rotated pair, and which way they turn.

    The first `rotary_dim` (R) of D elements are rotated, the tail is copied. Half-split pairs are (i, i + R/2),
    interleaved pairs (2i, 2i + 1). `sign` is -1 for models that rotate by minus theta.
    """

    rotary_dim: int
    interleaved: bool = False
    sign: int = 1

    def __post_init__(self) -> None:
        if self.rotary_dim < 0 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even and not negative (got {self.rotary_dim})")
        if self.sign not in (-1, 1):
            raise ValueError(f"sign must be 1 or -1 (got {self.sign})")

    @property
    def name(self) -> str:
        """The word in the fingerprint: `half_split` or `interleaved`, `…_reversed` where the sign is -1, or `none`."""
        if self.rotary_dim == 0:
            return "none"
        return ("interleaved" if self.interleaved else "half_split") + ("_reversed" if self.sign < 0 else "")

    @property
    def pairs(self) -> tuple[slice, slice]:
        """Slices of the last axis that hold the first and the second members of all pairs, in table order."""
        if self.interleaved:
            return slice(0, self.rotary_dim, 2), slice(1, self.rotary_dim, 2)
        return slice(0, self.rotary_dim // 2), slice(self.rotary_dim // 2, self.rotary_dim)


def descriptors(chunk_lens: Sequence[int], n_layers: int, n_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`src_row` [n_tokens] int64 and `src_step` [n_tokens] int32 of chunks that lie one after the other in a pool."""
    lens = torch.tensor(chunk_lens, dtype=torch.int64)
    first_row = (lens.cumsum(0) - lens) * (n_layers * n_heads)
    first_token = lens.cumsum(0) - lens
    src_row = torch.arange(int(lens.sum())) + (first_row - first_token).repeat_interleave(lens)
    return src_row, lens.repeat_interleave(lens).to(torch.int32)


def chunks_of_pool(pool: torch.Tensor, chunk_lens: Sequence[int], n_layers: int, n_heads: int) -> list[torch.Tensor]:
    """Views `[L, H, T, D]` into a pool `[rows, D]`, one per chunk."""
    sizes = [n_layers * n_heads * n_tokens for n_tokens in chunk_lens]
    parts = torch.split(pool, sizes)
    return [part.view(n_layers, n_heads, n, -1) for part, n in zip(parts, chunk_lens, strict=True)]
