"""What the pipelines count of the store of KV artifacts: what they wrote, and how often it failed them."""

from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from ingest import telemetry
from ingest.prefill import put_rows
from schemas.errors import ArtifactMiss, BlobError, MissReason, VectorIndexError
from stores.fakes import CrashPoint, with_faults
from tests.ingest.world import World, document

TEXT = "\n\n".join(f"Paragraph {n} says that the thing called {n * 7919} is number {n * 31}." for n in range(4))
NAMES = ("kv_writes", "kv_store_failures")


@pytest.fixture
def grown(world):
    """Gives by how much the writes and the failures of this generation grew since the test began."""

    def samples():
        labels = {"tier": "object", "generation": world.index_parts.generation.name}
        return [REGISTRY.get_sample_value(f"kvquilt_{name}_total", labels) or 0 for name in NAMES]

    before = samples()
    return lambda: [now - then for now, then in zip(samples(), before, strict=True)]


def failing(parts, part, *points):
    return replace(parts, **{part: with_faults(getattr(parts, part), *points)})


def test_each_artifact_that_is_written_is_counted_once(world, grown):
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    assert grown() == [4, 0]
    world.prefill(repeat=True)
    assert grown() == [4, 0]


def test_an_artifact_that_was_there_already_is_no_write(world, grown):
    """Bug: a topic that is read again looks like storage that grows."""
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    parts = world.prefill_parts
    for point in world.qdrant.chunks(document()):
        (rows,) = parts.model.prefill_chunks(parts.prefix_ids, [point.chunk.token_ids])
        put_rows(parts, point, point.kv_key, rows, parts.generation.front_sha256)
    assert grown() == [4, 0]


def test_a_put_that_is_tried_again_counts_its_failures_and_one_write(world, grown):
    world.change(TEXT, 1)
    world.index()
    world.prefill(failing(world.prefill_parts, "kv", CrashPoint("put", fault=BlobError("503"), times=2)))
    assert grown() == [4, 2]


def test_a_put_that_is_given_up_counts_each_attempt_and_no_write(world, grown):
    world.change(TEXT, 1)
    world.index()
    parts = failing(world.prefill_parts, "kv", CrashPoint("put", fault=BlobError("503"), times=99))
    with pytest.raises(BlobError, match="putting a KV artifact failed 3 times, giving up: 503"):
        world.prefill(parts)
    assert grown() == [0, 3]


def test_listing_and_deleting_artifacts_can_fail_too(world, grown):
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    world.change(None, 2)
    points = (CrashPoint("keys", fault=BlobError("503")), CrashPoint("delete", fault=BlobError("503")))
    world.index(failing(world.index_parts, "kv", *points))
    assert grown() == [4, 2]


def test_a_fault_of_the_vector_index_is_not_one_of_the_kv_store(world, grown):
    world.change(TEXT, 1)
    world.index(failing(world.index_parts, "index", CrashPoint("upsert", fault=VectorIndexError("down"), times=2)))
    assert len(world.clock.slept_s) == 2
    assert grown() == [0, 0]


class TestFused:
    """Chunks that have two artifacts each."""

    @pytest.fixture
    def world(self):
        world = World(neighbours=1)
        yield world
        world.close()

    def test_fused_artifacts_are_writes_too(self, world, grown):
        world.change(TEXT, 1)
        world.index()
        world.prefill()
        assert grown() == [8, 0]

    @pytest.mark.parametrize(("reason", "failures"), [(MissReason.STORE, 1), (MissReason.CHECKSUM, 0)])
    def test_a_neighbour_that_the_store_does_not_give_is_a_failure(self, world, grown, reason, failures):
        """Nothing is tried again then: the chunk takes another neighbour, and only this number tells of it."""
        world.change(TEXT, 1)
        world.index()
        world.prefill(failing(world.prefill_parts, "kv", CrashPoint("get", fault=ArtifactMiss(reason, "no"))))
        assert grown() == [8, failures]


def test_a_generation_is_counted_from_zero():
    """Bug: the first failure of a series that was not there is no increase, and no alert fires."""
    telemetry.watch_generation("just made")
    labels = {"tier": "object", "generation": "just made"}
    assert [REGISTRY.get_sample_value(f"kvquilt_{name}_total", labels) for name in NAMES] == [0, 0]
