"""gc: what is not used any more goes, whatever it was interrupted at; what is used stays."""

import pytest

from schemas.errors import SettingsError
from schemas.ids import DocumentKey
from schemas.receipt import ReceiptPart, Stage
from stores.fakes import CrashPoint, SimulatedCrash, fake_artifact, with_faults
from stores.generations import GenerationStore
from stores.kv_store import KvStore
from stores.receipts import Receipts
from stores.reclaim import reclaim
from tests.stores.generations_world import LEASE_S, NEW, OLD, Deployment, head_of, settings_of

DOCUMENT = DocumentKey("default", "d")
GRACE_S = 3600.0


@pytest.fixture
def deployment():
    """NEW is live, OLD was; both hold a document."""
    deployment = Deployment()
    deployment.first_use()
    deployment.add()
    for generation in (OLD, NEW):
        deployment.indexes[generation.name].flip(head_of(DOCUMENT, 1, generation))
        key, artifact = fake_artifact(DOCUMENT, [1, 2], generation=generation.name)
        KvStore(deployment.blobs, generation.name).put(DOCUMENT, key, artifact)
        part = ReceiptPart(
            tenant="default", doc_id="d", version=1, generation=generation.name, stage=Stage.FOUND,
            asked_ms=1, at_ms=1, found={}, left={},
        )  # fmt: skip
        Receipts(deployment.blobs).note(part)
    deployment.promote()
    yield deployment
    deployment.close()


def collect(deployment, grace_s=GRACE_S, **how):
    return reclaim(deployment.store, deployment.open_entry, grace_s=grace_s, **how)


def assert_gone(deployment):
    assert deployment.states() == {"new": "live"}
    assert not deployment.indexes[OLD.name].exists()
    assert deployment.blobs.list(f"kv/{OLD.name}") == []
    assert {name.generation for name in Receipts(deployment.blobs).all()} == {NEW.name}


def assert_new_is_whole(deployment):
    assert deployment.store.read().live.name == NEW.name
    assert deployment.indexes[NEW.name].heads([DOCUMENT])[DOCUMENT].version == 1
    assert len(deployment.blobs.list(f"kv/{NEW.name}")) == 1


def test_a_generation_is_reclaimed_after_its_grace_with_everything_of_it(deployment):
    (kept,) = collect(deployment)
    assert kept.kept == "standby for less than its grace; 3600 s are left"
    deployment.clock.advance(GRACE_S)
    (planned,) = collect(deployment, dry_run=True)
    assert (planned.kept, deployment.states()) == ("", {"old": "standby", "new": "live"})
    (gone,) = collect(deployment)
    assert (gone.collections, gone.objects, gone.parts) == (2, 1, 1)
    assert_gone(deployment)
    assert_new_is_whole(deployment)
    assert collect(deployment) == []


def test_kv_13_a_reader_keeps_a_generation_until_it_leaves_or_is_silent_for_too_long(deployment):
    claim = deployment.store.claim(OLD, settings_of(OLD), "serve")
    (kept,) = collect(deployment, grace_s=0)
    assert kept.kept.startswith("in use by serve of ")
    assert deployment.states() == {"old": "standby", "new": "live"}
    deployment.clock.advance(LEASE_S + 1)
    collect(deployment, grace_s=0)
    assert_gone(deployment)
    claim.close()


def test_a_reader_that_comes_while_it_is_being_decided_is_seen(deployment):
    """Bug: leases looked at, a reader begins, the data goes. So the record is written before they are looked at."""
    claims = []

    def come():
        if not claims:
            with pytest.raises(SettingsError, match="is being reclaimed"):
                deployment.store.claim(OLD, settings_of(OLD), "serve")
            claims.append(deployment.store.leases.hold(OLD.name, "serve"))  # its lease was there, the record not read

    late = GenerationStore(
        with_faults(deployment.blobs, CrashPoint("put_new", fault=come, after=True)), deployment.clock
    )
    (kept,) = reclaim(late, deployment.open_entry, grace_s=0)
    assert kept.kept.startswith("in use by serve")
    assert deployment.states() == {"old": "standby", "new": "live"}, "as it was: one can roll back to it"
    assert deployment.indexes[OLD.name].heads([DOCUMENT])[DOCUMENT].version == 1
    claims[0].close()


STEPS = [("put_new", 1), ("sweep", 1), ("delete", 1), ("delete", 2), ("delete", 3), ("put_new", 2)]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("call", "at"), STEPS)
def test_a_crash_at_any_step_leaves_the_live_one_whole_and_the_next_run_finishes(deployment, call, at, after):
    blobs = with_faults(deployment.blobs, CrashPoint(call, at=at, after=after))
    with pytest.raises(SimulatedCrash):
        reclaim(GenerationStore(blobs, deployment.clock), deployment.open_entry, grace_s=0)
    assert_new_is_whole(deployment)
    collect(deployment, grace_s=0)
    assert_gone(deployment)
    assert_new_is_whole(deployment)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_while_collections_are_dropped_is_finished_by_the_next_run(deployment, after):
    def open_entry(entry):
        return with_faults(deployment.open(entry.generation), CrashPoint("drop", after=after))

    with pytest.raises(SimulatedCrash):
        reclaim(deployment.store, open_entry, grace_s=0)
    assert deployment.states() == {"old": "reclaiming", "new": "live"}
    assert_new_is_whole(deployment)
    collect(deployment)  # what was begun is finished, whatever its grace
    assert_gone(deployment)


def test_what_was_promoted_meanwhile_is_not_reclaimed(deployment):
    """Bug: gc had read the record before a rollback."""

    def roll_back():
        if deployment.store.read().live.name == NEW.name:
            deployment.promote(OLD)

    blobs = with_faults(deployment.blobs, CrashPoint("put_new", fault=roll_back))
    (kept,) = reclaim(GenerationStore(blobs, deployment.clock), deployment.open_entry, grace_s=0)
    assert kept.kept == "its state changed meanwhile"
    assert deployment.states() == {"old": "live", "new": "standby"}
