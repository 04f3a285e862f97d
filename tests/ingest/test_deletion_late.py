"""What a process that was cut off from its group leaves behind a complete receipt; docs/operations.md says so."""

from dataclasses import replace

import pytest

from ingest.reconcile import Action, Kind
from schemas.receipt import ReceiptState
from stores.fakes import CrashPoint, SimulatedCrash, with_faults
from tests.ingest.test_deletion import live, receipt
from tests.ingest.test_reconcile import found, reconcile
from tests.ingest.world import TEXT, document


def deleted_meanwhile(world):
    """The others have its partitions: they delete the document, and count nothing left."""

    def others():
        world.change(None, 2)
        world.index()
        world.prefill()
        assert receipt(world, 2).state is ReceiptState.COMPLETE
        assert left(world) == (0, 0)

    return others


def left(world):
    return world.qdrant.count(document()), len(world.kv.keys(document()))


def cut_off(world, pipeline, part, call, then):
    """Run a pipeline that hangs in a call while the document is deleted, has its effect after it, and then `then`."""
    parts = getattr(world, f"{pipeline}_parts")
    points = CrashPoint(call, fault=deleted_meanwhile(world)), then
    getattr(world, pipeline)(replace(parts, **{part: with_faults(getattr(parts, part), *points)}))


@pytest.mark.parametrize(
    ("pipeline", "part", "call", "leaves"),
    [("index", "index", "upsert", (12, 0)), ("prefill", "kv", "put", (0, 12))],
)
def test_what_is_written_after_the_recount_is_taken_away_by_who_wrote_it(world, pipeline, part, call, leaves):
    """All points of its version, or all its artifacts: not one. None of it is ever visible."""
    world.change(TEXT, 1)
    if pipeline == "prefill":
        world.index()
    seen = []
    last = 1 if call == "upsert" else sum(leaves)
    cut_off(world, pipeline, part, call, CrashPoint(call, at=last, fault=lambda: seen.append(left(world)), after=True))
    assert seen == [leaves]
    assert left(world) == (0, 0)
    assert world.texts() is None
    assert reconcile(world).findings == []


@pytest.mark.parametrize(
    ("pipeline", "part", "call", "leaves"),
    [("index", "index", "upsert", (12, 0)), ("prefill", "kv", "put", (0, 1))],
)
def test_where_it_was_killed_before_that_it_stays_unseen_until_reconcile(world, pipeline, part, call, leaves):
    """The receipt is complete and something is there: the documentation says that, and what takes it away."""
    world.change(TEXT, 1)
    if pipeline == "prefill":
        world.index()
    with pytest.raises(SimulatedCrash):
        cut_off(world, pipeline, part, call, CrashPoint(call, after=True))
    assert left(world) == leaves
    assert receipt(world, 2).state is ReceiptState.COMPLETE
    assert world.texts() is None
    world.index()
    world.prefill()
    assert left(world) == leaves, "the others have passed the tombstone and do not look again"
    report = reconcile(world)
    assert (Kind.LEFTOVERS, str(document()), sum(leaves), Action.CLOSED) in found(report)
    assert left(world) == (0, 0)


@pytest.mark.parametrize(("text", "stays"), [(None, (0, 0)), ("It is back.", (1, 1))])
def test_the_next_change_or_deletion_of_the_document_takes_it_away(world, text, stays):
    world.change(TEXT, 1)
    with pytest.raises(SimulatedCrash):
        cut_off(world, "index", "index", "upsert", CrashPoint("upsert", after=True))
    live(world, text, 3)
    assert left(world) == stays
    assert world.texts() == text
