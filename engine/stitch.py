"""From a plan and the chunks' rows to the base of a request: rotated once, to where each chunk stands.

    slot        0 .. P        .. + T0    .. + T1     n_base ..
                |- prefix -|- chunk 0 -|- chunk 1 -|- room for the request's own rows -|
    position    0 .. P        s0 .. e0   s1 .. e1    separators, question, answer: any

Separators have no row in the base; their positions stay open between the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.composite import rotary_positions, shifted
from engine.plan import Plan
from engine.prefill import PrefixRows
from engine.rows import Base, KvRows, Part
from kernels import RopeTables, stitch_kv


def stitch(plan: Plan, prefix: PrefixRows, rows: Sequence[KvRows], tables: RopeTables, room: int) -> Base:
    """Put prefix and chunk rows into one part with `room` free slots behind them.

    Args:
        plan: the prompt; `plan.chunks[i]` is where `rows[i]` goes.
        prefix: the rows of the plan's prefix.
        rows: one per chunk of the plan.
        tables: the model's.
        room: slots for the request's own rows.

    Raises:
        ValueError: `rows` do not fit the plan.
    """
    lens = [len(segment) for segment in plan.chunks]
    if [chunk.n_tokens for chunk in rows] != lens:
        raise ValueError(f"the plan's chunks have {lens} tokens, the rows {[chunk.n_tokens for chunk in rows]}")
    n_prefix = prefix.n_tokens
    part = Part(prefix.k, n_prefix + sum(lens) + room)
    shift, rotary = rotary_positions(plan)
    part.k[:, :, :n_prefix] = shifted(prefix, shift, tables, plan.n_tokens)
    part.v[:, :, :n_prefix] = prefix.v
    spans = [torch.arange(segment.start, segment.end) for segment in plan.chunks]
    positions = torch.cat([torch.arange(n_prefix), *spans])
    part.n = len(positions)
    part.positions[: part.n] = positions
    if rows:
        at = torch.cat(rotary)
        start = int(at.min())
        cos, sin = tables.tables(start, int(at.max()) + 1, plan.n_tokens, part.k.device)
        stitch_kv(
            [chunk.k for chunk in rows],
            [chunk.v for chunk in rows],
            part.k,
            part.v,
            positions=at,
            slots=torch.arange(n_prefix, part.n),
            cos=cos,
            sin=sin,
            pos_base=start,
            layout=tables.layout,
            table_of_layer=tables.table_of_layer,
        )
    return Base(part)
