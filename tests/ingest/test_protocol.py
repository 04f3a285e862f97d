"""The commit protocol of DESIGN section 5, step by step, without Beam."""

from dataclasses import replace

import pytest

from ingest.pipeline import INDEX_STEPS
from ingest.planning import parse
from ingest.prefill import in_passes, parse_record, plan_prefill
from ingest.sinks import retire
from ingest.work import Outcome
from schemas.head import CommitRecord
from schemas.ids import artifact_key
from stores.fakes import with_faults
from tests.ingest.world import PARAGRAPHS, TEXT, document


def test_a_new_document_becomes_servable_with_text_and_kv(world):
    world.change(TEXT, 1, title="A title", metadata={"team": "blue"})
    world.index()
    assert world.texts().split() == TEXT.split()
    head = world.qdrant.heads([document()])[document()]
    assert (head.version, head.title, head.metadata, head.n_chunks) == (1, "A title", {"team": "blue"}, 12)
    world.prefill()
    world.assert_clean()
    assert len(world.model.prefilled) == 12


def test_text_is_servable_before_kv(world):
    """Text must not wait for the LLM: a point without KV is legal."""
    world.change(TEXT, 1)
    world.index()
    assert [point.kv_ready for point in world.qdrant.chunks(document())] == [False] * 12
    assert world.kv.keys(document()) == []


def test_an_unchanged_document_costs_no_embedding_no_prefill_and_no_put(world):
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    world.embedder.embedded.clear()
    world.model.prefilled.clear()
    counted = with_faults(world.kv)
    world.change(TEXT, 2)
    world.index(replace(world.index_parts, kv=counted))
    world.prefill(replace(world.prefill_parts, kv=counted))
    assert world.embedder.embedded == []
    assert world.model.prefilled == []
    assert counted.calls["put"] == 0
    assert world.qdrant.heads([document()])[document()].version == 2
    world.assert_clean()


def test_a_change_in_one_chunk_embeds_prefills_and_retires_one(world):
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    world.embedder.embedded.clear()
    world.model.prefilled.clear()
    before = set(world.kv.keys(document()))
    changed = [*PARAGRAPHS[:5], PARAGRAPHS[5].replace("colour", "size"), *PARAGRAPHS[6:]]
    world.change("\n\n".join(changed), 2)
    world.index()
    assert world.embedder.embedded == [changed[5]]
    assert len(before - set(world.kv.keys(document()))) == 1
    assert len(world.qdrant.chunks(document())) == 12
    world.prefill()
    assert len(world.model.prefilled) == 1
    world.assert_clean()


def test_a_chunk_that_occurs_twice_is_embedded_and_prefilled_once(world):
    world.change("\n\n".join([PARAGRAPHS[0]] * 3), 1)
    world.index()
    world.prefill()
    assert world.embedder.embedded == [PARAGRAPHS[0]]
    assert len(world.model.prefilled) == 1
    assert [point.kv_ready for point in world.qdrant.chunks(document())] == [True] * 3
    world.assert_clean()


def test_cap_03_after_an_update_nothing_of_the_old_version_is_left(world):
    """Users of caches with a time to live get stale answers until it has passed."""
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    world.change("All is different now.", 2)
    world.index()
    assert world.texts() == "All is different now."
    assert world.kv.keys(document()) == [], "the old KV is gone with the flip, before any prefill"
    world.prefill()
    world.assert_clean()


def test_a_deletion_leaves_only_the_tombstone(world):
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    world.change(None, 2)
    world.index()
    assert world.state() == {document(): (2, "deleted", [], [])}
    world.prefill()
    assert world.state() == {document(): (2, "deleted", [], [])}


def test_a_late_older_event_does_not_bring_a_document_back(world):
    world.change(None, 5)
    world.change(TEXT, 4)
    world.index()
    world.prefill()
    assert world.texts() is None
    assert world.embedder.embedded == []


def test_an_older_event_is_a_no_op(world):
    world.change("new text", 7)
    world.index()
    published = len(world.topics.messages(world.kafka.commits_topic))
    world.change("old text", 6)
    (work,) = world.index()
    assert work.outcome == "superseded"
    assert world.texts() == "new text"
    assert len(world.topics.messages(world.kafka.commits_topic)) == published


def test_a_repeated_event_changes_nothing_and_announces_again(world):
    """The first pass may have died between the flip and the commit record: then nobody would ever prefill it."""
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    state, embedded = world.state(), list(world.embedder.embedded)
    (work,) = world.index(repeat=True)
    assert work.outcome == "repeated"
    assert (world.state(), world.embedder.embedded) == (state, embedded)
    assert len(world.topics.messages(world.kafka.commits_topic)) == 2
    world.prefill()
    assert world.state() == state
    assert len(world.model.prefilled) == 12


def test_a_repeated_event_heals_lost_points(world):
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    state = world.state()
    world.qdrant.delete([point.chunk.id for point in world.qdrant.chunks(document())[:4]])
    world.index(repeat=True)
    world.prefill()
    assert world.state() == state


def test_an_equal_version_with_other_content_is_a_dead_letter(world):
    world.change("first", 1)
    world.index()
    world.change("second", 1)
    world.index()
    assert world.texts() == "first"
    (letter,) = world.dead_letters()
    assert letter["stage"] == "plan"
    assert "default/d version 1 was ingested before with other content" in letter["message"]
    assert "higher version" in letter["message"]


def two_writers(world, first_steps):
    """Stream and backfill with one version and other contents, both planned before either flips; A flips first.

    `first_steps` is how far the second one comes before that.
    """
    one, other = (world.change(f"The limit is {n} euros.", 7) for n in (100, 999))
    a, b = ((parse(world.index_parts, message),) for message in (one, other))
    for step in INDEX_STEPS[:3]:
        a = step(world.index_parts, a)
    for step in INDEX_STEPS[:first_steps]:
        b = step(world.index_parts, b)
    for step in INDEX_STEPS[3:]:
        a = step(world.index_parts, a)
    for step in INDEX_STEPS[first_steps:]:
        b = step(world.index_parts, b)
    assert (a[0].outcome, b[0].outcome) == (Outcome.COMMITTED, Outcome.DEAD)
    assert "ingested before with other content" in world.dead_letters()[0]["message"]
    return one


def test_a_writer_that_comes_second_with_other_content_leaves_the_points_of_the_first(world):
    two_writers(world, first_steps=2)
    assert world.texts() == "The limit is 100 euros."


def test_text_that_was_refused_is_never_served_although_it_stands_where_the_winners_stood(world):
    """Points of both have the same ids, so who is refused at the flip has written over the other's."""
    message = two_writers(world, first_steps=3)
    assert world.texts() == ""
    hits = world.qdrant.search_visible("default", world.embedder.embed(["The limit is 999 euros."])[0][0], 4)
    assert hits == []
    world.prefill()
    assert world.kv.keys(document()) == [], "nor is KV made of it"
    world.publisher.publish(message.topic, message.key, message.value)  # as reconcile does
    world.index()
    world.prefill()
    assert world.texts() == "The limit is 100 euros."
    world.assert_clean()


def test_two_events_of_a_document_in_one_batch_keep_their_order(world):
    for version in (1, 2, 3):
        world.change(f"text number {version}", version)
        world.change(f"other text number {version}", version, doc_id="e")
    world.index()
    assert (world.texts("d"), world.texts("e")) == ("text number 3", "other text number 3")
    world.prefill()
    assert len(world.model.prefilled) == 2, "superseded versions are never prefilled"
    world.assert_clean()


def test_an_overtaken_writer_retires_its_own_points_and_leaves_the_winner_alone(world):
    """Two INDEX processes at once: the flip of the older one is refused, and its points must not stay behind."""
    index = world.qdrant

    class Overtaken:
        def __getattr__(self, name):
            return getattr(index, name)

        def flip(self, head):
            newer = head.model_copy(update={"version": 9, "n_chunks": 0, "content_digest": "other"})
            index.flip(newer)
            return index.flip(head)

    world.change(TEXT, 1)
    world.index(replace(world.index_parts, index=Overtaken()))
    assert world.qdrant.heads([document()])[document()].version == 9
    assert world.qdrant.chunks(document()) == []


def test_vec_08_an_embedder_error_on_a_new_version_leaves_the_old_one_served(world):
    """Whoever removes the old version first loses the document when the new one cannot be embedded."""

    def fails(text):
        if "poison" in text:
            raise RuntimeError("cannot embed this")

    world.change(TEXT, 1)
    world.change("other document", 1, doc_id="e")
    world.index()
    world.prefill()
    state = world.state()
    world.embedder.fails = fails
    world.change("poison " + TEXT, 2)
    world.change("neighbour", 2, doc_id="f")
    world.index()
    world.prefill()
    assert {key: world.state()[key] for key in state} == state
    assert world.texts("f") == "neighbour"
    (letter,) = world.dead_letters()
    assert (letter["stage"], letter["class"]) == ("embed", "EventError")
    assert "RuntimeError: cannot embed this" in letter["message"]


def test_a_vanished_artifact_is_made_again_when_the_record_is_read_again(world):
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    state = world.state()
    world.kv.delete(document(), world.kv.keys(document())[:3])
    world.prefill(repeat=True)
    assert world.state() == state
    assert len(world.model.prefilled) == 15


def test_an_artifact_that_exists_is_only_marked(world):
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    world.qdrant.mark_kv([point.chunk.id for point in world.qdrant.chunks(document())], False)
    world.model.prefilled.clear()
    world.prefill(repeat=True)
    assert world.model.prefilled == []
    world.assert_clean()


def test_a_record_of_another_generation_is_skipped(world):
    world.change(TEXT, 1)
    world.index()
    (message,) = world.topics.messages(world.kafka.commits_topic)
    record = CommitRecord.from_bytes(message.value).model_copy(update={"generation": "another"})
    world.publisher.publish(world.kafka.commits_topic, message.key, record.to_bytes())
    world.prefill()
    assert len(world.model.prefilled) == 12


def test_chk_04_chunks_behind_a_short_prefix_are_found_under_their_own_ids(world):
    """Keys that are made of prefix and chunk together shift with a short prefix, and nothing is ever found."""
    world.change("\n\n".join(PARAGRAPHS[:3]), 1)
    world.index()
    world.prefill()
    generation = world.index_parts.generation
    hits = [
        world.kv.get(
            document(),
            artifact_key(generation.fingerprint.digest, generation.prefix_sha256, point.chunk.token_ids),
            fingerprint=generation.fingerprint.digest,
            token_sha256=point.chunk.token_digest,
        )
        for point in world.qdrant.chunks(document())
    ]
    assert [tuple(hit.token_ids) for hit in hits] == [p.chunk.token_ids for p in world.qdrant.chunks(document())]
    assert len(hits) == 3


def test_a_batch_is_divided_into_passes_and_no_document_is_lost(world):
    for n in range(8):
        world.change("\n\n".join(PARAGRAPHS[: n + 1]), 1, doc_id=f"doc {n}")
    world.index()
    records = [parse_record(message) for message in world.topics.messages(world.kafka.commits_topic)]
    planned = plan_prefill(world.prefill_parts, tuple(records))
    passes = list(in_passes(planned, 64))
    assert [work for part in passes for work in part] == list(planned)
    sizes = [[sum(len(point.chunk.token_ids) for point in work.missing) for work in part] for part in passes]
    assert all(sum(part) <= 64 or len(part) == 1 for part in sizes)
    assert len(passes[0]) > 1, "small documents share a pass"


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "superseded"])
def test_a_prefill_that_is_late_leaves_nothing_behind(world, deleted):
    """The document changes while the LLM computes: INDEX has retired it by the time the artifact is put."""
    world.change(TEXT, 1)
    world.index()

    def meanwhile(chunks):
        world.model.fails = lambda chunks: None
        world.change(None if deleted else "something else", 2)
        world.index()

    world.model.fails = meanwhile
    world.prefill()
    world.assert_clean()
    assert (world.kv.keys(document()) == []) is deleted


def test_retire_lists_before_it_reads_the_head(world):
    """The other order deletes what a newer version put in between: list A, B; the head is still the old one."""
    order = []

    class Recorder:
        def __init__(self, target):
            self.target = target

        def __getattr__(self, name):
            order.append(name)
            return getattr(self.target, name)

    world.change(TEXT, 1)
    world.index()
    retire(replace(world.index_parts, index=Recorder(world.qdrant), kv=Recorder(world.kv)), document())
    assert order[:3] == ["keys", "heads", "live_chunks"]


def test_retire_does_not_take_a_flip_in_between_for_a_version_without_chunks(world):
    """Head read, then flipped and retired by another process, then points read: none are found, all KV would go."""
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    index = world.qdrant

    class Flips:
        done = False

        def __getattr__(self, name):
            return getattr(index, name)

        def live_chunks(self, head):
            if not self.done:
                self.done = True
                world.change(TEXT, 2)
                world.index()
            return index.live_chunks(head)

    flips = Flips()
    retire(replace(world.index_parts, index=flips), document())
    assert flips.done
    assert len(world.kv.keys(document())) == 12
    world.prefill()
    assert len(world.model.prefilled) == 12, "nothing had to be made again"


def test_lost_points_do_not_cost_their_artifacts(world):
    world.change(TEXT, 1)
    world.index()
    world.prefill()
    world.qdrant.delete([point.chunk.id for point in world.qdrant.chunks(document())[:4]])
    retire(world.index_parts, document())
    assert len(world.kv.keys(document())) == 12
