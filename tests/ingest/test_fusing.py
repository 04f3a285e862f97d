"""Fused artifacts and their lineage: made after pass 1, found by their neighbours, gone when a neighbour is."""

from dataclasses import replace

import pytest

from ingest.pipeline import PREFILL_STEPS
from ingest.prefill import parse_record, plan_prefill
from schemas.errors import ArtifactMiss
from schemas.head import CommitRecord
from stores.fakes import CrashPoint, SimulatedCrash, with_faults
from tests.ingest.world import World, document

N = 3
DOCUMENTS = {
    name: "\n\n".join(
        f"Paragraph {n} of {name} says that the thing called {(n + 7) * 7919} is number {n * 31}." for n in range(3)
    )
    for name in ("a", "b", "c", "e")
}


@pytest.fixture
def world():
    world = World(neighbours=N)
    yield world
    world.close()


def ingest(world, **texts):
    for name, text in texts.items():
        world.change(text, 1, doc_id=name)
    world.index()
    world.prefill()


def points_of(world, name):
    head = world.qdrant.heads([document(name)])[document(name)]
    return world.qdrant.chunks(document(name), head.version) if head.live else []


def users_of(world, name):
    """Documents with an artifact that was fused with a chunk of `name`."""
    return {point.chunk.document.doc_id for point in world.qdrant.fused_with(document(name))}


def assert_lineage(world):
    """No fused artifact that holds what is not visible; each says in point and header what it was made with."""
    world.assert_clean()
    heads = {head.document: head for head in world.qdrant.documents()}
    for head in heads.values():
        for point in world.qdrant.chunks(head.document):
            if point.fusion is None:
                continue
            assert point.fusion.ready
            for one in point.fusion.neighbours:
                assert heads[one.document].live
                assert heads[one.document].version == one.version
                assert one.kv_key in {other.kv_key for other in world.qdrant.chunks(one.document, one.version)}
            header = world.kv.inspect(head.document, point.fusion.kv_key)
            named = [(one.tenant, one.doc_id, one.kv_key) for one in header.neighbours]
            assert named == [(one.document.tenant, one.document.doc_id, one.kv_key) for one in point.fusion.neighbours]


def test_every_chunk_gets_a_second_artifact_beside_that_of_pass_1(world):
    ingest(world, **DOCUMENTS)
    for name in DOCUMENTS:
        for point in points_of(world, name):
            assert point.kv_ready
            assert len(point.fusion.neighbours) == N
            assert {point.kv_key, point.fusion.kv_key} <= set(world.kv.keys(document(name)))
            assert point.chunk.token_ids in {chunk for chunk, _ in world.model.fused}
    assert_lineage(world)


def test_pass_1_is_servable_before_anything_is_fused(world):
    """A second prefill behind ten neighbours must not delay the first."""
    world.change(DOCUMENTS["a"], 1, doc_id="a")
    world.index()
    seen = []

    def prefill_behind(*args):
        seen.append(all(point.kv_ready for point in points_of(world, "a")))
        return type(world.model).prefill_behind(world.model, *args)

    world.model.prefill_behind = prefill_behind
    world.prefill()
    assert seen
    assert all(seen)


def test_neighbours_are_the_nearest_other_visible_chunks_of_the_tenant_as_in_pass_1(world):
    """A neighbour of another tenant leaks its text; one that is fused itself makes lineage without end."""
    world.change(DOCUMENTS["e"], 1, doc_id="x", tenant="other")
    ingest(world, **DOCUMENTS)
    for point in points_of(world, "a"):
        assert {one.document.tenant for one in point.fusion.neighbours} == {"default"}
        keys = [one.kv_key for one in point.fusion.neighbours]
        assert len(set(keys)) == N
        assert point.kv_key not in keys
        vector = world.qdrant.chunks(document("a"), 1, vectors=True)[point.chunk.ordinal].vectors[0]
        hits = world.qdrant.search("default", vector, 20)
        nearest = [hit.chunk.kv_key for hit in hits if hit.chunk.kv_key != point.kv_key][:N]
        assert keys == nearest
    pass_1 = {tuple(point.chunk.token_ids) for name in DOCUMENTS for point in points_of(world, name)}
    assert all(set(behind) <= pass_1 for _, behind in world.model.fused)


def test_copies_of_a_chunk_are_not_its_neighbours(world):
    """A chunk behind itself learns nothing, and a copy is the nearest there is."""
    ingest(world, a=DOCUMENTS["a"], b=DOCUMENTS["a"], c=DOCUMENTS["c"])
    for point in points_of(world, "a"):
        assert point.kv_key not in {one.kv_key for one in point.fusion.neighbours}
    assert_lineage(world)


def test_a_deleted_documents_text_does_not_live_on_in_its_neighbours_artifacts(world):
    """The rows of a fused chunk are computed from its neighbours' text: deletion must reach them."""
    ingest(world, **DOCUMENTS)
    users = [point for point in world.qdrant.fused_with(document("b")) if point.chunk.document != document("b")]
    assert users, "or this test shows nothing"
    world.change(None, 2, doc_id="b")
    world.index()
    world.prefill()
    for user in users:
        assert user.fusion.kv_key not in world.kv.keys(user.chunk.document)
    assert users_of(world, "b") == set()
    assert_lineage(world)
    assert all(len(point.fusion.neighbours) == N for name in "ace" for point in points_of(world, name)), "made again"


def test_a_changed_chunk_takes_the_artifacts_with_it_that_were_made_with_it_and_no_others(world):
    ingest(world, **DOCUMENTS)
    first, second, third = points_of(world, "b")
    before = {point.chunk.id: point.fusion for name in "ace" for point in points_of(world, name)}
    paragraphs = DOCUMENTS["b"].split("\n\n")
    world.change("\n\n".join([paragraphs[0], "Something else is said here now.", paragraphs[2]]), 2, doc_id="b")
    world.model.fused.clear()
    world.index()
    world.prefill()
    changed = 0
    for name in "ace":
        for point in points_of(world, name):
            old = before[point.chunk.id]
            used = second.kv_key in {one.kv_key for one in old.neighbours}
            changed += used
            if not used:
                assert point.fusion.kv_key == old.kv_key, "an artifact whose neighbours are all still there is kept"
                assert [one.kv_key for one in point.fusion.neighbours] == [one.kv_key for one in old.neighbours]
    assert changed, "or this test shows nothing"
    assert {first.kv_key, third.kv_key} <= {one.kv_key for one in points_of(world, "b")}
    assert_lineage(world)


def test_making_again_does_not_cascade(world):
    """Depth one: an artifact that is made again is nobody's neighbour, so nothing follows from it."""
    ingest(world, **DOCUMENTS)
    users = [point for point in world.qdrant.fused_with(document("b")) if point.chunk.document != document("b")]
    world.model.fused.clear()
    world.model.prefilled.clear()
    world.change(None, 2, doc_id="b")
    world.index()
    world.prefill()
    assert len(world.model.fused) == len(users)
    assert world.model.prefilled == [], "pass 1 is not touched"
    assert world.prefill() == [], "no records are left over"


def test_an_unchanged_new_version_costs_no_fusing(world):
    ingest(world, **DOCUMENTS)
    world.model.fused.clear()
    world.change(DOCUMENTS["b"], 2, doc_id="b")
    world.index()
    world.prefill()
    assert world.model.fused == []
    assert_lineage(world)
    assert all(one.version == 2 for p in world.qdrant.fused_with(document("b")) for one in used(p, "b"))


def used(point, name):
    return [one for one in point.fusion.neighbours if one.document == document(name)]


def test_a_document_that_changes_often_is_neither_fused_nor_a_neighbour(world):
    """Its artifacts, and those that were made with it, would be computed for nothing."""
    for version in range(1, 7):
        world.change(f"{DOCUMENTS['b']}\n\nNow it is version {version}.", version, doc_id="b")
        world.index()
    ingest(world, a=DOCUMENTS["a"], c=DOCUMENTS["c"])
    assert all(point.kv_ready and point.fusion is None for point in points_of(world, "b"))
    assert users_of(world, "b") == set()
    assert all(point.fusion for point in points_of(world, "a"))
    assert_lineage(world)


def test_a_document_that_begins_to_change_often_loses_its_fused_artifacts(world):
    ingest(world, **DOCUMENTS)
    for version in range(2, 8):
        world.change(f"{DOCUMENTS['b']}\n\nNow it is version {version}.", version, doc_id="b")
        world.index()
        world.prefill()
    assert all(point.fusion is None for point in points_of(world, "b"))
    assert_lineage(world)


def test_the_first_documents_get_more_neighbours_when_their_records_are_read_again(world):
    """A corpus that grows one by one leaves its first chunks with few neighbours; a backfill makes up for it."""
    ingest(world, a="The only text there is.")
    assert points_of(world, "a")[0].fusion is None
    ingest(world, b=DOCUMENTS["b"])
    world.prefill(repeat=True)
    assert len(points_of(world, "a")[0].fusion.neighbours) == N
    assert_lineage(world)


def test_a_chunk_that_cannot_be_fused_stays_as_in_pass_1(world):
    """The second pass is longer than the first and may fail where that did not."""
    ingest(world, a=DOCUMENTS["a"])
    kept = world.state()

    def fails(*_):
        raise RuntimeError("out of memory")

    world.model.prefill_behind = fails
    ingest(world, b=DOCUMENTS["b"])
    assert all(point.kv_ready and point.fusion is None for point in points_of(world, "b"))
    assert world.dead_letters() == []
    assert world.state()[document("a")] == kept[document("a")]
    assert_lineage(world)


def test_a_neighbour_whose_artifact_is_damaged_is_passed_over(world):
    ingest(world, a=DOCUMENTS["a"], b=DOCUMENTS["b"])
    lost = points_of(world, "b")
    world.kv.delete(document("b"), [point.kv_key for point in lost])
    ingest(world, c=DOCUMENTS["c"])
    for point in points_of(world, "c"):
        assert not {one.kv_key for one in point.fusion.neighbours} & {one.kv_key for one in lost}


@pytest.mark.parametrize("moment", ["before it is named", "while it is computed"])
def test_a_neighbour_whose_tombstone_passes_while_a_chunk_is_fused_is_noticed(world, moment):
    """Nobody would ever look for the artifact again: the tombstone is behind both pipelines before it is put."""
    ingest(world, b=DOCUMENTS["b"])  # three chunks: c has two others, so that one of b's is used for each
    world.change(DOCUMENTS["c"], 1, doc_id="c")
    world.index()

    def delete_neighbours():
        if world.qdrant.heads([document("b")])[document("b")].live:
            world.change(None, 2, doc_id="b")
            world.index()
            tombstone = world.topics.messages(world.kafka.commits_topic)[-1]
            plan_prefill(world.prefill_parts, (parse_record(tombstone),))  # by another process

    part, call, at = ("kv", "get", N) if moment == "before it is named" else ("model", "prefill_behind", 1)
    faulty = with_faults(getattr(world.prefill_parts, part), CrashPoint(call, at, delete_neighbours, after=True))
    parts = replace(world.prefill_parts, **{part: faulty})
    record = next(m for m in world.topics.messages(world.kafka.commits_topic) if b'"c"' in m.key)
    batch = (parse_record(record),)
    for step in PREFILL_STEPS:
        batch = step(parts, batch)
    assert not world.qdrant.heads([document("b")])[document("b")].live, "or the moment did not come"
    assert users_of(world, "b") == set()
    assert set(world.kv.keys(document("c"))) == {key for point in points_of(world, "c") for key in point.kv_keys}
    world.prefill()
    assert_lineage(world)


def test_a_document_that_is_deleted_while_it_is_fused_leaves_nothing(world):
    ingest(world, a=DOCUMENTS["a"])
    plain = world.model.prefill_behind

    def meanwhile(*args):
        world.model.prefill_behind = plain
        world.change(None, 2, doc_id="c")
        world.index()
        return plain(*args)

    world.model.prefill_behind = meanwhile
    ingest(world, c=DOCUMENTS["c"])
    assert world.kv.keys(document("c")) == []
    assert_lineage(world)


def test_a_document_that_comes_back_is_not_found_in_artifacts_of_before(world):
    ingest(world, **DOCUMENTS)
    before = {point.fusion.kv_key for name in "ace" for point in points_of(world, name) if used(point, "b")}
    assert before
    world.change(None, 2, doc_id="b")
    world.change("Quite another text.", 3, doc_id="b")
    world.index()
    world.prefill()
    left = {key for name in "ace" for key in world.kv.keys(document(name))}
    assert not before & left
    assert_lineage(world)


FUSING_CALLS = [
    ("index", "heads"),
    ("index", "live_chunks"),
    ("index", "fused_with"),
    ("index", "search_visible"),
    ("index", "mark_fusion"),
    ("index", "mark_kv"),
    ("kv", "keys"),
    ("kv", "get"),
    ("kv", "put"),
    ("kv", "delete"),
    ("model", "prefill_behind"),
    ("publisher", "publish_many"),
]


def crash_world(world):
    """Four documents are fused; then one is changed in part, one is deleted and one comes."""
    ingest(world, **DOCUMENTS)
    paragraphs = DOCUMENTS["a"].split("\n\n")
    world.change("\n\n".join([*paragraphs[:2], "A new paragraph."]), 2, doc_id="a")
    world.change(None, 2, doc_id="b")
    world.change("A document that is new.", 1, doc_id="f")
    world.index()


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("part", "call"), FUSING_CALLS, ids=lambda value: value)
def test_a_crash_anywhere_is_repaired_by_reading_again(world, part, call, after, at):
    crash_world(world)
    faulty = with_faults(getattr(world.prefill_parts, part), CrashPoint(call, at, SimulatedCrash(), after))
    try:
        world.prefill(replace(world.prefill_parts, **{part: faulty}))
    except SimulatedCrash:
        world.prefill()
    assert users_of(world, "b") == set()
    assert_lineage(world)
    fused = [point for name in "acef" for point in points_of(world, name) if point.fusion]
    assert len(fused) == 10, "every chunk has its fused artifact in the end"


def test_an_artifact_of_a_killed_run_is_found_by_its_neighbour(world):
    """The artifact was put, its point did not say ready, and the run died; then the neighbour was deleted."""
    ingest(world, a=DOCUMENTS["a"], b=DOCUMENTS["b"])
    world.change(DOCUMENTS["c"], 1, doc_id="c")
    world.index()
    faulty = with_faults(world.kv, CrashPoint("put", 4, SimulatedCrash(), after=True))
    with pytest.raises(SimulatedCrash):
        world.prefill(replace(world.prefill_parts, kv=faulty))
    (unfinished,) = [point for point in points_of(world, "c") if point.fusion]
    assert not unfinished.fusion.ready
    assert unfinished.fusion.kv_key in world.kv.keys(document("c"))
    victim = unfinished.fusion.neighbours[0].document
    world.change(None, 9, doc_id=victim.doc_id)
    world.index()
    tombstone = world.topics.messages(world.kafka.commits_topic)[-1]
    plan_prefill(world.prefill_parts, (parse_record(tombstone),))  # by another process, which has no record of c
    assert unfinished.fusion.kv_key not in world.kv.keys(document("c"))
    assert CommitRecord.from_bytes(world.topics.messages(world.kafka.commits_topic)[-1].value).doc_id == "c"


def test_a_fused_artifact_is_not_taken_for_one_of_pass_1(world):
    """Rows that hold another document's influence must not be served where that was not checked."""
    ingest(world, **DOCUMENTS)
    (point, *_) = points_of(world, "a")
    fused = point.fusion
    with pytest.raises(ArtifactMiss, match="fused with 3 chunks, not with the 0 expected"):
        world.kv.get(
            document("a"),
            fused.kv_key,
            fingerprint=world.prefill_parts.generation.fingerprint.digest,
            token_sha256=point.chunk.token_digest,
        )


def test_an_artifact_that_is_forgotten_and_chosen_again_at_once_is_put_again():
    """Its name is of the neighbours' token ids: a copy of a deleted neighbour in another document gives the same one.

    The point said that it was there, by a list that was made before it was deleted.
    """
    world = World(neighbours=1)
    ingest(world, a=DOCUMENTS["a"], copy=DOCUMENTS["a"], b=DOCUMENTS["b"])
    (used,) = {one.document.doc_id for point in points_of(world, "b") for one in point.fusion.neighbours} - {"b"}
    fused_before = {point.fusion.kv_key for point in points_of(world, "b")}
    world.change(DOCUMENTS["b"], 1, doc_id="b")
    world.index()
    world.change(None, 2, doc_id=used)
    publisher = with_faults(world.publisher, CrashPoint("publish_many", fault=SimulatedCrash()))
    with pytest.raises(SimulatedCrash):
        world.index(replace(world.index_parts, publisher=publisher))
    world.prefill()  # of b, when the head of its neighbour says deleted and no record does
    assert {point.fusion.kv_key for point in points_of(world, "b")} == fused_before
    assert fused_before <= set(world.kv.keys(document("b")))
    world.index()
    world.prefill()
    assert_lineage(world)
    world.close()
