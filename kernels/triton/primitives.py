"""Small pieces of Triton that the kernels share."""

# A kernel's parameters are pointers and constexprs, and its decorator has no types.
# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_pair(a, b, cos, sin):
    """Turn the pairs (a, b) by the angles of cos and sin; fp32 in, fp32 out."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def split_pairs(x, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """`[TOKENS, HEADS, 2 * PAIRS]` of interleaved pairs -> first and second members.

    Rows are loaded whole and split in registers: loads with stride 2 would be 16 bits wide.
    """
    return tl.split(tl.reshape(x, [TOKENS, HEADS, PAIRS, 2]))


@triton.jit
def join_pairs(a, b, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """The inverse of `split_pairs`."""
    return tl.reshape(tl.join(a, b), [TOKENS, HEADS, 2 * PAIRS])
