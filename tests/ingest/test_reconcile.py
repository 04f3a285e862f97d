"""Reconcile: every kind of drift made on purpose, found, repaired; nothing that is on its way is touched."""

from dataclasses import replace

import pytest

from ingest.formats import EventReader
from ingest.reconcile import Action, Kind, Reconciler
from schemas.errors import InputError, TopicError
from schemas.receipt import Place, ReceiptPart, ReceiptState, Stage
from stores.fakes import CrashPoint, SimulatedCrash, fake_artifact, with_faults
from tests.ingest.test_deletion import Keeps, counts, live, receipt
from tests.ingest.world import PARAGRAPHS, TEXT, World, document

IDLE = {"index": 0, "prefill": 0}


def reconciler(world, lag=None, parts=None):
    return Reconciler(
        parts or world.index_parts,
        lag=(lag or IDLE).__getitem__ if not callable(lag) else lag,
        events=lambda: world.topics.messages(world.kafka.documents_topic),
        read=EventReader(),
    )


def reconcile(world, *, lag=None, parts=None, **options):
    return reconciler(world, lag, parts).run(**options)


def found(report):
    return {(finding.kind, finding.document, finding.n, finding.action) for finding in report.findings}


def agree(world):
    """Nothing is found any more once the pipelines have done what was announced."""
    world.index()
    world.prefill()
    assert reconcile(world).findings == []
    world.assert_clean()


def stray(world, doc_id="d", token_ids=(7, 8, 9)):
    """An object that nothing names."""
    key, artifact = fake_artifact(document(doc_id), list(token_ids), generation=world.kv.generation)
    world.kv.put(document(doc_id), key, artifact)


def crash(world, part, call, pipeline="index", **options):
    """Run a pipeline that dies at a call and is never started again."""
    parts = getattr(world, f"{pipeline}_parts")
    faulty = with_faults(getattr(parts, part), CrashPoint(call, fault=SimulatedCrash(), **options))
    with pytest.raises(SimulatedCrash):
        getattr(world, pipeline)(replace(parts, **{part: faulty}))


def forget(world):
    """The events that were not done are gone from the topic."""
    for topic in (world.kafka.documents_topic, world.kafka.commits_topic):
        reader = world.topics.reader(topic, "pipeline")
        reader.commit({0: len(world.topics.messages(topic))})


def test_where_everything_agrees_nothing_is_found_and_nobody_is_waited_for(world):
    live(world)
    world.change(None, 1, doc_id="e")
    world.index()
    world.prefill()
    report = reconcile(world, lag=lambda pipeline: pytest.fail("the pipelines were asked"))
    assert report.findings == []
    assert (report.documents, report.points, report.objects, report.receipts) == (2, 12, 12, 1)
    assert sum(report.counts().values()) == 0


def test_points_of_older_versions_that_were_never_retired_are_deleted(world):
    live(world)
    world.change("All is different now.", 2)
    crash(world, "kv", "keys")
    forget(world)
    report = reconcile(world)
    assert (Kind.STALE_POINTS, "default/d", 12, Action.DELETED) in found(report)
    assert (Kind.STALE_OBJECTS, "default/d", 12, Action.DELETED) in found(report)
    assert (Kind.MISSING_KV, "default/d", 1, Action.ANNOUNCED) in found(report)
    agree(world)


def test_objects_that_no_live_point_names_are_deleted(world):
    live(world)
    stray(world)
    assert found(reconcile(world)) == {(Kind.STALE_OBJECTS, "default/d", 1, Action.DELETED)}
    agree(world)


def test_objects_of_a_document_without_a_head_are_deleted(world):
    live(world)
    stray(world, "never seen")
    assert found(reconcile(world)) == {(Kind.HEADLESS_OBJECTS, "default/never seen", 1, Action.DELETED)}
    assert world.kv.keys(document("never seen")) == []
    agree(world)


def test_an_index_that_does_not_belong_to_the_object_store_deletes_nothing(world):
    """A wrong `qdrant.url` would make every object an orphan."""
    live(world)
    other = World()
    parts = replace(other.index_parts, kv=world.kv)
    with pytest.raises(InputError, match="knows no document and the object store holds KV of 1"):
        reconcile(world, parts=parts)
    assert len(world.kv.keys(document())) == 12
    other.close()


def test_a_vanished_artifact_is_announced_and_made_again(world):
    live(world)
    world.kv.delete(document(), world.kv.keys(document())[:3])
    assert found(reconcile(world)) == {(Kind.MISSING_KV, "default/d", 3, Action.ANNOUNCED)}
    world.prefill()
    agree(world)


def test_kv_that_is_still_to_be_made_is_no_drift_while_prefill_is_behind(world):
    """Announcing a backlog again doubles it."""
    world.change(TEXT, 1)
    world.index()
    announced = len(world.topics.messages(world.kafka.commits_topic))
    report = reconcile(world, lag={"index": 0, "prefill": 1}, grace_s=1)
    assert (report.settled, report.findings) == (False, [])
    assert len(world.topics.messages(world.kafka.commits_topic)) == announced
    forget(world)
    assert found(reconcile(world)) == {(Kind.MISSING_KV, "default/d", 12, Action.ANNOUNCED)}
    agree(world)


def test_artifacts_that_are_there_and_not_marked_are_marked(world):
    world.change(TEXT, 1)
    world.index()
    crash(world, "index", "mark_kv", "prefill")
    forget(world)
    assert found(reconcile(world)) == {(Kind.MISSING_KV, "default/d", 12, Action.ANNOUNCED)}
    agree(world)


def test_what_is_left_of_a_tombstone_is_deleted_and_its_receipt_closed(world):
    """A store that kept what it was told to delete: the pipelines went on, and this is who remembers."""
    live(world)
    world.change(None, 2)
    keeps = Keeps(world.kv)
    world.index(replace(world.index_parts, kv=keeps))
    world.prefill(replace(world.prefill_parts, kv=keeps))
    assert receipt(world, 2) is None
    assert found(reconcile(world)) == {
        (Kind.LEFTOVERS, "default/d", 12, Action.CLOSED),
        (Kind.OPEN_RECEIPTS, "default/d", 1, Action.CLOSED),
    }
    assert counts(receipt(world, 2)) == {Place.POINTS: (12, 12, 0), Place.OBJECTS: (12, 12, 0), Place.FUSED: (0, 0, 0)}
    agree(world)


def test_a_receipt_is_not_closed_while_prefill_may_not_have_passed_the_tombstone(world):
    """COMPLETE would be said of a document whose KV is still being put."""
    live(world)
    world.change(None, 2)
    world.index()
    report = reconcile(world, lag={"index": 0, "prefill": 1}, grace_s=1)
    assert found(report) == {(Kind.OPEN_RECEIPTS, "default/d", 1, Action.NONE)}
    assert receipt(world, 2) is None
    stray(world)
    report = reconcile(world, lag={"index": 0, "prefill": 1}, grace_s=1)
    assert (Kind.LEFTOVERS, "default/d", 1, Action.ANNOUNCED) in found(report)
    assert world.kv.keys(document()) == []
    assert receipt(world, 2) is None
    world.prefill()
    assert receipt(world, 2).state is ReceiptState.COMPLETE


def test_a_tombstone_from_before_there_were_receipts_gets_one(world):
    live(world)
    world.change(None, 2)
    world.index()
    world.prefill()
    for name in world.index_parts.receipts.of(document()):
        world.kv.blobs.delete([name.path])
    assert found(reconcile(world)) == {(Kind.OPEN_RECEIPTS, "default/d", 1, Action.CLOSED)}
    assert counts(receipt(world, 2)) == {Place.POINTS: (0, 0, 0), Place.OBJECTS: (0, 0, 0), Place.FUSED: (0, 0, 0)}


def test_the_receipt_of_a_document_that_came_back_is_closed(world):
    """Compaction can drop the tombstone's commit record before PREFILL sees it: then nobody else would."""
    live(world)
    world.change(None, 2)
    crash(world, "kv", "delete")
    world.change("\n\n".join(PARAGRAPHS[:4]), 3)
    world.topics.reader(world.kafka.documents_topic, "pipeline").commit({0: 2})
    world.index()
    forget(world)
    world.publisher.commit_record(world.kafka, next(iter(_records(world))))
    world.prefill()
    assert receipt(world, 2) is None
    report = reconcile(world)
    assert (Kind.OPEN_RECEIPTS, "default/d", 1, Action.CLOSED) in found(report)
    assert receipt(world, 2).state is ReceiptState.COMPLETE
    assert len(world.kv.keys(document())) == 4
    agree(world)


def _records(world):
    from schemas.head import CommitRecord

    return (CommitRecord.of(head) for head in world.qdrant.documents())


def test_a_dry_run_finds_the_same_and_changes_nothing(world):
    live(world)
    stray(world)
    stray(world, "never seen")
    world.kv.delete(document(), world.kv.keys(document())[:1])
    world.change(None, 1, doc_id="e")
    world.index()
    forget(world)
    before = world.state(), len(world.topics.messages(world.kafka.commits_topic))
    dry = reconcile(world, dry_run=True)
    assert (world.state(), len(world.topics.messages(world.kafka.commits_topic))) == before
    assert {finding.action for finding in dry.findings} == {Action.NONE}
    wet = reconcile(world)
    assert dry.counts() == wet.counts()
    agree(world)


def test_only_the_tenant_that_was_named_is_looked_at(world):
    live(world)
    world.change("text", 1, doc_id="x", tenant="acme")
    world.index()
    world.prefill()
    stray(world)
    assert reconcile(world, tenant="acme").findings == []
    assert reconcile(world, tenant="acme").documents == 1
    assert len(reconcile(world, tenant="default").findings) == 1


def test_the_pipelines_are_waited_for_and_a_broker_that_is_away_for_a_moment_too(world):
    live(world)
    stray(world)
    answers = iter([TopicError("restarting"), 1, 0, 0])

    def lag(pipeline):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert reconcile(world, lag=lag).settled
    assert len(world.clock.slept_s) == 2


def test_running_it_twice_finds_nothing_the_second_time(world):
    live(world)
    world.change(None, 1, doc_id="e")
    world.index()
    world.prefill()
    stray(world)
    stray(world, "e")
    assert reconcile(world).counts()[Kind.LEFTOVERS] == 1
    assert reconcile(world).findings == []


def test_kv_03_a_purge_through_reconcile_reports_what_it_removed(world):
    """A purge that gives no count cannot be checked."""
    live(world)
    for n in range(5):
        stray(world, token_ids=(100 + n,))
    report = reconcile(world)
    assert report.counts()[Kind.STALE_OBJECTS] == 5
    assert report.plain()["drift"]["stale_objects"] == 5
    assert len(world.kv.keys(document())) == 12


def test_parts_that_a_killed_index_noted_beside_a_complete_receipt_are_removed(world):
    """INDEX hung in its deletion while another process did it, PREFILL closed it and the document came back."""
    live(world)
    world.change(None, 2)
    world.index()
    head = world.qdrant.heads([document()])[document()]
    world.prefill()
    receipts, generation = world.index_parts.receipts, world.kv.generation
    for part in (Stage.FOUND, Stage.INDEX):
        receipts.note(
            ReceiptPart(
                tenant=head.tenant,
                doc_id=head.doc_id,
                version=2,
                generation=generation,
                stage=part,
                asked_ms=head.event_ms,
                at_ms=world.clock.now_ms(),
                found={},
                left={},
            )
        )
    live(world, version=3)
    assert found(reconcile(world)) == {(Kind.OPEN_RECEIPTS, "default/d", 1, Action.CLOSED)}
    assert receipts.parts(document(), 2, generation) == {}
    assert receipt(world, 2).state is ReceiptState.COMPLETE
    agree(world)
