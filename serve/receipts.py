"""The receipt of a deletion over every generation that exists: what survives in one, a rollback would bring back.

Each generation keeps a receipt of its own (`ingest.deletion`, `ingest.siblings`). Here they are put together: counts
are added up, and what one still misses the whole misses. A generation that was built after a deletion was complete has
taken over its tombstone and has no receipt of it: there the head and a recount speak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from schemas.generations import GenerationState, KnownGeneration
from schemas.ids import DocumentKey
from schemas.receipt import Counts, Place, PlaceCount, Receipt, ReceiptState, Stage, judge
from serve.parts import Parts
from stores import KvStore, VectorIndex
from stores.clock import SystemClock
from stores.leftovers import leftovers
from stores.receipts import Receipts
from stores.replicas import Replicas


def receipt_of(parts: Parts, document: DocumentKey, version: int | None) -> Receipt | None:
    """The receipt of a document's deletion, of the newest one if no version is named; None: none is known.

    Raises:
        StoreError: a store did not answer.
    """
    receipts = Receipts(parts.blobs)
    head = parts.index.heads([document]).get(document)
    names = receipts.of(document)
    deletions = {name.version for name in names}
    if head is not None and not head.live:
        deletions.add(head.version)
    wanted = max(deletions, default=None) if version is None else version
    if wanted is None or wanted not in deletions:
        return None
    known = [name for name in names if name.version == wanted]
    done = any(name.stage is None for name in known)
    own = _in_one(receipts, parts.generation.name, parts.index, parts.kv, document, wanted, done)
    others = []
    for entry in _others(parts):
        with _opened(parts, entry) as (index, kv):
            if entry.state is GenerationState.RECLAIMING:
                others.append(_being_reclaimed(entry.name, index, kv, document, wanted))
            else:
                others.append(_in_one(receipts, entry.name, index, kv, document, wanted, done))
    return _together(own, others)


def settle(parts: Parts, document: DocumentKey, version: int) -> Receipt:
    """The receipt of the generation that is served; closed where nothing is missing any more.

    Raises:
        StoreError: a store did not answer.
    """
    receipts = Receipts(parts.blobs)
    return _in_one(receipts, parts.generation.name, parts.index, parts.kv, document, version, False)


def _in_one(
    receipts: Receipts,
    generation: str,
    index: VectorIndex,
    kv: KvStore,
    document: DocumentKey,
    version: int,
    done: bool,
) -> Receipt:
    """What one generation says; `done`: some generation has a complete receipt of this deletion."""
    complete = receipts.get(document, version, generation)
    if complete is not None:
        return complete
    left = leftovers(index, kv, document, version)
    noted = receipts.parts(document, version, generation)
    now_ms = SystemClock().now_ms()
    head = index.heads([document]).get(document)
    if done and not noted and not any(left.values()) and head is not None and head.version >= version:
        return _plain(document, version, generation, left, now_ms, ())
    said = Replicas(kv.blobs, generation).of(document, version, noted.get(Stage.PREFILL))
    judged = judge(
        document, version, generation, noted, left, now_ms, prefill_passed=False, tiers=said.tiers, waiting=said.waiting
    )
    if judged.state is ReceiptState.COMPLETE:  # PREFILL had passed, and waited for replicas or for what was left
        return receipts.complete(judged)
    return receipts.get(document, version, generation) or judged  # it may have been closed while we counted


def _being_reclaimed(generation: str, index: VectorIndex, kv: KvStore, document: DocumentKey, version: int) -> Receipt:
    left = {
        Place.POINTS: index.count(document) if index.exists() else 0,
        Place.OBJECTS: len(kv.keys(document)) + kv.staged(document),
        Place.FUSED: 0,
    }
    missing = ("it is being reclaimed; run `kvquilt gc` to its end",) if any(left.values()) else ()
    return _plain(document, version, generation, left, SystemClock().now_ms(), missing)


def _plain(
    document: DocumentKey, version: int, generation: str, left: Counts, now_ms: int, missing: tuple[str, ...]
) -> Receipt:
    """A receipt of a generation that has noted nothing itself."""
    return Receipt(
        tenant=document.tenant,
        doc_id=document.doc_id,
        version=version,
        generation=generation,
        state=ReceiptState.PENDING if missing else ReceiptState.COMPLETE,
        asked_ms=None,
        invisible_ms=None,
        complete_ms=None if missing else now_ms,
        recounted_ms=now_ms,
        counts=tuple(PlaceCount(place=place, found=left[place], deleted=0, left=left[place]) for place in Place),
        missing=missing,
    )


def _together(own: Receipt, others: Sequence[Receipt]) -> Receipt:
    every = [own, *others]
    done = all(one.state is ReceiptState.COMPLETE for one in every)
    counts = [
        PlaceCount(
            place=place,
            **{
                what: sum(getattr(count, what) for one in every for count in one.counts if count.place is place)
                for what in ("found", "deleted", "left")
            },
        )
        for place in Place
    ]
    return own.model_copy(
        update={
            "state": ReceiptState.COMPLETE if done else ReceiptState.PENDING,
            "asked_ms": min((one.asked_ms for one in every if one.asked_ms is not None), default=None),
            "invisible_ms": _first(one.invisible_ms for one in every),
            "complete_ms": max(one.complete_ms or 0 for one in every) if done else None,
            "recounted_ms": min(one.recounted_ms for one in every),
            "counts": tuple(counts),
            "missing": (
                *own.missing,
                *(f"generation {one.generation}: {what}" for one in others for what in one.missing),
            ),
        }
    )


def _first(times: Iterator[int | None]) -> int | None:
    return next((time for time in times if time is not None), None)


def _others(parts: Parts) -> list[KnownGeneration]:
    if parts.generations is None:
        return []
    return [one for one in parts.generations.read().known if one.name != parts.generation.name]


@contextmanager
def _opened(parts: Parts, entry: KnownGeneration) -> Iterator[tuple[VectorIndex, KvStore]]:
    with parts.index.beside(entry.name, entry.generation.embedding_dim) as index:
        yield index, KvStore(parts.blobs, entry.name)
