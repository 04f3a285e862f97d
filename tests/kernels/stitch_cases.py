"""One stitch case: sources, tables, places, a destination full of canaries, and what must come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kernels import RopeLayout, rotate, stitch_kv

CANARY = 777.0
POS_BASE = 131_000  # rotation errors are zero at position 0 and grow


@dataclass
class Case:
    """`layers` x `heads` x chunk lengths x `head_dim`; one token is skipped where there are two or more."""

    heads: int = 2
    head_dim: int = 16
    layout: RopeLayout = field(default_factory=lambda: RopeLayout(16))
    lens: Sequence[int] = (1, 17, 5)
    layers: int = 2
    dtype: torch.dtype = torch.float32
    table_of_layer: Sequence[int] | None = None
    n_tables: int = 1
    paged: bool = False  # destination [L, slots, H, D] instead of [L, H, slots, D]
    slots: torch.Tensor | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        n, span = sum(self.lens), 72
        shape = [(self.layers, self.heads, n_tokens, self.head_dim) for n_tokens in self.lens]
        self.k = [torch.randn(s, generator=g).to(self.dtype) for s in shape]
        self.v = [torch.randn(s, generator=g).to(self.dtype) for s in shape]
        inv_freq = 1e6 ** (-torch.arange(0, self.layout.rotary_dim, 2) / max(self.layout.rotary_dim, 1))
        angle = (POS_BASE + torch.arange(span)).float()[None, :, None] * inv_freq
        angle = angle * (1 + torch.arange(self.n_tables))[:, None, None]
        self.cos, self.sin = angle.cos(), angle.sin()
        self.positions = POS_BASE + torch.randint(0, span - 2, (n,), generator=g)
        if self.slots is None:
            self.slots = torch.randperm(n + 9, generator=g)[:n]
            if n > 1:
                self.slots[1] = -1
        self.n_slots = n + 9

    def run(self, impl: str, *, as_pool: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Stitch into fresh destinations; returns them as `[L, H, slots, D]`."""
        dst_k, dst_v = (self.destination(), self.destination())
        stitch_kv(
            k=self.pool(self.k) if as_pool else self.k,
            v=self.pool(self.v) if as_pool else self.v,
            chunk_lens=list(self.lens),
            dst_k=dst_k,
            dst_v=dst_v,
            positions=self.positions,
            slots=self.slots,
            cos=self.cos,
            sin=self.sin,
            pos_base=POS_BASE,
            layout=self.layout,
            table_of_layer=self.table_of_layer,
            impl=impl,
        )
        return dst_k, dst_v

    def destination(self) -> torch.Tensor:
        """`[L, H, slots, D]`, or that view of a paged cache; every element is the canary."""
        if self.paged:
            shape = (self.layers, self.n_slots, self.heads, self.head_dim)
            return torch.full(shape, CANARY, dtype=self.dtype).transpose(1, 2)
        return torch.full((self.layers, self.heads, self.n_slots, self.head_dim), CANARY, dtype=self.dtype)

    def pool(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """`[rows, D]`: chunk blocks one after the other."""
        return torch.cat([chunk.reshape(-1, self.head_dim) for chunk in chunks])

    def expected(self, dtype: torch.dtype, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K and V `[L, H, live tokens, D]` computed in `dtype`, and their slots; `shift` makes it wrong on purpose."""
        assert self.slots is not None
        live = self.slots >= 0
        rows = (self.positions - POS_BASE + shift)[live]
        tables = self.table_of_layer or [0] * self.layers
        k = torch.cat(self.k, 2)[:, :, live].to(dtype)
        cos, sin = self.cos[:, rows].to(dtype), self.sin[:, rows].to(dtype)
        rotated = [rotate(k[n], cos[table], sin[table], self.layout) for n, table in enumerate(tables)]
        return torch.stack(rotated), torch.cat(self.v, 2)[:, :, live], self.slots[live]


def check(case: Case, dst_k: torch.Tensor, dst_v: torch.Tensor, *, truncates: bool = False) -> None:
    """fp64 bound, equality with the fp32 twin, untouched canaries, and a mutation that must be seen.

    Args:
        truncates: the Triton interpreter cuts fp32 to bf16 where a GPU rounds to nearest: allow one unit more.
    """
    twin, v, slots = case.expected(torch.float32)
    exact = case.expected(torch.float64)[0]
    untouched = torch.ones(case.n_slots, dtype=torch.bool).index_fill_(0, slots, False)
    assert bool((dst_k[:, :, untouched] == CANARY).all()), "keys outside their slots"
    assert bool((dst_v[:, :, untouched] == CANARY).all()), "values outside their slots"
    got_k, got_v = dst_k[:, :, slots], dst_v[:, :, slots]
    assert torch.equal(got_v, v), "V is copied bit by bit"
    if truncates and case.dtype is torch.bfloat16:
        assert bool(((got_k.float() - twin).abs() <= torch.finfo(case.dtype).eps * twin.abs() + 1e-30).all())
    else:
        assert torch.equal(got_k, twin.to(case.dtype)), "K is the fp32 twin, rounded once"
    tail = case.layout.rotary_dim
    assert torch.equal(got_k[..., tail:], torch.cat(case.k, 2)[:, :, case.slots >= 0][..., tail:]), "the tail is copied"
    bound = 2 * torch.finfo(case.dtype).eps * exact.abs().max() if exact.numel() else 0.0
    assert bool(((got_k.double() - exact).abs() <= bound).all())
    if tail and exact.numel():
        wrong = case.expected(torch.float64, shift=1)[0]
        assert (got_k.double() - wrong).abs().max() > 0.1, "an error of one position must be visible"
