"""What is where in the prompt, and where its KV comes from. Pure: ids in, intervals out.

    position   0        p0       c1   s1       c2   s2            n
               |-prefix-|-chunk0-|sep-|-chunk1-|sep-|-- question --|
    source       prefix   cached  fresh  fresh  fresh     fresh
                 reused   reused  ------------ fresh ------------

A separator comes after each chunk and belongs to none; its rows and the question's are always fresh. A chunk is
`cached` when its KV artifact is at hand, else `fresh`: computed behind the prefix, as its artifact would have been,
so that an answer does not depend on what happened to be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from schemas.errors import RequestError

if TYPE_CHECKING:
    from engine.prompt import PromptTemplate


class Source(StrEnum):
    """Where a segment's KV rows come from."""

    PREFIX = "prefix"
    CACHED = "cached"
    FRESH = "fresh"


@dataclass(frozen=True)
class PlannedChunk:
    """A chunk that goes into the prompt; `cached` if its KV rows will be handed over."""

    token_ids: tuple[int, ...]
    cached: bool


@dataclass(frozen=True)
class Segment:
    """Positions `[start, end)` of the prompt. `chunk` is the place of the chunk in the plan, for chunks."""

    start: int
    end: int
    source: Source
    chunk: int | None = None

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Plan:
    """The prompt: its ids, and segments that cover `[0, n_tokens)` without gap or overlap, none empty.

    In a `composite` plan the chunks' keys stay where they were prefilled (`engine.composite`).
    """

    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    composite: bool = False

    @property
    def n_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.token_ids)

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids of the shared prefix; empty in a plan that reuses none."""
        first = self.segments[0]
        return self.token_ids[: first.end] if first.source is Source.PREFIX else ()

    @cached_property
    def chunks(self) -> tuple[Segment, ...]:
        """The chunks' segments, in prompt order; `chunks[i].chunk == i`."""
        return tuple(segment for segment in self.segments if segment.chunk is not None)

    @cached_property
    def open_positions(self) -> tuple[int, ...]:
        """Positions of separators and question: the rows that see everything before them. Ascending."""
        return tuple(
            position
            for segment in self.segments
            if segment.source is Source.FRESH and segment.chunk is None
            for position in range(segment.start, segment.end)
        )

    @cached_property
    def reused_tokens(self) -> int:
        """Tokens whose KV is taken over: prefix and cached chunks."""
        return sum(len(segment) for segment in self.segments if segment.source is not Source.FRESH)

    @property
    def fresh_tokens(self) -> int:
        """Tokens that are computed for this request; `reused_tokens + fresh_tokens == n_tokens`."""
        return self.n_tokens - self.reused_tokens


def without_reuse(plan: Plan) -> Plan:
    """The same prompt with nothing taken over, not even the prefix: what a full prefill is measured on."""
    return Plan(plan.token_ids, (Segment(0, plan.n_tokens, Source.FRESH),))


def plan_prompt(template: PromptTemplate, question_ids: Sequence[int], chunks: Sequence[PlannedChunk]) -> Plan:
    """Lay out prefix, chunks with their separators, and the question.

    Raises:
        RequestError: the question has no ids.
        ValueError: a chunk has no ids.
    """
    if not question_ids:
        raise RequestError("the question is empty; expected at least one token", param="question")
    ids: list[int] = []
    segments: list[Segment] = []

    def add(piece: Sequence[int], source: Source, chunk: int | None = None) -> None:
        if piece:
            segments.append(Segment(len(ids), len(ids) + len(piece), source, chunk))
            ids.extend(piece)

    add(template.prefix_ids, Source.PREFIX)
    for n, chunk in enumerate(chunks):
        if not chunk.token_ids:
            raise ValueError(f"chunk {n} of the plan has no token ids; expected at least one")
        add(chunk.token_ids, Source.CACHED if chunk.cached else Source.FRESH, n)
        add(template.separator_ids, Source.FRESH)
    add(question_ids, Source.FRESH)
    return Plan(tuple(ids), tuple(segments))
