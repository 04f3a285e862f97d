"""Deletion receipts: what was there, what was deleted and what a recount still found, for each store and tier.

A receipt speaks of one version (the tombstone's) of one document in one generation. It is kept as up to four objects,
each written once and never changed: what was there before the first delete (`found`), what INDEX left, what PREFILL
left where that was not nothing or serving replicas had still to pass, and, once nothing is left anywhere, the complete
receipt. None of them holds content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from schemas.ids import DocumentKey
from schemas.stored import Frozen, Stored


class ReceiptState(StrEnum):
    """COMPLETE: nothing is left, and both pipelines and every serving replica have passed the tombstone."""

    PENDING = "PENDING"
    COMPLETE = "COMPLETE"


class Stage(StrEnum):
    """Who wrote a part, in the order in which they are written."""

    FOUND = "found"  # INDEX, after the head said deleted and before the first delete
    INDEX = "index"  # INDEX, after its recount
    PREFILL = "prefill"  # PREFILL, after its recount, where that found something or replicas keep KV in memory


class Place(StrEnum):
    """A store and tier that holds something of documents."""

    POINTS = "vectors/index"
    OBJECTS = "kv/object"
    FUSED = "kv/fused"  # artifacts of other documents' chunks that were made with a chunk of this one


Counts = dict[Place, int]


class Tier(StrEnum):
    """What a serving replica keeps in its memory of documents."""

    HOST = "host"  # KV artifacts
    PREFIX = "prefix"  # rows of prompts that were answered in exact mode


class _OfDeletion(Stored):
    """What is written of a deletion: it is about one version of one document in one generation."""

    tenant: str
    doc_id: str
    version: int
    generation: str

    @property
    def document(self) -> DocumentKey:
        """The key of the document."""
        return DocumentKey(self.tenant, self.doc_id)


class ReceiptPart(_OfDeletion):
    """What one stage found and left of the versions up to `version`; `at_ms` is when it had counted."""

    what: ClassVar[str] = "a ReceiptPart"

    stage: Stage
    asked_ms: int
    at_ms: int
    found: Counts
    left: Counts
    partition: int | None = None  # of PREFILL's: where the tombstone's commit record was read
    offset: int | None = None


class PlaceCount(Frozen):
    """One store and tier: `found == deleted + left`, `left` by a recount after the deletes."""

    place: Place
    found: int = Field(ge=0)
    deleted: int = Field(ge=0)
    left: int = Field(ge=0)


class TierCount(Frozen):
    """One tier of the serving replicas: how many have one, how many let go of the document, and of how many entries."""

    tier: Tier
    replicas: int = Field(ge=0)
    passed: int = Field(ge=0)
    dropped: int = Field(ge=0)


class Receipt(_OfDeletion):
    """The deletion of a document, as it can be shown. Times are ms since the epoch.

    Attributes:
        version: of the tombstone; the receipt speaks of everything up to it.
        asked_ms: when the deletion was asked for: the time of its event.
        invisible_ms: by then the head said deleted, so no answer could use the document any more.
        complete_ms: when a recount found nothing and both pipelines had passed.
        recounted_ms: when `left` was counted.
        missing: what is still to happen, in sentences; empty where complete.
        tiers: what serving replicas kept in memory; empty where none does.
    """

    what: ClassVar[str] = "a Receipt"

    state: ReceiptState
    asked_ms: int | None
    invisible_ms: int | None
    complete_ms: int | None
    recounted_ms: int
    counts: tuple[PlaceCount, ...]
    missing: tuple[str, ...]
    tiers: tuple[TierCount, ...] = ()


def judge(
    document: DocumentKey,
    version: int,
    generation: str,
    parts: Mapping[Stage, ReceiptPart],
    left: Counts,
    now_ms: int,
    *,
    prefill_passed: bool,
    tiers: Sequence[TierCount] = (),
    waiting: Sequence[str] = (),
) -> Receipt:
    """The receipt that the stored parts and a recount amount to.

    Args:
        left: counted now.
        prefill_passed: whether PREFILL has read the tombstone's commit record.
        tiers: what serving replicas say that they keep in memory.
        waiting: the names of those that have not let go yet.
    """
    found, index, late = (parts.get(stage) for stage in (Stage.FOUND, Stage.INDEX, Stage.PREFILL))
    missing = []
    if index is None:
        missing.append("the index pipeline has not deleted and recounted yet")
    if not prefill_passed and late is None:
        missing.append("the prefill pipeline has not passed the tombstone yet")
    missing += [f"{count} left in {place}" for place, count in left.items() if count]
    missing += [f"serving replica {name} has not passed the tombstone yet" for name in waiting]
    done = not missing
    counts = []
    for place in Place:
        were = max((part.found.get(place, 0) for part in (found, index) if part is not None), default=0)
        if late is not None:  # more than INDEX left: put after it had looked
            were += max(0, late.found.get(place, 0) - (index.left.get(place, 0) if index else 0))
        were = max(were, left.get(place, 0))
        counts.append(PlaceCount(place=place, found=were, deleted=were - left.get(place, 0), left=left.get(place, 0)))
    first = found or index or late
    return Receipt(
        tenant=document.tenant,
        doc_id=document.doc_id,
        version=version,
        generation=generation,
        state=ReceiptState.COMPLETE if done else ReceiptState.PENDING,
        asked_ms=first.asked_ms if first else None,
        invisible_ms=first.at_ms if first else None,
        complete_ms=now_ms if done else None,
        recounted_ms=now_ms,
        counts=tuple(counts),
        missing=tuple(missing),
        tiers=tuple(tiers),
    )
