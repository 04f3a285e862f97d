"""The first steps of INDEX: what a message says, and what is to be done for it by its document's head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from ingest.parts import IndexParts
from ingest.work import Batch, IndexWork, Outcome
from schemas.chunk import Chunk, Fusion, IndexedChunk
from schemas.errors import EventError
from schemas.events import ChangeEvent
from schemas.head import Head
from stores.dead_letters import in_its_place
from stores.topics import Message


def parse(parts: IndexParts, message: Message) -> IndexWork:
    """Read a message of any format; one that is no change event comes out dead."""
    work = IndexWork(message)
    try:
        event = parts.retry(lambda: parts.events.read(in_its_place(message)), "reading an event")
    except EventError as error:
        return work.dead(error)
    return replace(work, event=event)


def plan(parts: IndexParts, batch: Batch[IndexWork]) -> Batch[IndexWork]:
    """Judge each event by its head, cut what is new, and take over what is unchanged. At most one event a document."""
    documents = [work.change.document for work in batch if work.active]
    heads = parts.retry(lambda: parts.index.heads(documents), "reading heads") if documents else {}
    planned = []
    for work in batch:
        if not work.active:
            planned.append(work)
            continue
        work = replace(work, head=heads.get(work.change.document))
        try:
            planned.append(_plan_one(parts, work))
        except EventError as error:
            planned.append(work.dead(error))
    return tuple(planned)


def refused_conflict(work: IndexWork, head: Head) -> IndexWork:
    """The event has the head's version and other content: no order between the two, so the first one stays."""
    message = (
        f"{work.change.document} version {head.version} was ingested before with other content; "
        "a version names one content, so send the change with a higher version"
    )
    return work.dead(EventError(message, stage="plan"))


def _dated(event: ChangeEvent, head: Head | None) -> ChangeEvent | None:
    """An undated deletion with the version that it has by its document's head; None where it deletes nothing.

    It deletes what was changed before it, and again what it deleted itself. A change of the same millisecond came
    after it: the deletion proper, which has a number, stands in front of an undated one.
    """
    if head is None or head.event_ms > event.event_ms or head.live == (head.event_ms == event.event_ms):
        return None
    return event.model_copy(update={"version": head.version + head.live})


def _plan_one(parts: IndexParts, work: IndexWork) -> IndexWork:
    event, head = work.change, work.head
    if event.undated:
        dated = _dated(event, head)
        if dated is None:
            return replace(work, outcome=Outcome.SUPERSEDED)
        event, work = dated, replace(work, event=dated)
    if head is not None and head.version > event.version:
        return replace(work, outcome=Outcome.SUPERSEDED)
    repeated = head is not None and head.version == event.version
    if head is not None and repeated:
        if head.content_digest != event.content_digest:
            return refused_conflict(work, head)
        work = replace(work, outcome=Outcome.REPEATED)
        if parts.retry(lambda: parts.index.count_live(head), "counting points") == head.n_chunks:
            return work  # only what comes after the flip may be unfinished
    chunks = parts.chunker.chunks(event)
    live: Sequence[IndexedChunk] = ()
    if chunks and head is not None and head.live:
        live = parts.retry(
            lambda: parts.index.chunks(event.document, head.version, vectors=True), "reading the live version's chunks"
        )
    return replace(work, points=diff(parts, work, chunks, live))


def diff(
    parts: IndexParts, work: IndexWork, chunks: Sequence[Chunk], live: Sequence[IndexedChunk]
) -> tuple[IndexedChunk, ...]:
    """The points of a new version.

    A chunk whose token ids the live version has takes over its vector, and its `kv_ready` where the artifact is the
    same; a chunk that is new has `vectors` None.
    """
    event, content_digest = work.change, work.change.content_digest
    known = {indexed.chunk.token_digest: indexed for indexed in live}
    points = []
    for chunk in chunks:
        old, kv_key = known.get(chunk.token_digest), parts.kv_key(chunk.token_ids)
        # Equal token ids can stand for unequal text where the tokenizer normalises; the vector is of the text.
        vectors = old.vectors if old is not None and old.chunk.text == chunk.text else None
        points.append(
            IndexedChunk(
                chunk=chunk,
                kv_key=kv_key,
                vectors=vectors,
                kv_ready=old is not None and old.kv_ready and old.kv_key == kv_key,
                title=event.title,
                uri=event.uri,
                metadata=event.metadata,
                content_digest=content_digest,
                first_key=parts.first_key(chunk.token_ids),
            )
        )
    named = {point.kv_key for point in points}
    return tuple(replace(point, fusion=_carried(known, point, named)) for point in points)


def _carried(known: Mapping[str, IndexedChunk], point: IndexedChunk, named: Set[str]) -> Fusion | None:
    """The fusion of an unchanged chunk, unless it was made with a chunk of its own document that is gone."""
    old = known.get(point.chunk.token_digest)
    if old is None or old.fusion is None or old.kv_key != point.kv_key:
        return None
    own = [one for one in old.fusion.neighbours if one.document == point.chunk.document]
    if any(one.kv_key not in named for one in own):
        return None
    version = point.chunk.version
    moved = [replace(one, version=version) if one in own else one for one in old.fusion.neighbours]
    return replace(old.fusion, neighbours=tuple(moved))
