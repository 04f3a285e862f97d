"""Rotary embedding of rows, in the arithmetic of the table's dtype (fp32 in use, fp64 as the yardstick)."""

from __future__ import annotations

import torch

from kernels.layout import RopeLayout


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RopeLayout) -> torch.Tensor:
    """Rotate the first R elements of every row and copy the tail.

    Two products and one sum per element, each rounded once in the table's dtype: bit-equal to what the models
    of transformers compute in fp32.

    Args:
        x: `[..., D]`, any float dtype.
        cos, sin: `[..., R/2]` that broadcast against the rows of `x`; attention scaling included.
        layout: pairs and sign.

    Returns:
        `[..., D]` in the dtype of the tables, a new tensor.
    """
    first, second = layout.pairs
    y = x.to(cos.dtype, copy=True)
    a, b = y[..., first].clone(), y[..., second].clone()
    if layout.sign < 0:
        sin = -sin
    y[..., first] = a * cos - b * sin
    y[..., second] = b * cos + a * sin
    return y
