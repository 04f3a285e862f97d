"""Repair: positions of a prompt that are computed again, over shared rows that stay as they are.

    shared base     prefix, chunk 0, chunk 1, ..     rotated once, read by any number of requests, never written
    private rows    P ∪ separators ∪ question        computed in one pass through all layers, then the answer's rows

P, the repaired positions, and the open positions go through the model together, sorted by position. At every layer a
query sees the base without the rows at P, and the private rows, both only as far as they are not later than it: the
mask compares positions, row by row. So P = everything is a full prefill, P = nothing is the plain reuse of stitched
rows, and attention costs |P| rows against the keys before each, not N².

Layer 0 is run for P only: keys and values there depend on nothing but token and position, so that stitched rows are
exact already, and a repaired row needs layer 0 for what comes out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.plan import Plan, Source


@dataclass(frozen=True)
class TokenCounts:
    """Where the tokens of a prompt came from; `reused + repaired + fresh` is the prompt's length.

    Attributes:
        reused: rows taken over as they are: the prefix and cached chunks.
        repaired: rows of cached chunks that were computed again.
        fresh: rows that had no cached form: separators, question, chunks without an artifact.
    """

    reused: int
    repaired: int
    fresh: int


def check_repair(plan: Plan, repair: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Positions to repair as `policies` give them: int64, sorted, each once.

    Raises:
        ValueError: they are not sorted, or one lies outside the chunks of the plan.
    """
    positions = torch.as_tensor(repair).to("cpu", torch.int64)
    if positions.dim() != 1 or bool((positions.diff() <= 0).any()):
        raise ValueError(
            f"positions to repair must be a sorted list without doubles (got shape {list(positions.shape)})"
        )
    if plan.composite and len(positions):
        raise ValueError("a composite plan cannot be repaired: its chunks do not stand where a full prefill has them")
    outside = positions[~in_chunks(plan, positions)]
    if len(outside):
        raise ValueError(
            f"position {int(outside[0])} to repair lies in no chunk of the plan; its rows are exact anyway"
        )
    return positions


def open_and_repaired(plan: Plan, repair: torch.Tensor) -> torch.Tensor:
    """The positions of a repair pass: P and the open positions of the plan, sorted."""
    return torch.cat([repair, torch.tensor(plan.open_positions)]).sort().values


def count_tokens(plan: Plan, repair: torch.Tensor | None = None) -> TokenCounts:
    """What an answer reports."""
    cached = [segment for segment in plan.chunks if segment.source is Source.CACHED]
    repaired = 0
    if repair is not None:
        repaired = sum(int(((repair >= s.start) & (repair < s.end)).sum()) for s in cached)
    return TokenCounts(plan.reused_tokens - repaired, repaired, plan.fresh_tokens)


def in_chunks(plan: Plan, positions: torch.Tensor) -> torch.Tensor:
    """`[S]` bool: the position belongs to a chunk."""
    if not plan.chunks:
        return torch.zeros(len(positions), dtype=torch.bool)
    starts = torch.tensor([segment.start for segment in plan.chunks])
    ends = torch.tensor([segment.end for segment in plan.chunks])
    chunk = torch.searchsorted(starts, positions, right=True) - 1
    return (chunk >= 0) & (positions < ends[chunk.clamp_min(0)])
