"""The host tier: bytes, what goes first, pins, and nothing of a version that is out of date."""

from __future__ import annotations

import threading

import pytest

from schemas.head import CommitRecord, DocumentState
from schemas.ids import DocumentKey
from stores.fakes import fake_artifact
from stores.tiers import Floors, HostTier, Name

DOCUMENT = DocumentKey("t", "d")
OTHER = DocumentKey("t", "other")


def artifact(n_tokens=4, document=DOCUMENT, version=1):
    return fake_artifact(document, token_ids=range(n_tokens), version=version)[1]


SIZE = artifact().nbytes


def name(key="a", document=DOCUMENT, version=1):
    return Name(document, version, key)


def record(version, state=DocumentState.LIVE, document=DOCUMENT):
    return CommitRecord(
        tenant=document.tenant, doc_id=document.doc_id, version=version, state=state, generation="g", event_ms=1,
        committed_ms=2,
    )  # fmt: skip


def keep(tier, key, cost_s=1.0, n_tokens=4, document=DOCUMENT, version=1, also=()):
    held = artifact(n_tokens, document, version)
    return tier.keep(name(key, document, version), held, [(document, version), *also], cost_s)


@pytest.fixture
def floors():
    return Floors()


@pytest.fixture
def tier(floors):
    return HostTier(3 * SIZE, floors)


def test_what_was_kept_comes_back_for_its_version_only(tier):
    """An unchanged chunk has one artifact in every version; what the tail drops goes by version."""
    assert keep(tier, "a")
    found = tier.pin(name("a"))
    assert found is not None
    assert tier.pin(name("a", version=2)) is None
    assert tier.pin(name("b")) is None
    assert (len(tier), tier.nbytes) == (1, SIZE)


def test_kv_06_the_tier_never_has_more_than_its_bytes(tier):
    for n in range(20):
        keep(tier, f"{n}")
        assert tier.nbytes <= tier.max_bytes
    assert (len(tier), tier.evicted) == (3, 17)
    assert not keep(tier, "large", n_tokens=1000)
    assert len(tier) == 3, "what has no room at all sends nobody away"


def test_what_was_dear_and_used_often_stays_and_what_was_used_long_ago_does_not(tier):
    keep(tier, "dear", cost_s=9.0)
    keep(tier, "used")
    keep(tier, "plain")
    tier.unpin(name("used"), tier.pin(name("used")))
    keep(tier, "new")
    assert tier.pin(name("plain")) is None
    assert tier.pin(name("dear")) is not None
    for n in range(30):  # what goes raises the clock: nothing stays for ever on what it was once worth
        keep(tier, f"{n}", cost_s=2.0)
    assert tier.pin(name("used")) is None


def test_what_is_in_use_is_not_sent_away(tier):
    for key in "abc":
        keep(tier, key)
    held = [tier.pin(name(key)) for key in "abc"]
    assert not keep(tier, "d"), "all of it is in use"
    tier.unpin(name("b"), held[1])
    assert keep(tier, "d")
    assert tier.pin(name("a")) is held[0]
    assert tier.pin(name("b")) is None


def test_a_pin_on_what_was_dropped_does_not_come_off_what_was_read_again(tier):
    """Else the second reader's artifact could be sent away while it is used."""
    keep(tier, "a")
    first = tier.pin(name("a"))
    tier.drop(DOCUMENT, 2)
    keep(tier, "a")
    second = tier.pin(name("a"))
    tier.unpin(name("a"), first)
    keep(tier, "b")
    keep(tier, "c")
    keep(tier, "d")
    assert tier.pin(name("a")) is second


@pytest.mark.parametrize(("change", "left"), [
    (record(2), {(DOCUMENT, 2), (OTHER, 1)}),
    (record(2, DocumentState.DELETED), {(OTHER, 1)}),
    (record(1), {(DOCUMENT, 1), (DOCUMENT, 2), (OTHER, 1)}),
    (record(9, document=OTHER), {(DOCUMENT, 1), (DOCUMENT, 2)}),
])  # fmt: skip
def test_a_change_drops_what_it_puts_out_of_date_and_nothing_else(tier, floors, change, left):
    keep(tier, "a", version=1)
    keep(tier, "a", version=2)
    keep(tier, "a", document=OTHER)
    before = len(tier)
    assert tier.drop(*floors.note(change)) == before - len(left)
    assert tier.owners() == left
    assert tier.nbytes == len(left) * SIZE


def test_what_was_fused_with_a_document_goes_with_it(tier, floors):
    """Its rows hold the neighbour's influence."""
    keep(tier, "fused", also=[(OTHER, 4)])
    assert tier.drop(*floors.note(record(4, DocumentState.DELETED, OTHER))) == 1
    assert (len(tier), tier.nbytes) == (0, 0)


def test_a_load_that_ends_after_its_document_changed_is_not_kept(tier, floors):
    """The record has passed: nobody would drop it any more."""
    floors.note(record(2))
    assert not keep(tier, "a", version=1)
    assert keep(tier, "a", version=2)
    floors.note(record(1))
    assert not keep(tier, "b", version=1), "a record that comes late lowers nothing"
    assert (len(tier), tier.nbytes) == (1, SIZE)


def test_floors_are_remembered_of_the_last_documents(floors):
    few = Floors(remembered=2)
    for n in range(3):
        few.note(record(5, document=DocumentKey("t", f"{n}")))
    assert [few.below([(DocumentKey("t", f"{n}"), 4)]) for n in range(3)] == [False, True, True]


def test_kv_06_threads_that_keep_pin_and_drop_leave_the_sums_right(floors):
    """Bytes that drift fill the memory, or leave the tier unused, after some days."""
    tier = HostTier(5 * SIZE, floors)

    def work(number):
        for n in range(200):
            key = f"{(n * 7 + number) % 9}"
            keep(tier, key)
            held = tier.pin(name(key))
            if n % 5 == 0:
                tier.drop(DOCUMENT, 2)
            if held is not None:
                tier.unpin(name(key), held)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.nbytes == len(tier) * SIZE <= tier.max_bytes
    tier.drop(DOCUMENT, 2)
    assert (len(tier), tier.nbytes, tier.owners()) == (0, 0, set())
