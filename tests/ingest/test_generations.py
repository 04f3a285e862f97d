"""Two generations side by side: both are fed, one switch, and what is deleted is deleted in both."""

import itertools
from dataclasses import replace

import pytest

from ingest.siblings import carry_tombstones
from schemas.errors import InputError, VectorIndexError
from schemas.receipt import ReceiptState
from stores.fakes import CrashPoint, SimulatedCrash, with_faults
from stores.reclaim import reclaim
from tests.ingest.generations_world import NEW, TwoGenerations
from tests.ingest.world import document


@pytest.fixture
def world():
    world = TwoGenerations()
    yield world
    world.close()


def text_in(index, doc_id="d"):
    head = index.heads([document(doc_id)]).get(document(doc_id))
    if head is None or not head.live:
        return None
    return " ".join(chunk.chunk.text for chunk in index.chunks(document(doc_id), head.version))


def test_events_reach_both_generations_and_each_has_chunks_and_kv_of_its_own(world):
    text = " ".join(f"word{n}" for n in range(30))
    world.change(text, 1)
    world.index()
    world.prefill()
    world.build()
    world.catch_up()
    assert world.everything() == ((2, 2), (1, 1)), "chunks of 16 and of 32 tokens"
    world.change("another text", 2)
    world.index()
    world.prefill()
    assert (text_in(world.qdrant), text_in(world.new_index)) == ("another text", text)
    world.catch_up()
    assert text_in(world.new_index) == "another text"
    assert world.everything() == ((1, 1), (1, 1))


def test_compaction_keeps_a_commit_record_for_each_generation(world):
    """Bug: under the document's key alone, the record of the one generation replaced that of the other, unread."""
    world.build()
    world.change("text", 1)
    world.index()
    world.index(world.new_index_parts)
    assert len({message.key for message in world.topics.messages(world.kafka.commits_topic)}) == 2


def test_promote_refuses_what_is_not_caught_up_and_by_force_says_what_is_missing(world):
    world.change("text", 1)
    world.change("text", 1, doc_id="e")
    world.index()
    world.prefill()
    world.build()
    with pytest.raises(InputError, match=r"is not caught up with the live one: documents missing: 2 \(default/"):
        world.promote()
    world.index(world.new_index_parts)
    with pytest.raises(InputError, match=r"chunks without KV: 2"):
        world.promote()
    assert world.store.read().live.name == world.old.name
    done = world.promote(force=True)
    assert (done.before, done.live, done.gap.without_kv.keys()) == (
        world.old.name,
        NEW.name,
        {document("d"), document("e")},
    )
    world.prefill(world.new_prefill_parts)
    assert not world.promote(world.old.name).gap, "the old one was fed all the time: rollback is the same switch"
    with pytest.raises(InputError, match="is live"):
        world.promote(world.old.name)


def test_promote_waits_for_what_is_on_its_way(world):
    """Bug: while documents change all day there was always one that the new generation had not read yet."""
    world.change("text", 1)
    world.index()
    world.prefill()
    world.build()

    class CatchUp:
        def __init__(self, clock):
            self._clock = clock

        def now_ms(self):
            return self._clock.now_ms()

        def sleep(self, seconds):
            world.catch_up()
            self._clock.sleep(seconds)

    world.store.clock = CatchUp(world.clock)
    assert not world.promote(wait_s=5.0).gap


def test_of_two_switches_at_the_same_time_the_second_is_told(world):
    world.build()
    target = world.store.read().get(NEW.name)
    other = NEW.model_copy(update={"chunk_max_tokens": 99})
    world.store.change(lambda now: now.add(other, world.settings, 1))

    def switch_between():
        if world.store.read().live.name == world.old.name:
            world.store.change(lambda now: now.promote(other.name, 1))

    blobs = with_faults(world.store.blobs, CrashPoint("put_new", fault=switch_between))
    slow = type(world.store)(blobs, world.clock)
    from ingest.switching import promote

    with pytest.raises(InputError, match="another generation became live meanwhile"):
        promote(world.settings, slow, target, force=True, wait_s=0)
    assert world.store.read().live.name == other.name


def test_a_deletion_reaches_a_generation_that_nobody_feeds_and_does_not_come_back_by_rollback(world):
    """Bug: the old generation kept a deleted document, and a rollback answered from it."""
    world.ingest_into_both("a secret")
    world.promote()  # from here on only the new one is fed
    world.change(None, 2)
    world.catch_up()
    assert world.everything() == ((0, 0), (0, 0))
    assert text_in(world.qdrant) is None
    assert not world.qdrant.heads([document()])[document()].live
    receipt = world.receipt()
    assert (receipt.state, receipt.missing) == (ReceiptState.COMPLETE, ())
    assert [(count.found, count.deleted, count.left) for count in receipt.counts] == [(2, 2, 0), (2, 2, 0), (0, 0, 0)]
    world.promote(world.old.name)
    assert world.receipt().state is ReceiptState.COMPLETE
    world.change("a late older event", 1)
    world.index()
    assert text_in(world.qdrant) is None


def test_a_receipt_waits_for_the_prefill_of_a_generation_that_is_fed(world):
    """It may be putting KV of an older version there just now: gone is gone when it has passed the tombstone."""
    world.ingest_into_both("text")
    world.feed_new()
    world.change(None, 2)
    world.index()
    world.prefill()
    pending = world.receipt()
    assert pending.state is ReceiptState.PENDING
    assert pending.missing == (f"generation {NEW.name}: the prefill pipeline has not passed the tombstone yet",)
    world.prefill(world.new_prefill_parts)
    assert world.receipt().state is ReceiptState.COMPLETE
    world.index(world.new_index_parts)  # its own INDEX comes by later and finds everything done
    world.prefill(world.new_prefill_parts)
    assert world.receipt().state is ReceiptState.COMPLETE
    assert world.everything() == ((0, 0), (0, 0))


def test_a_prefill_that_is_late_there_does_not_outlive_the_deletion(world):
    """Bug: PREFILL of the other generation put an artifact after everything was counted."""
    world.change("text", 1)
    world.index()
    world.prefill()
    world.build()
    world.index(world.new_index_parts)
    deleting = itertools.count()

    def delete_first(chunks):
        if next(deleting) == 0:
            world.change(None, 2)
            world.index()
            world.prefill()

    late = replace(world.new_prefill_parts, model=type(world.model)(fails=delete_first))
    world.prefill(late)
    assert world.everything() == ((0, 0), (0, 0))


def test_a_deletion_that_the_topic_has_forgotten_is_carried_over(world):
    """Bug: a source that still had the document brought it back into the new generation."""
    world.change("text", 1)
    world.change(None, 2)
    world.index()
    world.prefill()
    assert world.receipt().state is ReceiptState.COMPLETE
    world.build()
    head = world.new_index.heads([document()])[document()]
    assert (head.live, head.version, head.generation) == (False, 2, NEW.name)
    assert world.receipt().state is ReceiptState.COMPLETE, "it has taken over the tombstone and holds nothing"
    kept = world.new_index_parts.receipts.get(document(), 2, NEW.name)
    assert (kept.state, kept.asked_ms) == (ReceiptState.COMPLETE, head.event_ms), "so that reconcile finds no drift"
    world.catch_up()  # the events of the topic, from its beginning
    assert world.everything() == ((0, 0), (0, 0))
    assert carry_tombstones(world.prefill_parts, world.new_prefill_parts) == 0


def test_a_deletion_that_the_topic_has_forgotten_deletes_what_a_source_brought(world):
    """Files of yesterday hold the document, the deletion is of today and no longer in the topic."""
    world.ingest_into_both("text")
    gone = replace(world.index_parts, generations=None)  # as if the deletion had been before the record was kept
    world.change(None, 2)
    world.index(gone)
    world.prefill()
    assert text_in(world.new_index) == "text"
    assert carry_tombstones(world.prefill_parts, world.new_prefill_parts) == 1
    assert world.everything() == ((0, 0), (0, 0))
    assert world.receipt().state is ReceiptState.COMPLETE


def test_a_document_that_came_back_there_is_not_deleted_by_an_older_tombstone(world):
    """Bug: the new generation reads the topic from its beginning, old deletions too."""
    world.change("text", 1)
    world.change(None, 2)
    world.change("text again", 3)
    world.index()
    world.prefill()
    world.build()
    world.catch_up()
    assert (text_in(world.qdrant), text_in(world.new_index)) == ("text again", "text again")
    assert world.everything() == ((1, 1), (1, 1))
    assert world.receipt(2).state is ReceiptState.COMPLETE


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", ["flip", "delete", "stale_chunk_ids"])
def test_a_crash_while_deleting_there_is_repaired_by_reading_the_event_again(world, call, after):
    world.ingest_into_both("text")
    world.change(None, 2)

    def crashing(*args, beside=world.qdrant.beside):
        return with_faults(beside(*args), CrashPoint(call, after=after))

    index = with_faults(world.qdrant)
    index.beside = crashing
    with pytest.raises(SimulatedCrash):
        world.index(replace(world.index_parts, index=index))
    world.index()
    world.prefill()
    assert world.everything() == ((0, 0), (0, 0))
    assert world.receipt().state is ReceiptState.COMPLETE


def test_a_generation_that_is_reclaimed_meanwhile_does_not_stop_the_pipeline(world):
    """Bug: INDEX failed on collections that gc had just deleted, again and again."""
    world.ingest_into_both("text")
    world.change(None, 2)

    def gone(*args, beside=world.qdrant.beside):
        world.clock.advance(10)
        reclaim(world.store, lambda entry: beside(entry.name, entry.generation.embedding_dim), grace_s=1)
        return beside(*args)

    index = with_faults(world.qdrant)
    index.beside = gone
    world.index(replace(world.index_parts, index=index))
    world.prefill()
    assert [one.name for one in world.store.read().known] == [world.old.name]
    assert world.receipt().state is ReceiptState.COMPLETE


def test_a_store_that_fails_there_is_not_taken_for_a_generation_that_is_gone(world):
    world.ingest_into_both("text")
    world.change(None, 2)

    def failing(*args, beside=world.qdrant.beside):
        return with_faults(beside(*args), CrashPoint("flip", fault=VectorIndexError("no answer"), times=99))

    index = with_faults(world.qdrant)
    index.beside = failing
    with pytest.raises(VectorIndexError, match="no answer"):
        world.index(replace(world.index_parts, index=index))
    world.index()
    world.prefill()
    world.prefill(world.new_prefill_parts)
    assert world.receipt().state is ReceiptState.COMPLETE


def test_a_generation_that_is_being_reclaimed_still_counts_until_it_is_empty(world):
    world.ingest_into_both("text")
    world.store.change(lambda now: now.reclaiming(NEW.name, 1))  # gc was killed here
    world.change(None, 2)
    world.index()
    world.prefill()
    receipt = world.receipt()
    assert receipt.missing == (f"generation {NEW.name}: it is being reclaimed; run `kvquilt gc` to its end",)
    reclaim(world.store, lambda entry: world.qdrant.beside(entry.name, 8), grace_s=0)
    assert world.receipt().state is ReceiptState.COMPLETE
