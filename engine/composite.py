"""The composite layout: every chunk stays at the positions of its prefill, right behind the prefix.

    order       prefix | chunk 0 | chunk 1 | ..  | separators | question       what is seen: everything earlier
    rotation    0 .. p   p .. p+T0  p .. p+T1      p+Tmax ..                   shifted so that the open rows stand still

Distances are all that rotary models see, so the whole layout is shifted up until its open rows stand at the positions
that they have in the order: nothing but the stitch needs to know. Separators come behind all chunks here, because
between chunks that overlap there is no position for them. Baseline of TurboRAG (arXiv 2410.07590); the reordered
layout is the ordinary plan.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.capture import rotate_back, tables_at
from engine.plan import Plan, Segment, Source
from engine.prefill import PrefixRows
from kernels import RopeTables, rotate


def composite_plan(plan: Plan) -> Plan:
    """The same ids with all separators behind the last chunk, to be stitched in the composite layout."""
    is_open = [segment.source is Source.FRESH and segment.chunk is None for segment in plan.segments]
    order = sorted(range(len(plan.segments)), key=lambda number: is_open[number])
    ids: list[int] = []
    segments: list[Segment] = []
    for number in order:
        old = plan.segments[number]
        segments.append(replace(old, start=len(ids), end=len(ids) + len(old)))
        ids += plan.token_ids[old.start : old.end]
    return Plan(tuple(ids), tuple(segments), composite=True)


def rotary_positions(plan: Plan) -> tuple[int, list[torch.Tensor]]:
    """How far the prefix is shifted, and the positions that each chunk's keys are rotated to."""
    if not plan.composite or not plan.chunks:
        return 0, [torch.arange(chunk.start, chunk.end) for chunk in plan.chunks]
    n_prefix = len(plan.prefix_ids)
    shift = plan.chunks[-1].end - n_prefix - max(len(chunk) for chunk in plan.chunks)
    return shift, [torch.arange(len(chunk)) + n_prefix + shift for chunk in plan.chunks]


def shifted(prefix: PrefixRows, shift: int, tables: RopeTables, final_length: int) -> torch.Tensor:
    """The prefix's keys `[L, H, P, D]`, rotated to `shift` positions higher."""
    if not shift:
        return prefix.k
    at = torch.arange(prefix.n_tokens)
    back_cos, back_sin = tables_at(tables, at, final_length, prefix.k.device)
    cos, sin = tables_at(tables, at + shift, final_length, prefix.k.device)
    out = torch.empty_like(prefix.k)
    for layer, table in enumerate(tables.table_of_layer):
        plain = rotate_back(prefix.k[layer].float(), back_cos[table], back_sin[table], tables.layout)
        out[layer] = rotate(plain, cos[table], sin[table], tables.layout)
    return out
