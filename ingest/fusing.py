"""PREFILL, last: chunks prefilled again behind the rows of their nearest neighbours (FusionRAG's pass 2).

By now every chunk has its artifact of pass 1 and is servable. What this adds lies beside it, in the folder of the
chunk's own document. Neighbours are the nearest visible chunks of the same tenant, other than the chunk itself, as they
were prefilled in pass 1 (depth one): the index is asked with the mean of the chunk's vectors.

    the point names artifact and neighbours -> compute and put, create-only -> the point says that it is ready
    -> the heads of all neighbours are read again: what was made with a version that is gone is forgotten

So an artifact is named before it exists: the change of a neighbour finds it (`lineage`), or is seen here. A run that is
killed in between leaves a point that names an artifact and does not say ready, and its record is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ingest import telemetry
from ingest.isolate import isolate
from ingest.lineage import forget, mark
from ingest.parts import PrefillParts
from ingest.prefill import put_rows
from ingest.sinks import retire
from ingest.work import Batch, Outcome, PrefillWork
from schemas.chunk import Fusion, IndexedChunk, Neighbour
from schemas.errors import ArtifactMiss, MissReason
from schemas.head import Head
from schemas.ids import DocumentKey, artifact_key
from schemas.kv_artifact import KvArtifact

log = logging.getLogger(__name__)

_SPARE = 16  # hits beyond the neighbours wanted: for copies of the chunk, busy documents, artifacts not there yet


@dataclass(frozen=True)
class _Chosen:
    """A neighbour and its rows of pass 1."""

    name: Neighbour
    artifact: KvArtifact


def fuse(parts: PrefillParts, batch: Batch[PrefillWork]) -> Batch[PrefillWork]:
    """Give every chunk of the batch's live documents its fused artifact, where the variant has one."""
    if parts.fuses:
        for work in batch:
            if work.outcome is Outcome.CONFIRMED and work.points:
                _fuse_document(parts, work.commit.document, work.commit.version)
    return batch


def _fuse_document(parts: PrefillParts, document: DocumentKey, version: int) -> None:
    if (head := _live_head(parts, document, version)) is None:
        return
    points = parts.retry(lambda: parts.index.live_chunks(head, vectors=True), "reading chunks to fuse")
    there = set(parts.retry(lambda: parts.kv.keys(document), "listing KV artifacts"))
    if _busy(parts, head):
        forget(parts, [point for point in points if point.fusion], "busy", again=False)
        return
    gone = _gone(parts, points)
    forget(parts, gone, "neighbour", again=False)
    # the same chunk of another document gives the same name: it is to be put again
    there -= {point.fusion.kv_key for point in gone if point.fusion is not None}
    for point in points:
        kept = None if point in gone else point.fusion
        whole = kept is not None and kept.ready and kept.kv_key in there
        if whole and kept is not None and len(kept.neighbours) >= parts.generation.neighbours:
            continue
        chosen = _choose(parts, point)
        if chosen and not (whole and kept is not None and len(chosen) <= len(kept.neighbours)):
            _fuse_chunk(parts, point, chosen, there)
        elif kept is not None and not whole:  # a killed run named it, and there is nothing to fuse with any more
            mark(parts, point, None, was=kept)
    _settle(parts, document, version)


def _choose(parts: PrefillParts, point: IndexedChunk) -> list[_Chosen]:
    """Nearest first, equally near ones by document and place; as many as are wanted and fit into the model."""
    chunk, n = point.chunk, parts.generation.neighbours
    if point.vectors is None:
        return []
    query = _mean(point.vectors)
    hits = parts.retry(
        lambda: parts.index.search_visible(chunk.document.tenant, query, n + _SPARE), "looking for neighbours"
    )
    order = sorted(hits, key=lambda hit: (-round(hit.score, 6), str(hit.chunk.chunk.document), hit.chunk.chunk.ordinal))
    room = parts.model.max_tokens - len(parts.prefix_ids) - len(chunk.token_ids)
    seen = {chunk.token_digest}
    chosen: list[_Chosen] = []
    for hit in order:
        other = hit.chunk
        if other.chunk.token_digest in seen or not other.kv_ready or _busy(parts, hit.head):
            continue
        artifact = _pass1(parts, other)
        if artifact is None:
            continue
        room -= len(other.chunk.token_ids)
        if room < 0:
            break
        seen.add(other.chunk.token_digest)
        chosen.append(_Chosen(Neighbour(other.chunk.document, other.chunk.version, other.kv_key), artifact))
        if len(chosen) == n:
            break
    return chosen


def _pass1(parts: PrefillParts, point: IndexedChunk) -> KvArtifact | None:
    try:
        return parts.kv.get(
            point.chunk.document,
            point.kv_key,
            fingerprint=parts.generation.fingerprint.digest,
            token_sha256=point.chunk.token_digest,
        )
    except ArtifactMiss as miss:
        if miss.reason is MissReason.STORE:
            telemetry.kv_store_failed(parts.generation.name)
        log.warning("chunk %s is nobody's neighbour for now: %s", point.chunk.id, miss)
        return None


def _fuse_chunk(parts: PrefillParts, point: IndexedChunk, chosen: Sequence[_Chosen], there: Set[str]) -> None:
    neighbours = tuple(one.name for one in chosen)
    front, ids = parts.generation.front_sha256, point.chunk.token_ids
    key = artifact_key(parts.generation.fingerprint.digest, front, ids, [one.kv_key for one in neighbours])
    fusion = Fusion(key, neighbours)
    mark(parts, point, fusion)

    def run(_: Sequence[IndexedChunk]) -> None:
        if key not in there:
            rows = parts.model.prefill_behind(
                parts.prefix_ids, [parts.read_rows(one.artifact) for one in chosen], point.chunk.token_ids
            )
            put_rows(parts, point, key, rows, front, neighbours)
            telemetry.FUSED_CHUNKS.inc()
        mark(parts, point, replace(fusion, ready=True), was=fusion)

    def give_up(_: IndexedChunk, error: Exception, attempts: int) -> None:
        # no dead letter: the document is whole, and served from pass 1
        log.warning("chunk %s stays as in pass 1: %s: %s", point.chunk.id, type(error).__name__, error)
        mark(parts, point, None, was=fusion)
        telemetry.UNFUSED.labels("failed").inc()

    isolate([point], run, give_up, probe=lambda: parts.model.prefill_chunks(parts.prefix_ids, [ids[:1]]))


def _settle(parts: PrefillParts, document: DocumentKey, version: int) -> None:
    """Read again what may have changed meanwhile: the document, its neighbours, and what its folder holds."""
    if (head := _live_head(parts, document, version)) is None:
        retire(parts, document)
        return
    points = parts.retry(lambda: parts.index.live_chunks(head), "reading fused chunks again")
    forget(parts, _gone(parts, points), "neighbour")
    there = parts.retry(lambda: parts.kv.keys(document), "listing KV artifacts")
    if set(there) - {key for point in points for key in point.kv_keys}:
        retire(parts, document)


def _gone(parts: PrefillParts, points: Sequence[IndexedChunk]) -> list[IndexedChunk]:
    """Those of `points` that were fused with a chunk that is not visible any more.

    Where the neighbour's document moved on and still has the chunk, the point notes the new version.
    """
    used = {one.document for point in points if point.fusion for one in point.fusion.neighbours}
    heads = parts.retry(lambda: parts.index.heads(list(used)), "reading the neighbours' heads") if used else {}
    live = {document: head for document, head in heads.items() if head.live}
    versions = {document: head.version for document, head in live.items()}
    names: dict[DocumentKey, set[str]] = {}  # of documents that moved on
    gone = []
    for point in points:
        if point.fusion is None:
            continue
        moved = [one for one in point.fusion.neighbours if versions.get(one.document) != one.version]
        for document in {one.document for one in moved} - names.keys():
            names[document] = _names(parts, live.get(document))
        if any(one.kv_key not in names[one.document] for one in moved):
            gone.append(point)
        elif moved:
            now = tuple(replace(one, version=versions[one.document]) for one in point.fusion.neighbours)
            mark(parts, point, replace(point.fusion, neighbours=now), was=point.fusion)
    return gone


def _names(parts: PrefillParts, head: Head | None) -> set[str]:
    if head is None:
        return set()
    chunks = parts.retry(lambda: parts.index.live_chunks(head), "reading a neighbour's chunks")
    return {chunk.kv_key for chunk in chunks}


def _live_head(parts: PrefillParts, document: DocumentKey, version: int) -> Head | None:
    head = parts.retry(lambda: parts.index.heads([document]), "reading a head").get(document)
    return head if head is not None and head.live and head.version == version else None


def _busy(parts: PrefillParts, head: Head) -> bool:
    return head.changed_more_often(parts.settings.prefill.max_changes_per_day)


def _mean(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    mean = vectors.mean(0)
    return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12), np.float32)
