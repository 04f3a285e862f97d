"""What a model must show before it is served: our attention is its attention, and captured keys are its keys.

Cheap (a few tokens) and run at every load: a family that changed under us, or that our tables describe wrongly, is
refused with one sentence instead of giving answers that only look right.
"""

from __future__ import annotations

import torch

from engine.capture import Capture, tables_at
from engine.hf_adapter import HfModel
from engine.prefill import PackedChunks, PrefixRows
from engine.rows import Base, Part
from kernels import RopeTables, rotate
from schemas.errors import UnsupportedModelError

_N_TOKENS = 7
_BOUND = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}  # of the largest value; wrong is about 1


def check_attention(hf: HfModel, like: torch.Tensor) -> None:
    """Compare hidden states with those of the model's own attention.

    Raises:
        UnsupportedModelError: they differ, or the model's attention is not open to ours.
    """
    ids = torch.arange(_N_TOKENS) % 5
    positions = torch.arange(_N_TOKENS)
    rows = Base(Part(like, _N_TOKENS)).open(0)
    rows.begin(positions)
    ours = hf.logits(ids, positions, rows, keep=0)
    theirs = hf.plain_logits(ids)
    error = _relative(ours, theirs)
    if not error <= _BOUND[hf.dtype]:
        raise UnsupportedModelError(
            f"{type(hf.module).__name__} computes other logits over our rows than by itself (relative error "
            f"{error:.1e}); its attention is of a kind that kvquilt does not have"
        )


def check_capture(hf: HfModel, capture: Capture, tables: RopeTables, like: torch.Tensor) -> None:
    """Rotate captured keys of every layer and compare them with those that the model rotated.

    Raises:
        UnsupportedModelError: they differ.
    """
    prefix_positions = torch.arange(2)
    prefix = Base(Part(like, 2)).open(0)
    prefix.begin(prefix_positions)
    hf.run(torch.tensor([1, 2]), prefix_positions, prefix)
    packed = _Watched(PrefixRows(*prefix.own), [_N_TOKENS], capture, tables)
    with capture.into(packed.keep_keys):
        hf.run(torch.arange(_N_TOKENS) % 5, packed.positions, packed)
    cos, sin = tables_at(tables, packed.positions, int(packed.positions.max()) + 1, like.device)
    (rows,) = packed.rows()
    for layer, rotated in enumerate(packed.rotated):
        table = tables.table_of_layer[layer]
        ours = rotate(rows.k[layer].to(like.device), cos[table], sin[table], tables.layout)
        error = _relative(ours, rotated)
        if not error <= _BOUND[hf.dtype]:
            raise UnsupportedModelError(
                f"layer {layer} of {type(hf.module).__name__} makes other keys than those we capture (relative error "
                f"{error:.1e}); it is served in exact mode only"
            )


class _Watched(PackedChunks):
    """Also keeps what the model handed to its cache."""

    rotated: list[torch.Tensor]

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer == 0:
            self.rotated = []
        self.rotated.append(k)
        super().store(layer, k, v)


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-6))
