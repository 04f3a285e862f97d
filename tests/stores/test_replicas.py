"""What serving replicas say of their memory, and how a deletion's receipt waits for it, but never for ever."""

from __future__ import annotations

import pytest

from schemas.errors import BlobError
from schemas.ids import DocumentKey
from schemas.receipt import Place, ReceiptPart, ReceiptState, Stage, Tier, judge
from schemas.replica import CLOCK_SLACK_MS, Dropped, Replica
from stores.blobs import open_blobs
from stores.clock import MovableClock
from stores.replicas import LEASE_S, Replicas

DOCUMENT = DocumentKey("t", "d")


@pytest.fixture
def clock():
    return MovableClock()


@pytest.fixture
def blobs(request):
    return open_blobs(f"memory://{request.node.name}")


@pytest.fixture
def replicas(blobs, clock):
    return Replicas(blobs, "g", clock)


def part(at_ms=1000, partition=0, offset=5, stage=Stage.PREFILL):
    return ReceiptPart(
        tenant="t", doc_id="d", version=7, generation="g", stage=stage, asked_ms=1, at_ms=at_ms,
        found={Place.POINTS: 3}, left={}, partition=partition, offset=offset,
    )  # fmt: skip


def judged(replicas, late):
    said = replicas.of(DOCUMENT, 7, late)
    noted = {Stage.FOUND: part(stage=Stage.FOUND), Stage.INDEX: part(stage=Stage.INDEX), Stage.PREFILL: late}
    return judge(
        DOCUMENT, 7, "g", {k: v for k, v in noted.items() if v}, {}, 2000,
        prefill_passed=False, tiers=said.tiers, waiting=said.waiting,
    )  # fmt: skip


def told(receipt):
    return [(count.tier, count.replicas, count.passed, count.dropped) for count in receipt.tiers]


def test_the_last_word_of_a_replica_counts_until_it_expires(replicas, blobs, clock):
    """A replica that was killed must not block anybody for ever."""
    replicas.say(Replica(name="one", clean_ms=1))
    clock.advance(1)
    replicas.say(Replica(name="one", clean_ms=2))
    replicas.say(Replica(name="two", clean_ms=1))
    assert [(one.name, one.clean_ms) for one in replicas.live()] == [("one", 2), ("two", 1)]
    assert len(blobs.list("replicas/g")) == 2, "one object for each"
    assert Replicas(blobs, "other", clock).live() == []
    clock.advance(LEASE_S)
    assert replicas.live() == []


def test_a_replica_that_leaves_is_gone_at_once_and_one_that_never_left_is_swept(replicas, blobs, clock):
    replicas.say(Replica(name="killed", clean_ms=1))
    replicas.say(Replica(name="well", clean_ms=1))
    clock.advance(3 * LEASE_S)
    replicas.say(Replica(name="well", clean_ms=2))
    assert len(blobs.list("replicas/g")) == 1
    replicas.leave("well")
    assert (replicas.live(), blobs.list("replicas/g")) == ([], [])


def test_speaking_twice_in_a_millisecond_leaves_the_later_word(replicas):
    replicas.say(Replica(name="one", clean_ms=1))
    replicas.say(Replica(name="one", clean_ms=2))
    assert [one.clean_ms for one in replicas.live()] == [2]


def test_a_damaged_word_is_an_error_and_not_a_replica_that_is_gone(replicas, blobs, clock):
    """Taken for absent, it would let a receipt say COMPLETE too early."""
    assert blobs.put_new(f"replicas/g/one={clock.now_ms() + 1000}", b"{")
    with pytest.raises(BlobError, match="damaged from outside"):
        replicas.live()


@pytest.mark.parametrize(("positions", "clean_ms", "passed"), [
    ({0: 5}, 0, False),
    ({0: 6}, 0, True),
    ({1: 9}, 0, False),
    ({}, 1000, False),
    ({}, 1001 + CLOCK_SLACK_MS, True),  # started, or compared with the heads, after the deletion
])  # fmt: skip
def test_a_replica_has_passed_a_tombstone_by_its_position_or_by_the_heads(positions, clean_ms, passed):
    assert Replica(name="one", positions=positions, clean_ms=clean_ms).passed(part()) is passed


def test_a_receipt_is_complete_only_after_every_replica_has_passed(replicas, clock):
    """Memory of a deleted document would outlive the proof that it is gone."""
    mine = Dropped(
        tenant_digest=DOCUMENT.tenant_digest, document_digest=DOCUMENT.digest, version=7, counts={Tier.HOST: 2}
    )
    replicas.say(Replica(name="quick", positions={0: 6}, clean_ms=0, dropped=(mine,)))
    replicas.say(Replica(name="slow", positions={0: 5}, clean_ms=0))
    receipt = judged(replicas, part())
    assert receipt.state is ReceiptState.PENDING
    assert receipt.missing == ("serving replica slow has not passed the tombstone yet",)
    assert told(receipt) == [("host", 2, 1, 2), ("prefix", 2, 1, 0)]
    clock.advance(1)
    replicas.say(Replica(name="slow", positions={0: 6}, clean_ms=0, dropped=(mine,)))
    receipt = judged(replicas, part())
    assert (receipt.state, receipt.missing) == (ReceiptState.COMPLETE, ())
    assert told(receipt) == [("host", 2, 2, 4), ("prefix", 2, 2, 0)]


def test_a_replica_that_is_gone_does_not_block_a_receipt(replicas, clock):
    replicas.say(Replica(name="killed", clean_ms=0))
    assert judged(replicas, part()).state is ReceiptState.PENDING
    clock.advance(LEASE_S)
    receipt = judged(replicas, part())
    assert (receipt.state, receipt.tiers) == (ReceiptState.COMPLETE, ())


def test_before_prefill_has_passed_nobody_is_waited_for_by_name(replicas):
    replicas.say(Replica(name="one", clean_ms=0))
    assert judged(replicas, None).missing == ("the prefill pipeline has not passed the tombstone yet",)
