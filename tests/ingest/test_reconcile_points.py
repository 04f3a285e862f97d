"""Reconcile on points: of events that are on their way or were given up, lost ones, and another writer's."""

from dataclasses import replace

import pytest

from ingest.formats import EventReader
from ingest.reconcile import Action, Kind, Reconciler
from tests.ingest.test_deletion import live
from tests.ingest.test_reconcile import IDLE, agree, crash, forget, found, reconcile, stray
from tests.ingest.world import TEXT, document


def test_points_of_an_event_that_is_being_indexed_are_left_alone(world):
    """Deleted between upsert and flip, they would be missing from the version that becomes live."""
    live(world)
    world.change("All is different now.", 2)
    crash(world, "index", "flip")
    report = reconcile(world, lag={"index": 1, "prefill": 0}, grace_s=1)
    assert found(report) == {(Kind.POINTS_AHEAD, "default/d", 1, Action.NONE)}
    assert "may be being indexed" in report.findings[0].detail
    agree(world)
    assert world.texts() == "All is different now."


def test_points_of_an_event_that_came_after_the_pipelines_were_idle_are_left_alone(world):
    """It was published when both groups had committed everything that there was: nothing says that it was given up."""
    live(world)
    stray(world)  # a reason to look at the document

    def lag(pipeline):
        if pipeline == "prefill":  # the last that is asked
            world.change("All is different now.", 2)
            crash(world, "index", "flip")
        return 0

    report = reconcile(world, lag=lag)
    assert (Kind.POINTS_AHEAD, "default/d", 1, Action.NONE) in found(report)
    agree(world)
    assert world.texts() == "All is different now."


@pytest.mark.parametrize("known", [True, False], ids=["above the head", "without a head"])
def test_points_of_an_event_that_was_given_up_are_deleted_once_the_pipelines_have_passed(world, known):
    if known:
        live(world)
    world.change("All is different now.", 2)
    crash(world, "index", "flip")
    forget(world)
    assert found(reconcile(world)) == {(Kind.POINTS_AHEAD, "default/d", 1, Action.DELETED)}
    agree(world)
    assert (world.texts() is not None) is known


def test_points_whose_head_moves_to_them_while_they_are_deleted_are_put_back(world):
    """The same event may come twice, the second time just now."""
    live(world)
    world.change("All is different now.", 2)
    crash(world, "index", "flip")
    message = world.topics.messages(world.kafka.documents_topic)[-1]
    forget(world)

    class Flips:
        def __getattr__(self, name):
            return getattr(world.qdrant, name)

        def delete(self, ids):
            world.raw(message.value)
            crash(world, "kv", "keys")  # up to and with the flip
            world.qdrant.delete(ids)

    reconcile(world, parts=replace(world.index_parts, index=Flips()))
    assert world.texts() == "All is different now."


def test_lost_points_are_made_again_from_their_event(world):
    world.change("first")
    world.index()
    world.clock.advance(5)
    world.change(TEXT)
    world.index()
    world.prefill()
    version = world.qdrant.heads([document()])[document()].version
    world.qdrant.delete([point.chunk.id for point in world.qdrant.chunks(document())[:4]])
    world.clock.advance(60)
    assert found(reconcile(world)) == {(Kind.LOST_POINTS, "default/d", 4, Action.RESUBMITTED)}
    world.index()
    world.prefill()
    assert world.texts().split() == TEXT.split()
    assert world.qdrant.heads([document()])[document()].version == version, "sent again in its place"
    agree(world)


def test_lost_points_whose_event_is_gone_are_named(world):
    live(world)
    world.qdrant.delete([world.qdrant.chunks(document())[0].chunk.id])
    one = Reconciler(world.index_parts, lag=IDLE.__getitem__, events=list, read=EventReader())
    (finding,) = one.run().findings
    assert (finding.kind, finding.n, finding.action) == (Kind.LOST_POINTS, 1, Action.NONE)
    assert "publish the document again" in finding.detail
    assert len(world.kv.keys(document())) == 12, "its artifacts are kept"


def test_points_beyond_the_live_versions_number_are_deleted(world):
    """Two writers of one version with other content: the loser's last points would be found by searches."""
    live(world)
    chunks = world.qdrant.chunks(document(), vectors=True)
    extra = replace(chunks[0], chunk=replace(chunks[0].chunk, ordinal=12))
    world.qdrant.upsert([extra])
    assert found(reconcile(world)) == {(Kind.STALE_POINTS, "default/d", 1, Action.DELETED)}
    agree(world)


def test_points_that_a_refused_writer_wrote_over_are_made_again_from_the_winners_event(world):
    live(world)
    mine = world.qdrant.chunks(document(), vectors=True)
    others = [replace(point, content_digest="of what was refused") for point in mine[:2]]
    world.qdrant.upsert(others)
    assert found(reconcile(world)) == {(Kind.LOST_POINTS, "default/d", 2, Action.RESUBMITTED)}
    agree(world)
    assert world.texts().split() == TEXT.split()
