"""Steps 3 and 5 of INDEX and what PREFILL shares with it: the effects of the pipelines on the outside.

All of them are idempotent: a crash anywhere is repaired by reading the message again. What a tombstone does besides
is in `ingest.deletion`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ingest import telemetry
from ingest.parts import IndexParts, Stores
from ingest.planning import refused_conflict
from ingest.work import Batch, IndexWork, Outcome, W
from schemas.errors import EventError, InputError
from schemas.head import MAX_CHANGES, CommitRecord, DocumentState, Head
from schemas.ids import DocumentKey
from stores.leftovers import live_names
from stores.topics import Message


def upsert_points(parts: IndexParts, batch: Batch[IndexWork]) -> Batch[IndexWork]:
    """Write all points of the new versions. Nobody sees them yet: the heads name other versions.

    The heads are read once more: another writer may have come with the same version and other content since, and points
    of the two have the same ids.
    """
    documents = [work.change.document for work in batch if work.active and work.points]
    if not documents:
        return batch
    heads = parts.retry(lambda: parts.index.heads(documents), "reading heads again")
    batch = tuple(_still_first(work, heads.get(work.change.document)) if work.active else work for work in batch)
    points = [point for work in batch if work.active for point in work.points]
    parts.retry(lambda: parts.index.upsert(points), "upserting points")
    return batch


def _still_first(work: IndexWork, head: Head | None) -> IndexWork:
    if head is None or head.version != work.change.version or head.content_digest == work.change.content_digest:
        return work
    return refused_conflict(work, head)


def flip_heads(parts: IndexParts, batch: Batch[IndexWork]) -> Batch[IndexWork]:
    """Commit: compare-and-set on version. From here on the text is servable, and the old version is not."""
    return tuple(_flip_one(parts, work) if work.outcome is Outcome.PENDING else work for work in batch)


def _flip_one(parts: IndexParts, work: IndexWork) -> IndexWork:
    event = work.change
    head = Head(
        tenant=event.tenant,
        doc_id=event.doc_id,
        version=event.version,
        state=DocumentState.DELETED if event.deletes else DocumentState.LIVE,
        generation=parts.generation.name,
        content_digest=event.content_digest,
        n_chunks=len(work.points),
        event_ms=event.event_ms,
        committed_ms=parts.clock.now_ms(),
        title=event.title,
        uri=event.uri,
        metadata=event.metadata,
        changes_ms=(*(work.head.changes_ms if work.head else ()), event.event_ms)[-MAX_CHANGES:],
    )
    stored = parts.retry(lambda: parts.index.flip(head), "flipping the head")
    work = replace(work, head=stored)
    if stored.version > event.version:  # another writer overtook us: our points are stale, and retired below
        return replace(work, outcome=Outcome.COMMITTED)
    if stored.content_digest != event.content_digest:
        return refused_conflict(work, stored)
    telemetry.freshness("text", event.event_ms, parts.clock.now_ms())
    return replace(work, outcome=Outcome.COMMITTED)


def retire(parts: Stores, document: DocumentKey) -> None:
    """Delete what the live version does not name: points of older versions, and objects in the document's folder.

    For a tombstone that is all of both.

    The order makes it safe against a newer version that is indexed and prefilled at the same time: the folder is
    LISTED FIRST and the head and its points are read AFTER. An object on the list was put before the list was made,
    so after a flip to a version that names it; the head that we read later is of that version or of a newer one, so
    we see the name, or the object is stale indeed. The other way round (head first, then the list) an object that a
    newer version put in between would be on the list, unnamed, and be deleted.
    """
    listed = parts.retry(lambda: parts.kv.keys(document), "listing KV artifacts")
    head, named = parts.retry(lambda: live_names(parts.index, document), "reading what the live version names")
    if head is None:
        return
    below = head.version if head.live else head.version + 1
    stale = parts.retry(lambda: parts.index.stale_chunk_ids(document, below), "looking for older points")
    if stale:
        parts.retry(lambda: parts.index.delete(stale), "deleting older points")
        telemetry.RETIRED.labels("points").inc(len(stale))
    unnamed = [] if named is None else [key for key in listed if key not in named]
    if unnamed or (not head.live and parts.retry(lambda: parts.kv.staged(document), "listing KV artifacts")):
        parts.retry(lambda: parts.kv.delete(document, unnamed), "deleting older KV artifacts")
        telemetry.RETIRED.labels("artifacts").inc(len(unnamed))


def publish_commits(parts: IndexParts, batch: Batch[IndexWork]) -> Batch[IndexWork]:
    """Announce the heads that this batch moved or found moved; also again, since the record may not have got out."""
    moved = {number: work.head for number, work in enumerate(batch) if work.active and work.head is not None}
    messages = dict(zip(moved, announce(parts, moved.values()), strict=True))
    return tuple(replace(work, announced=messages.get(number)) for number, work in enumerate(batch))


def announce(parts: Stores, heads: Iterable[Head]) -> list[Message]:
    """Publish the commit records of heads; returns them as they stand in the topic."""
    records = [CommitRecord.of(head) for head in heads]
    if not records:
        return []
    topic = parts.settings.kafka.commits_topic
    items = [(record.key, record.to_bytes(), ()) for record in records]
    places = parts.retry(lambda: parts.publisher.publish_many(topic, items), "publishing commit records")
    return [
        Message(topic, partition, offset, record.event_ms, key, value)
        for record, (key, value, _), (partition, offset) in zip(records, items, places, strict=True)
    ]


def put_dead_aside(parts: Stores, batch: Batch[W]) -> Batch[W]:
    """The last step: dead letters, and what became of each message is counted."""
    for work in batch:
        if work.error is not None:
            _dead_letter(parts, work)
    return batch


def _dead_letter(parts: Stores, work: W) -> None:
    error, kafka = work.error, parts.settings.kafka
    assert error is not None
    try:
        parts.retry(
            lambda: parts.publisher.dead_letter(kafka, work.message, error, error.stage, work.attempts),
            "publishing a dead letter",
        )
    except InputError as too_large:  # the topic refuses it whole: keep the cause, say that the value is missing
        nbytes = len(work.message.value or b"")
        message = EventError(f"{error} (the value of {nbytes:,} bytes is left out: {too_large})", error.stage)
        bare = replace(work.message, value=None)
        parts.retry(
            lambda: parts.publisher.dead_letter(
                kafka, bare, message, error.stage, work.attempts, omitted_nbytes=nbytes
            ),
            "publishing a dead letter",
        )
    telemetry.DEAD_LETTERS.labels(error.stage).inc()
