"""Deletion with a receipt: what was there, what went, what a recount found, and who has passed the tombstone."""

from dataclasses import replace

import pytest

from ingest import deletion
from ingest.backfill import commit_messages
from ingest.pipeline import INDEX_STEPS, PREFILL_STEPS
from ingest.planning import parse
from ingest.prefill import parse_record
from ingest.work import Outcome
from schemas.errors import BlobError
from schemas.head import CommitRecord
from schemas.receipt import Place, ReceiptState, Stage
from schemas.replica import Replica
from stores.fakes import CrashPoint, SimulatedCrash, fake_artifact, with_faults
from stores.kv_store import KvStore
from stores.leftovers import leftovers
from tests.ingest.world import PARAGRAPHS, TEXT, World, document


def receipts(world):
    return world.index_parts.receipts


def receipt(world, version, key=None):
    return receipts(world).get(key or document(), version, world.index_parts.generation.name)


def noted(world, version):
    return receipts(world).parts(document(), version, world.index_parts.generation.name)


def counts(found):
    return {count.place: (count.found, count.deleted, count.left) for count in found.counts}


def live(world, text=TEXT, version=1):
    world.change(text, version)
    world.index()
    world.prefill()


def test_vec_09_a_deletion_gives_a_receipt_with_counts_per_store(world):
    """Users cannot tell how to delete through pipeline, document store and index, nor whether it happened."""
    live(world)
    asked_ms = world.clock.now_ms()
    world.change(None, 2)
    world.clock.advance(1)
    world.index()
    assert receipt(world, 2) is None, "PREFILL has not passed the tombstone"
    world.clock.advance(1)
    world.prefill()
    got = receipt(world, 2)
    assert got.state is ReceiptState.COMPLETE
    assert counts(got) == {Place.POINTS: (12, 12, 0), Place.OBJECTS: (12, 12, 0), Place.FUSED: (0, 0, 0)}
    assert (got.asked_ms, got.invisible_ms, got.complete_ms) == (asked_ms, asked_ms + 1000, asked_ms + 2000)
    assert got.missing == ()
    assert world.state() == {document(): (2, "deleted", [], [])}


def test_one_object_stays_for_a_complete_deletion_and_it_holds_no_content(world):
    live(world)
    world.change(None, 2)
    world.index()
    assert set(noted(world, 2)) == {Stage.FOUND, Stage.INDEX}
    world.prefill()
    (name,) = receipts(world).of(document())
    assert (name.version, name.stage) == (2, None)
    stored = world.kv.blobs.get(name.path)
    assert not any(word.encode() in stored for word in ("Paragraph", "colour"))


def test_an_update_writes_no_receipt(world):
    live(world)
    live(world, "All is different now.", 2)
    assert receipts(world).of(document()) == []


def test_a_document_that_never_was_is_deleted_with_zero_everywhere(world):
    world.change(None, 1)
    world.index()
    world.prefill()
    assert counts(receipt(world, 1)) == {Place.POINTS: (0, 0, 0), Place.OBJECTS: (0, 0, 0), Place.FUSED: (0, 0, 0)}
    assert receipt(world, 1).state is ReceiptState.COMPLETE


def delete_with_kv_that_is_put_late(world):
    """INDEX has passed the tombstone when one more artifact arrives."""
    live(world)
    world.change(None, 2)
    world.index()
    key, artifact = fake_artifact(document(), [7, 8, 9], generation=world.kv.generation)
    world.kv.put(document(), key, artifact)


def test_kv_that_is_put_after_the_deletion_is_deleted_and_counted(world):
    """A receipt that was closed before the last prefill had ended would be false."""
    delete_with_kv_that_is_put_late(world)
    world.prefill()
    assert counts(receipt(world, 2))[Place.OBJECTS] == (13, 13, 0)


class Keeps:
    """An object store that says it has deleted and has not."""

    def __init__(self, kv):
        self._kv, self.stuck = kv, True

    def __getattr__(self, name):
        return getattr(self._kv, name)

    def delete(self, document, keys):
        return len(list(keys)) if self.stuck else self._kv.delete(document, keys)


def test_what_a_store_keeps_although_it_was_told_to_delete_leaves_the_receipt_pending(world):
    """Believing the return value of a delete is what a receipt is there to avoid."""
    live(world)
    world.change(None, 2)
    keeps = Keeps(world.kv)
    world.index(replace(world.index_parts, kv=keeps))
    world.prefill(replace(world.prefill_parts, kv=keeps))
    assert receipt(world, 2) is None
    late = noted(world, 2)[Stage.PREFILL]
    assert (late.found[Place.OBJECTS], late.left[Place.OBJECTS]) == (12, 12)
    left = leftovers(world.qdrant, keeps, document(), 2)
    pending = deletion.close(world.index_parts, document(), 2, left, prefill_passed=False)
    assert pending.state is ReceiptState.PENDING
    assert pending.missing == ("12 left in kv/object",)
    assert counts(pending) == {Place.POINTS: (12, 12, 0), Place.OBJECTS: (12, 0, 12), Place.FUSED: (0, 0, 0)}

    world.index(repeat=True)
    world.prefill()
    assert counts(receipt(world, 2)) == {Place.POINTS: (12, 12, 0), Place.OBJECTS: (12, 12, 0), Place.FUSED: (0, 0, 0)}


def test_a_delete_that_fails_is_tried_again_and_then_stops_the_pipeline(world):
    """A pipeline that goes on forgets it."""
    live(world)
    world.change(None, 2)
    faulty = with_faults(world.kv, CrashPoint("delete", fault=BlobError("the bucket is read-only"), times=99))
    with pytest.raises(BlobError, match="deleting older KV artifacts failed 3 times, giving up: the bucket is read"):
        world.index(replace(world.index_parts, kv=faulty))
    assert receipt(world, 2) is None
    world.index()
    world.prefill()
    assert counts(receipt(world, 2)) == {Place.POINTS: (12, 12, 0), Place.OBJECTS: (12, 12, 0), Place.FUSED: (0, 0, 0)}


def test_a_document_that_came_back_keeps_its_content_and_the_receipt_is_closed(world):
    """The same chunks have the same artifacts: deleting by the folder would take what the new version names."""
    live(world)
    world.change(None, 2)
    world.index()
    world.change("\n\n".join(PARAGRAPHS[:4]), 3)
    world.index()
    world.prefill()
    world.assert_clean()
    assert len(world.kv.keys(document())) == 4
    assert receipt(world, 2).state is ReceiptState.COMPLETE
    assert counts(receipt(world, 2))[Place.POINTS] == (12, 12, 0)


def test_two_deletions_have_two_receipts(world):
    live(world)
    for version in (2, 3):
        world.change(None, version)
        world.index()
        world.prefill()
    assert counts(receipt(world, 2))[Place.POINTS] == (12, 12, 0)
    assert counts(receipt(world, 3))[Place.POINTS] == (0, 0, 0)


def test_reading_everything_again_changes_no_receipt(world):
    live(world)
    world.change(None, 2)
    world.index()
    world.prefill()
    before = receipt(world, 2)
    world.clock.advance(100)
    world.index(repeat=True)
    world.prefill(repeat=True)
    assert receipt(world, 2) == before
    assert [name.stage for name in receipts(world).of(document())] == [None]


CRASHES = [
    ("index", "put_new", 1),  # found
    ("index", "put_new", 2),  # index
    ("index", "list", 2),
    ("index", "delete", 1),
    ("prefill", "put_new", 1),  # the receipt
    ("prefill", "delete", 1),  # its parts
    ("prefill", "get", 1),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("pipeline", "call", "at"), CRASHES)
def test_kv_03_after_a_crash_anywhere_the_receipt_still_counts_everything(world, pipeline, call, at, after):
    """A purge that was interrupted and done again reports 0 deleted, as if nothing had been there."""
    live(world)
    world.change(None, 2)
    if pipeline == "prefill":
        world.index()
    blobs = with_faults(world.kv.blobs, CrashPoint(call, at=at, fault=SimulatedCrash(), after=after))
    parts = replace(getattr(world, f"{pipeline}_parts"), kv=KvStore(blobs, world.kv.generation))
    with pytest.raises(SimulatedCrash):
        getattr(world, pipeline)(parts)
    world.index()
    world.prefill()
    assert counts(receipt(world, 2)) == {Place.POINTS: (12, 12, 0), Place.OBJECTS: (12, 12, 0), Place.FUSED: (0, 0, 0)}
    assert [name.stage for name in receipts(world).of(document())] == [None]


def test_what_a_killed_prefill_put_for_an_older_version_goes_with_the_next_record():
    """INDEX had retired before the put, and the killed run never looked again: bytes of old text in the store."""
    world = World()
    live(world)
    world.change("All is different now.", 2)
    world.index()
    key, artifact = fake_artifact(document(), [7, 8, 9], generation=world.kv.generation)
    world.kv.put(document(), key, artifact)  # of version 1, late, and nobody confirmed it
    world.prefill()
    world.assert_clean()
    world.close()


def test_a_record_of_another_generation_closes_no_receipt(world):
    live(world)
    world.change(None, 2)
    world.index()
    (head,) = world.qdrant.documents()
    other = CommitRecord.of(head).model_copy(update={"generation": "other"})
    world.topics.reader(world.kafka.commits_topic, "pipeline").commit({0: 99})
    world.publisher.commit_record(world.kafka, other)
    (message,) = world.topics.messages(world.kafka.commits_topic)[-1:]
    world.topics.reader(world.kafka.commits_topic, "pipeline").commit({0: message.offset})
    world.prefill()
    assert receipt(world, 2) is None


def test_artifacts_of_other_documents_that_were_fused_with_it_go_and_are_counted():
    """They were computed behind its text: who deletes the document and keeps them has not deleted it."""
    world = World(neighbours=3)
    for name in ("d", "e", "f"):
        text = [f"Paragraph {n} of {name} says that the thing called {n * 7919} has number {n}." for n in range(3)]
        world.change("\n\n".join(text), 1, doc_id=name)
    world.index()
    world.prefill()
    others = [point for point in world.qdrant.fused_with(document()) if point.chunk.document != document()]
    assert others
    world.change(None, 2)
    world.index()
    assert noted(world, 2)[Stage.INDEX].left[Place.FUSED] == len(others), "it is PREFILL that deletes them"
    world.prefill()
    assert counts(receipt(world, 2))[Place.FUSED] == (len(others), len(others), 0)
    assert world.qdrant.fused_with(document()) == []
    for point in others:
        assert point.fusion.kv_key not in world.kv.keys(point.chunk.document)
    world.close()


def test_prefill_leaves_no_part_beside_a_receipt_that_another_process_closed_meanwhile(world):
    """A process that was cut off from the group and does not know noted what it had found, for ever."""
    delete_with_kv_that_is_put_late(world)
    other_does_all = CrashPoint("keys", at=2, fault=lambda: world.prefill())  # after it has counted what there is
    parts = replace(world.prefill_parts, kv=with_faults(world.kv, other_does_all))
    (head,) = world.qdrant.documents()
    done = deletion.confirm(parts, CommitRecord.of(head))
    assert done.state is ReceiptState.COMPLETE
    assert noted(world, 2) == {}


def test_a_deletion_by_a_backfill_waits_for_replicas_to_pass_its_record_in_the_topic(world):
    """A place in the file, or in the topic of documents, is no place in the topic that replicas follow."""
    for number in range(9):
        world.change(TEXT, 1, doc_id=f"other {number}")
    live(world)
    read = {0: len(world.topics.messages(world.kafka.commits_topic))}
    world.prefill_parts.replicas.say(Replica(name="one", positions=read, clean_ms=0))

    batch = (parse(world.index_parts, replace(world.change(None, 2), topic="documents.jsonl", offset=3)),)
    for step in INDEX_STEPS:
        batch = step(world.index_parts, batch)
    batch = tuple(map(parse_record, commit_messages(batch)))
    for step in PREFILL_STEPS:
        batch = step(world.prefill_parts, batch)
    assert [work.outcome for work in batch] == [Outcome.CONFIRMED]
    assert receipt(world, 2) is None, "the replica has not read it"

    world.prefill_parts.replicas.say(Replica(name="one", positions={0: read[0] + 1}, clean_ms=0))
    world.prefill()
    assert receipt(world, 2).state is ReceiptState.COMPLETE
