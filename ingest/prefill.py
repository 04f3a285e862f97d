"""PREFILL, step 6: what a commit record asks for; missing KV computed and put; points marked; the head read again.

Plan lists a document's folder once and compares it with the points of the live version. So an artifact that vanished
is made again when the record is read again, whatever its point says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from ingest import deletion, telemetry
from ingest.isolate import isolate
from ingest.lineage import invalidate
from ingest.parts import PrefillParts, Rows
from ingest.sinks import retire
from ingest.work import Batch, Outcome, PrefillWork
from schemas.chunk import IndexedChunk, Neighbour
from schemas.errors import EventError
from schemas.head import CommitRecord, DocumentState, Head
from schemas.kv_artifact import FORMAT_VERSION, ArtifactHeader, KvArtifact, NeighbourName, payload_sha256
from stores.topics import Message


def parse_record(message: Message) -> PrefillWork:
    """Read a message of the commits topic; one that is no commit record comes out dead."""
    work = PrefillWork(message)
    try:
        if message.value is None:
            raise EventError("not a commit record: the value is null")
        return replace(work, record=CommitRecord.from_bytes(message.value))
    except EventError as error:
        return work.dead(error)


def plan_prefill(parts: PrefillParts, batch: Batch[PrefillWork]) -> Batch[PrefillWork]:
    """Skip records that are superseded, retire those of deletions, find out which artifacts the others lack."""
    documents = [work.commit.document for work in batch if work.active]
    heads = parts.retry(lambda: parts.index.heads(documents), "reading heads") if documents else {}
    return tuple(_plan_one(parts, work, heads.get(work.commit.document)) if work.active else work for work in batch)


def _plan_one(parts: PrefillParts, work: PrefillWork, head: Head | None) -> PrefillWork:
    record = work.commit
    if head is None or record.generation != parts.generation.name or head.version != record.version:
        # A newer head has a record of its own behind this one. Of another generation, or without a head: not ours.
        if head is not None and record.generation == parts.generation.name and record.state is DocumentState.DELETED:
            # the document came back; what was deleted before is to be accounted for
            deletion.confirm(parts, record, work.message)
        return replace(work, outcome=Outcome.SUPERSEDED)
    if not head.live:
        deletion.confirm(parts, record, work.message)
        return replace(work, outcome=Outcome.CONFIRMED)
    points = tuple(parts.retry(lambda: parts.index.live_chunks(head), "reading the live version's chunks"))
    invalidate(parts, record.document, record.version, frozenset(point.kv_key for point in points))
    present = set(parts.retry(lambda: parts.kv.keys(record.document), "listing KV artifacts"))
    if present - {key for point in points for key in point.kv_keys}:
        retire(parts, record.document)  # put for an older version by a run that was killed before it confirmed
    missing = {point.kv_key: point for point in points if _lacks(point, present)}
    return replace(work, points=points, missing=tuple(missing.values()))


def _lacks(point: IndexedChunk, present: Set[str]) -> bool:
    return point.kv_key not in present or point.first_key not in (None, *present)


def in_passes(batch: Batch[PrefillWork], budget: int) -> Iterator[Batch[PrefillWork]]:
    """Divide a batch so that each part is about one forward pass of work: `budget` chunk tokens, or one document.

    A document's KV is servable when its part is done, not when the whole batch is.
    """
    part: list[PrefillWork] = []
    n_tokens = 0
    for work in batch:
        size = sum(len(point.chunk.token_ids) for point in work.missing)
        if part and n_tokens + size > budget:
            yield tuple(part)
            part, n_tokens = [], 0
        part.append(work)
        n_tokens += size
    if part:
        yield tuple(part)


@dataclass(frozen=True)
class _Job:
    """One chunk to prefill, for the batch's element `owner`."""

    owner: int
    point: IndexedChunk


def prefill(parts: PrefillParts, batch: Batch[PrefillWork]) -> Batch[PrefillWork]:
    """Compute what is missing, batched over documents by tokens, and put each artifact, create-only.

    A document with a chunk that the model fails on, alone, comes out dead; the rest of its KV is made all the same.
    """
    done = list(batch)
    jobs = [_Job(owner, point) for owner, work in enumerate(batch) if work.active for point in work.missing]

    def run(group: Sequence[_Job]) -> None:
        # put is create-only, so the halves of a group that failed on the way do no harm by putting again
        chunks = [job.point.chunk.token_ids for job in group]
        for job, rows in zip(group, parts.model.prefill_chunks(parts.prefix_ids, chunks), strict=True):
            put_rows(parts, job.point, job.point.kv_key, rows, parts.generation.front_sha256)
        first = [job.point for job in group if job.point.first_key is not None]
        if first:
            made = parts.model.prefill_chunks(parts.first_ids, [point.chunk.token_ids for point in first])
            for point, rows in zip(first, made, strict=True):
                assert point.first_key is not None
                put_rows(parts, point, point.first_key, rows, parts.generation.prefix_sha256)
        telemetry.PREFILLED_CHUNKS.inc(len(group))
        telemetry.PREFILLED_TOKENS.inc(sum(map(len, chunks)))

    def give_up(job: _Job, error: Exception, attempts: int) -> None:
        cause = EventError(
            f"the model failed on chunk {job.point.chunk.ordinal} of this document: {type(error).__name__}: {error}",
            stage="prefill",
        )
        cause.__cause__ = error
        failed = done[job.owner].failed | {job.point.kv_key}
        done[job.owner] = replace(batch[job.owner].dead(cause, attempts), failed=failed)

    probe_ids = parts.prefix_ids[-1:] or (0,)  # variant alone: nothing stands in front
    for group in by_tokens(jobs, parts.settings.ingest.batch_tokens):
        isolate(group, run, give_up, probe=lambda: parts.model.prefill_chunks(parts.prefix_ids, [probe_ids]))
    return tuple(done)


def by_tokens(jobs: Sequence[_Job], budget: int) -> Iterator[list[_Job]]:
    """Group jobs so that each group has at most `budget` chunk tokens; a larger chunk stands alone.

    Chunks of about equal length come together, so that the padding of a group stays small.
    """
    group: list[_Job] = []
    n_tokens = 0
    for job in sorted(jobs, key=lambda job: len(job.point.chunk.token_ids)):
        size = len(job.point.chunk.token_ids)
        if group and n_tokens + size > budget:
            yield group
            group, n_tokens = [], 0
        group.append(job)
        n_tokens += size
    if group:
        yield group


def put_rows(
    parts: PrefillParts,
    point: IndexedChunk,
    key: str,
    rows: Rows,
    front_sha256: str,
    neighbours: Sequence[Neighbour] = (),
) -> None:
    """Put an artifact, create-only.

    Args:
        front_sha256: token digest of what the chunk was prefilled behind, neighbours apart.

    Raises:
        ValueError: the rows hold NaN or infinity.
    """
    chunk, fingerprint = point.chunk, parts.model.fingerprint
    k, v = rows.to_bytes()
    token_ids = np.asarray(chunk.token_ids, dtype="<i4")
    header = ArtifactHeader(
        format_version=FORMAT_VERSION,
        generation=parts.generation.name,
        fingerprint=fingerprint,
        prefix_sha256=front_sha256,
        tenant=chunk.document.tenant,
        doc_id=chunk.document.doc_id,
        version=chunk.version,
        ordinal=chunk.ordinal,
        token_sha256=chunk.token_digest,
        payload_sha256=payload_sha256(k, v, token_ids),
        neighbours=tuple(
            NeighbourName(tenant=one.document.tenant, doc_id=one.document.doc_id, kv_key=one.kv_key)
            for one in neighbours
        ),
    )
    artifact = KvArtifact(header, k, v, token_ids)
    if parts.retry(lambda: parts.kv.put(chunk.document, key, artifact), "putting a KV artifact"):
        telemetry.kv_written(parts.generation.name)


def mark_ready(parts: PrefillParts, batch: Batch[PrefillWork]) -> Batch[PrefillWork]:
    """Tell the points which artifacts exist. KV is servable."""
    points = [(point, point.kv_key not in work.failed) for work in batch for point in work.points]
    for made in (True, False):  # False: an artifact that vanished, and could not be made again
        ids = [point.chunk.id for point, there in points if there is made and point.kv_ready is not made]
        if ids:
            parts.retry(lambda ids=ids, made=made: parts.index.mark_kv(ids, made), "marking points")  # type: ignore[misc]
    return batch


def confirm(parts: PrefillParts, batch: Batch[PrefillWork]) -> Batch[PrefillWork]:
    """Read the heads again; where a version was superseded meanwhile, retire once more.

    INDEX retired the old version when it flipped the head, perhaps before our put. So a late prefill would outlive its
    document; here it does not. That goes for dead work too: some of its chunks may have been put.
    """
    touched = [work for work in batch if work.record is not None and (work.active or work.missing)]
    documents = [work.commit.document for work in touched]
    heads = parts.retry(lambda: parts.index.heads(documents), "reading heads again") if documents else {}
    for work in touched:
        head = heads.get(work.commit.document)
        if head is not None and (head.version != work.commit.version or not head.live):
            retire(parts, work.commit.document)
        elif work.active and work.missing:
            telemetry.freshness("kv", work.commit.event_ms, parts.clock.now_ms())
    return tuple(replace(work, outcome=Outcome.CONFIRMED) if work.active else work for work in batch)
