"""Which artifacts of a chunk may stand at its place in the prompt. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.variants import Variant
from schemas.chunk import Fusion, IndexedChunk
from schemas.errors import MissReason
from schemas.head import Head
from schemas.ids import DocumentKey


@dataclass(frozen=True)
class Form:
    """One artifact of a chunk. `neighbours`: keys of the chunks that it was fused with."""

    kv_key: str
    neighbours: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """A chunk of the prompt, and its artifacts that may be used, the best first.

    Attributes:
        passed_over: why a better one than the first of them may not be used, if there is one.
    """

    chunk: IndexedChunk
    forms: tuple[Form, ...]
    passed_over: MissReason | None = None


def neighbours_visible(fusion: Fusion, heads: Mapping[DocumentKey, Head]) -> bool:
    """Whether every chunk that went into a fused artifact is visible, by heads that were read for this request."""
    for one in fusion.neighbours:
        head = heads.get(one.document)
        if head is None or not head.live or head.version != one.version:
            return False
    return True


def wanted(chunk: IndexedChunk, place: int, variant: Variant, neighbours_are_visible: bool) -> Wanted:
    """The forms of a chunk that stands at `place`, from 0, in a prompt.

    Right behind the prefix it is what was computed behind the prefix, if the variant keeps that: it is exact there. A
    fused artifact holds its neighbours' influence, so it is used only while they are visible.
    """
    if place == 0 and variant.pass1_first:
        return Wanted(chunk, (Form(chunk.first_key or chunk.kv_key),))
    pass_1 = Form(chunk.kv_key)
    fusion = chunk.fusion
    if not variant.fused or fusion is None or not fusion.ready:
        return Wanted(chunk, (pass_1,))
    if not neighbours_are_visible:
        return Wanted(chunk, (pass_1,), MissReason.NEIGHBOUR)
    return Wanted(chunk, (Form(fusion.kv_key, tuple(one.kv_key for one in fusion.neighbours)), pass_1))


def served_variant(variant: Variant, fused: Sequence[bool]) -> str:
    """What a certificate must speak of: the variant, or that of pass 1 where some chunk is served as in pass 1.

    Args:
        fused: for each chunk of the prompt whether its rows are fused.
    """
    if not variant.fused:
        return variant.name
    return variant.name if all(fused[1:] if variant.pass1_first else fused) else variant.pass1
