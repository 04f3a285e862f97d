"""Tensor arithmetic: RoPE tables, stitching cached rows into a cache, position-exact attention. Knows no document.

Names are imported on first use: transformers looks for a package of this name, and must not start torch by looking.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.api import attend, stitch_kv
    from kernels.layout import RopeLayout, descriptors
    from kernels.reference.attention import PositionMask, later, merge_states, position_mask
    from kernels.reference.rope import rotate
    from kernels.rope_tables import RopeTables, probe
    from schemas.foreign import refuse_foreign_kernels

_HOME = {
    "attend": "kernels.api",
    "stitch_kv": "kernels.api",
    "refuse_foreign_kernels": "schemas.foreign",
    "RopeLayout": "kernels.layout",
    "descriptors": "kernels.layout",
    "PositionMask": "kernels.reference.attention",
    "later": "kernels.reference.attention",
    "merge_states": "kernels.reference.attention",
    "position_mask": "kernels.reference.attention",
    "rotate": "kernels.reference.rope",
    "RopeTables": "kernels.rope_tables",
    "probe": "kernels.rope_tables",
}

__all__ = [
    "PositionMask",
    "RopeLayout",
    "RopeTables",
    "attend",
    "descriptors",
    "later",
    "merge_states",
    "position_mask",
    "probe",
    "refuse_foreign_kernels",
    "rotate",
    "stitch_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
