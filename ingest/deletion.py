"""What a tombstone does to the stores, counted before and after, and the receipt that comes of it.

INDEX erases and writes its part before it publishes the commit record; PREFILL erases once more when it has passed
that record, since what it put late is its own, and closes the receipt where a recount finds nothing. What is left then
(a store that kept an object it was told to delete) leaves the receipt PENDING: the pipelines go on, and `reconcile`
tries again. A delete that fails outright is tried again like every call of a store, then stops the pipeline, whose
event is read again: no failed delete is forgotten.
"""

from __future__ import annotations

from ingest import telemetry
from ingest.lineage import invalidate
from ingest.parts import IndexParts, Stores
from ingest.sinks import retire
from ingest.work import Batch, IndexWork
from schemas.head import CommitRecord, Head
from schemas.ids import DocumentKey
from schemas.receipt import Counts, Place, Receipt, ReceiptPart, ReceiptState, Stage, judge
from stores.leftovers import leftovers
from stores.topics import Message


def retire_older(parts: IndexParts, batch: Batch[IndexWork]) -> Batch[IndexWork]:
    """Step 4 of INDEX: delete what the versions that are live now do not name; of deletions with a receipt."""
    for work in batch:
        if work.active:
            head = work.head
            if head is not None and not head.live and head.version == work.change.version:
                erase(parts, head)
            else:
                retire(parts, work.change.document)
    return batch


def erase(parts: Stores, head: Head) -> None:
    """INDEX's part of the deletion that `head` stands for: count, delete, recount, note. Idempotent."""
    document, version, asked_ms = head.document, head.version, head.event_ms
    if _complete(parts, document, version):
        retire(parts, document)
        return
    found = _leftovers(parts, document, version)
    noted = _note(parts, document, version, asked_ms, Stage.FOUND, found, {})
    retire(parts, document)
    left = _leftovers(parts, document, version)
    # a crash may have interrupted the first pass: what it found counts, and what came since
    were = {place: max(noted.found.get(place, 0), found[place]) for place in Place}
    _note(parts, document, version, asked_ms, Stage.INDEX, were, left)
    _complete(parts, document, version)  # PREFILL may have closed it since the first look, by parts of an earlier pass


def _complete(parts: Stores, document: DocumentKey, version: int) -> Receipt | None:
    """The complete receipt, if it is there; parts that were noted beside it are removed."""
    done = parts.retry(lambda: parts.receipts.get(document, version, parts.generation.name), "reading a receipt")
    return None if done is None else parts.retry(lambda: parts.receipts.complete(done), "writing a receipt")


def count_again(parts: Stores, record: CommitRecord) -> None:
    """Note INDEX's part of a deletion whose document has moved on, where a crash had kept it from being noted."""
    document, version = record.document, record.version
    noted = parts.retry(lambda: parts.receipts.parts(document, version, parts.generation.name), "reading a receipt")
    if Stage.INDEX not in noted:
        retire(parts, document)
        found = noted[Stage.FOUND].found if Stage.FOUND in noted else {}
        left = _leftovers(parts, document, version)
        _note(parts, document, version, record.event_ms, Stage.INDEX, found, left)


def confirm(parts: Stores, record: CommitRecord, message: Message | None = None) -> Receipt:
    """PREFILL has passed the tombstone: erase what it put since, recount, and close the receipt where nothing is left.

    Where serving replicas keep KV in memory and have not passed it yet, the receipt stays open: the last one closes it.
    Also for a document that came back meanwhile: then it speaks of what the live version does not name.

    Args:
        message: the record as it was read; None: by somebody who waits for replicas to compare with the heads.
    """
    document, version = record.document, record.version
    generation = parts.generation.name
    done = parts.retry(lambda: parts.receipts.get(document, version, generation), "reading a receipt")
    found = _leftovers(parts, document, version)
    if any(found.values()) or done is None:
        retire(parts, document)
        invalidate(parts, document, version, frozenset())
    if done is not None:  # once more, for its parts: a crash may have come between the receipt and their removal
        return parts.retry(lambda: parts.receipts.complete(done), "writing a receipt")
    left = _leftovers(parts, document, version)
    replicas = parts.retry(lambda: parts.replicas.live(), "looking for serving replicas")
    if any(found.values()) or any(left.values()) or replicas:
        _note(parts, document, version, record.event_ms, Stage.PREFILL, found, left, message)
        if (closed := _complete(parts, document, version)) is not None:  # by another process, meanwhile
            return closed
    return close(parts, document, version, left, prefill_passed=True)


def close(parts: Stores, document: DocumentKey, version: int, left: Counts, *, prefill_passed: bool) -> Receipt:
    """The receipt by what is noted and the recount `left`; kept where it is complete."""
    generation = parts.generation.name
    noted = parts.retry(lambda: parts.receipts.parts(document, version, generation), "reading a receipt's parts")
    said = parts.retry(
        lambda: parts.replicas.of(document, version, noted.get(Stage.PREFILL)), "asking serving replicas"
    )
    receipt = judge(
        document,
        version,
        generation,
        noted,
        left,
        parts.clock.now_ms(),
        prefill_passed=prefill_passed,
        tiers=said.tiers,
        waiting=said.waiting,
    )
    if receipt.state is ReceiptState.COMPLETE:
        receipt = parts.retry(lambda: parts.receipts.complete(receipt), "writing a receipt")
    only_replicas = bool(said.waiting) and len(receipt.missing) == len(said.waiting)
    telemetry.DELETIONS.labels("waiting" if only_replicas else receipt.state.lower()).inc()
    return receipt


def _leftovers(parts: Stores, document: DocumentKey, version: int) -> Counts:
    return parts.retry(lambda: leftovers(parts.index, parts.kv, document, version), "counting what is left")


def _note(
    parts: Stores,
    document: DocumentKey,
    version: int,
    asked_ms: int,
    stage: Stage,
    found: Counts,
    left: Counts,
    message: Message | None = None,
) -> ReceiptPart:
    part = ReceiptPart(
        tenant=document.tenant,
        doc_id=document.doc_id,
        version=version,
        generation=parts.generation.name,
        stage=stage,
        asked_ms=asked_ms,
        at_ms=parts.clock.now_ms(),
        found=found,
        left=left,
        partition=None if message is None else message.partition,
        offset=None if message is None else message.offset,
    )
    return parts.retry(lambda: parts.receipts.note(part), "writing a receipt's part")
