"""The other generations: what a deletion does there.

A deletion is complete when the document is gone from every generation that exists, or a rollback would bring it back.
Another generation may have pipelines of its own, far behind or close by, or none any more. So INDEX does not wait for
them: it puts the tombstone into the head of every other generation itself, erases there what the head no longer names,
and notes the parts of that generation's receipt. An older event that its own INDEX reads later is a no-op, since the
head is a tombstone; the tombstone's own event finds everything done. PREFILL there may be in the middle of an older
version, so where one runs (it holds a lease) it is sent the commit record and closes the receipt when it has passed
it; where none runs there is nothing to pass, and the receipt is closed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ingest import deletion
from ingest.parts import IndexParts, Stores
from ingest.sinks import announce, retire
from ingest.work import Batch, IndexWork
from schemas.errors import StoreError
from schemas.generations import Generations, GenerationState, KnownGeneration
from schemas.head import CommitRecord, Head
from schemas.receipt import ReceiptPart, Stage, judge
from stores.kv_store import KvStore
from stores.leftovers import leftovers


@contextmanager
def stores_beside(parts: Stores, entry: KnownGeneration) -> Iterator[Stores]:
    """The stores of another generation, over the connections of `parts`, with its own consumer groups."""
    generation = entry.generation
    with parts.index.beside(generation.name, generation.embedding_dim) as index:
        yield Stores(
            settings=parts.settings,
            generation=generation,
            index=index,
            kv=KvStore(parts.kv.blobs, generation.name),
            publisher=parts.publisher,
            clock=parts.clock,
            generations=parts.generations,
        )


def others(record: Generations, parts: Stores) -> list[KnownGeneration]:
    """The generations beside that of `parts` that keep something: all that are not being deleted as a whole."""
    name = parts.generation.name
    return [one for one in record.known if one.name != name and one.state is not GenerationState.RECLAIMING]


def delete_beside(parts: IndexParts, batch: Batch[IndexWork]) -> Batch[IndexWork]:
    """A step of INDEX: what it deleted here is deleted in the other generations too, before its record is published."""
    heads = [work.head for work in batch if work.active and work.head and work.head.version == work.change.version]
    delete_everywhere(parts, [head for head in heads if not head.live])
    return batch


def delete_everywhere(parts: Stores, tombstones: Sequence[Head]) -> None:
    """Do in every other generation what `tombstones` say, as the module's docstring has it. Idempotent.

    Raises:
        StoreError: a store kept failing, and the generation still exists.
    """
    if parts.generations is None or not tombstones:
        return
    store = parts.generations
    for entry in others(parts.retry(store.read, "reading the record of generations"), parts):
        try:
            with stores_beside(parts, entry) as beside:
                for head in tombstones:
                    _delete_one(beside, head)
        except StoreError:
            record = parts.retry(store.read, "reading the record of generations")
            if entry.name in [one.name for one in others(record, parts)]:
                raise  # else it was reclaimed meanwhile: nothing of it is left, or will be


def carry_tombstones(source: Stores, target: Stores) -> int:
    """Flip every tombstone of `source` in `target` that is not known there; returns how many were.

    The topic may have forgotten a deletion (compaction drops a null after a while), and a folder of files never knew.
    """
    carried = 0
    for head in source.index.documents():
        if head.live:
            continue
        there = target.retry(lambda d=head.document: target.index.heads([d]), "reading a head").get(head.document)  # type: ignore[misc]
        if there is not None and there.version >= head.version:
            continue
        if there is None:
            _take_over(target, head)
        else:
            _delete_one(target, head)
        carried += 1
    return carried


def _take_over(target: Stores, head: Head) -> None:
    """A tombstone of a document that `target` never had: there is nothing to delete, and the receipt says so."""
    stored = _flip(target, head)
    document, version, name = head.document, head.version, target.generation.name
    left = target.retry(lambda: leftovers(target.index, target.kv, document, version), "counting what is left")
    if any(left.values()) or stored.live or stored.version != version:  # its own INDEX was on its way there
        _delete_one(target, head)
        return
    now_ms = target.clock.now_ms()
    part = ReceiptPart(
        tenant=head.tenant,
        doc_id=head.doc_id,
        version=version,
        generation=name,
        stage=Stage.INDEX,
        asked_ms=head.event_ms,
        at_ms=now_ms,
        found=left,
        left=left,
    )
    receipt = judge(document, version, name, {Stage.INDEX: part}, left, now_ms, prefill_passed=True)
    target.retry(lambda: target.receipts.complete(receipt), "writing a receipt")


def _delete_one(beside: Stores, head: Head) -> None:
    stored = _flip(beside, head)
    if stored.live or stored.version != head.version:  # it is further on there: its own pipelines passed this one
        retire(beside, head.document)
        return
    deletion.erase(beside, stored)
    announce(beside, [stored])
    assert beside.generations is not None
    leases = beside.generations.leases
    held = beside.retry(lambda: leases.held(beside.generation.name), "looking for leases")
    if not any(lease.role == "prefill" for lease in held):
        deletion.confirm(beside, CommitRecord.of(stored))


def _flip(target: Stores, head: Head) -> Head:
    update = {"generation": target.generation.name, "committed_ms": target.clock.now_ms()}
    moved = head.model_copy(update=update)
    return target.retry(lambda: target.index.flip(moved), "flipping the head")
