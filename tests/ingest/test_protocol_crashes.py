"""The commit protocol of DESIGN section 5 under crashes and faults, at each of its calls."""

from dataclasses import replace

import pytest

from schemas.errors import VectorIndexError
from stores.fakes import CrashPoint, SimulatedCrash, with_faults
from tests.ingest.world import PARAGRAPHS, TEXT, World

INDEX_CALLS = [
    ("index", "heads"),
    ("index", "chunks"),
    ("index", "live_chunks"),
    ("embedder", "embed"),
    ("index", "upsert"),
    ("index", "flip"),
    ("kv", "keys"),
    ("index", "stale_chunk_ids"),
    ("index", "delete"),
    ("kv", "delete"),
    ("publisher", "publish_many"),
]
PREFILL_CALLS = [
    ("index", "heads"),
    ("index", "live_chunks"),
    ("kv", "keys"),
    ("model", "prefill_chunks"),
    ("kv", "put"),
    ("index", "mark_kv"),
]


def crash_world(world):
    """Two documents with one version done; then one is changed in part and the other deleted."""
    for doc_id in ("d", "e"):
        world.change(TEXT, 1, doc_id=doc_id)
    world.index()
    world.prefill()
    world.change("\n\n".join([*PARAGRAPHS[:6], "A new paragraph.", *PARAGRAPHS[8:]]), 2)
    world.change(None, 2, doc_id="e")
    world.change("third", 1, doc_id="f")


@pytest.fixture(scope="module")
def undisturbed():
    world = World()
    crash_world(world)
    world.index()
    world.prefill()
    yield world.state()
    world.close()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("part", "call"), INDEX_CALLS, ids=lambda value: value)
def test_a_crash_anywhere_in_index_is_repaired_by_reading_again(world, undisturbed, part, call, after):
    crash_world(world)
    point = CrashPoint(call, fault=SimulatedCrash(), after=after)
    faulty = with_faults(getattr(world.index_parts, part), point)
    with pytest.raises(SimulatedCrash):
        world.index(replace(world.index_parts, **{part: faulty}))
    world.index()
    world.prefill()
    assert world.state() == undisturbed
    world.assert_clean()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("part", "call"), PREFILL_CALLS, ids=lambda value: value)
def test_a_crash_anywhere_in_prefill_is_repaired_by_reading_again(world, undisturbed, part, call, after):
    crash_world(world)
    world.index()
    point = CrashPoint(call, fault=SimulatedCrash(), after=after)
    faulty = with_faults(getattr(world.prefill_parts, part), point)
    with pytest.raises(SimulatedCrash):
        world.prefill(replace(world.prefill_parts, **{part: faulty}))
    world.prefill()
    assert world.state() == undisturbed
    world.assert_clean()


@pytest.mark.parametrize(("part", "call"), [("index", "upsert"), ("index", "flip"), ("kv", "keys")])
def test_an_infrastructure_fault_is_waited_out(world, undisturbed, part, call):
    crash_world(world)
    point = CrashPoint(call, fault=VectorIndexError("Qdrant is restarting"), times=2)
    world.index(replace(world.index_parts, **{part: with_faults(getattr(world.index_parts, part), point)}))
    assert len(world.clock.slept_s) == 2
    world.prefill()
    assert world.state() == undisturbed
    assert world.dead_letters() == []


def test_an_infrastructure_fault_that_stays_is_no_dead_letter(world):
    """Whoever dead-letters what an outage refused drains the topic while the database restarts."""
    world.change(TEXT, 1)
    point = CrashPoint("upsert", fault=VectorIndexError("Qdrant is down"), times=99)
    with pytest.raises(VectorIndexError, match="upserting points failed 3 times, giving up: Qdrant is down"):
        world.index(replace(world.index_parts, index=with_faults(world.qdrant, point)))
    assert world.dead_letters() == []
    world.index()
    assert world.texts() is not None
