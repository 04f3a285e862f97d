"""What becomes of fused artifacts when a neighbour changes or goes: they are found, deleted, and asked for anew.

A fused artifact holds the influence of other documents' chunks, so it must not outlive them. Its point names them, and
named them before the artifact was put, so that the index finds it whatever run was killed when. The commit record of a
document makes PREFILL look for the artifacts that were made with an older version of it:

    all the chunks that were used are in the new version   the point notes the new version, nothing is computed
    else                                                   delete the artifact, announce its document, clear the point

In that order: until the point is cleared, the next reading of the record finds it again. The announcement is the
document's own commit record once more, which makes PREFILL fuse it again; its version is the one that all who were
fused with it know, so nothing follows from it (depth one).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from ingest import telemetry
from ingest.parts import Stores
from ingest.sinks import announce
from schemas.chunk import Fusion, IndexedChunk
from schemas.ids import DocumentKey


def invalidate(parts: Stores, document: DocumentKey, version: int, named: Set[str]) -> None:
    """Settle every fused artifact that was made with a version of `document` below `version`.

    Args:
        named: artifact keys of pass 1 that `version` names; none for a tombstone.
    """
    if not parts.fuses:
        return
    found = parts.retry(lambda: parts.index.fused_with(document), "looking for fused artifacts")
    stale = []
    for point in found:
        fusion = point.fusion
        assert fusion is not None
        used = [one for one in fusion.neighbours if one.document == document and one.version < version]
        if not used:
            continue
        if all(one.kv_key in named for one in used):
            moved = tuple(replace(one, version=version) if one in used else one for one in fusion.neighbours)
            mark(parts, point, replace(fusion, neighbours=moved), was=fusion)
        else:
            stale.append(point)
    forget(parts, stale, "neighbour")


def forget(parts: Stores, points: Sequence[IndexedChunk], cause: str, *, again: bool = True) -> None:
    """Delete the fused artifacts of `points`; their rows of pass 1 serve. With `again` new ones are asked for."""
    for point in points:
        fusion, document = point.fusion, point.chunk.document
        assert fusion is not None
        parts.retry(lambda d=document, f=fusion: parts.kv.delete(d, [f.kv_key]), "deleting a fused artifact")  # type: ignore[misc]
        telemetry.UNFUSED.labels(cause).inc()
    if again and points:
        documents = list(dict.fromkeys(point.chunk.document for point in points))
        heads = parts.retry(lambda: parts.index.heads(documents), "reading heads")
        announce(parts, [head for head in heads.values() if head.live])
    for point in points:
        mark(parts, point, None, was=point.fusion)


def mark(parts: Stores, point: IndexedChunk, fusion: Fusion | None, was: Fusion | None = None) -> None:
    """Have the point say this of its fused artifact; with `was` only while it names that one."""
    parts.retry(lambda: parts.index.mark_fusion(point.chunk.id, fusion, was=was), "marking a point")
