"""What is visible: exactly the chunks of each document's live version, at the moment of the search."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from schemas.ids import DocumentKey
from stores.fakes import CrashPoint, with_faults

DIM = 8
QUESTION = np.eye(DIM, dtype=np.float32)[0]


def near(score: float) -> np.ndarray:
    """`[1, DIM]`, at cosine `score` to the question."""
    vector = np.zeros((1, DIM), np.float32)
    vector[0, :2] = score, np.sqrt(1 - score**2)
    return vector


def doc(name: str) -> DocumentKey:
    return DocumentKey("acme", name)


def found(hits) -> list[tuple[str, int]]:
    return [(hit.chunk.chunk.document.doc_id, hit.chunk.chunk.version) for hit in hits]


@contextmanager
def before_call(index, at, change):
    """Make a change right before the index calls Qdrant for the `at`-th time."""
    connection = index._connection
    index._connection = index._heads._connection = with_faults(connection, CrashPoint("call", at=at, fault=change))
    try:
        yield
    finally:
        index._connection = index._heads._connection = connection


def test_points_without_a_head_are_not_visible(index, make_chunks, make_head):
    """Points are written before the flip; serving them early would answer from half a document."""
    index.upsert(make_chunks(doc("a"), 1, vectors=[near(0.9)]))
    assert index.search_visible("acme", QUESTION, 3) == []
    head = make_head(doc("a"), 1)
    index.flip(head)
    ((chunk, score, seen),) = index.search_visible("acme", QUESTION, 3)
    assert (chunk.chunk.document, seen) == (doc("a"), head)
    np.testing.assert_allclose(score, 0.9, rtol=0, atol=1e-6)


def test_only_the_live_version_of_a_document_is_visible_before_and_after_its_flip(index, make_chunks, make_head):
    index.upsert(make_chunks(doc("a"), 1, vectors=[near(0.9)]))
    index.flip(make_head(doc("a"), 1))
    index.upsert(make_chunks(doc("a"), 2, vectors=[near(0.8)]))
    assert found(index.search_visible("acme", QUESTION, 3)) == [("a", 1)]
    index.flip(make_head(doc("a"), 2))
    assert found(index.search_visible("acme", QUESTION, 3)) == [("a", 2)]


def test_vec_02_a_deleted_document_is_gone_although_its_points_are_still_there(index, make_chunks, make_head):
    """The tombstone decides: points that come back, or are not deleted yet, are never served."""
    index.upsert(make_chunks(doc("a"), 1, vectors=[near(0.9)]))
    index.flip(make_head(doc("a"), 1))
    index.flip(make_head(doc("a"), 2, live=False, n=0))
    assert index.count(doc("a")) == 1
    assert index.search_visible("acme", QUESTION, 3) == []


def test_points_of_a_version_that_lost_to_a_tombstone_of_the_same_version_are_not_visible(
    index, make_chunks, make_head
):
    """Two events with one version: the delete won the flip, the other had written its points already."""
    index.upsert(make_chunks(doc("a"), 2, vectors=[near(0.9)]))
    index.flip(make_head(doc("a"), 2, live=False, n=0))
    assert index.search_visible("acme", QUESTION, 3) == []


def test_what_is_dropped_is_filled_up_to_k_from_further_down(index, make_chunks, make_head):
    """Fifty superseded chunks lie nearer than the live ones: a single search would come back empty."""
    index.upsert(make_chunks(doc("stale"), 1, vectors=[near(0.99 - n / 1000) for n in range(50)]))
    index.upsert(make_chunks(doc("stale"), 2, vectors=[near(0.5)]))
    index.flip(make_head(doc("stale"), 2))
    for n in range(4):
        index.upsert(make_chunks(doc(f"live{n}"), 1, vectors=[near(0.8 - n / 10)]))
        index.flip(make_head(doc(f"live{n}"), 1))
    assert found(index.search_visible("acme", QUESTION, 3)) == [("live0", 1), ("live1", 1), ("live2", 1)]
    everything = index.search_visible("acme", QUESTION, 64)
    assert len(everything) == 5
    assert sorted(everything, key=lambda hit: -hit.score) == everything


def test_a_head_that_moves_between_search_and_refill_is_seen(index, make_chunks, make_head):
    """Heads kept from the first round would mix two versions of one document in one answer."""
    index.upsert(make_chunks(doc("a"), 1, vectors=[near(0.95)]))
    index.flip(make_head(doc("a"), 1))
    index.upsert(make_chunks(doc("a"), 2, vectors=[near(0.1)]))
    index.upsert(make_chunks(doc("stale"), 1, vectors=[near(0.9 - n / 1000) for n in range(20)]))
    # call 1: the search, call 2: the heads, call 3: the second search
    with before_call(index, 3, lambda: index.flip(make_head(doc("a"), 2))):
        assert found(index.search_visible("acme", QUESTION, 4)) == [("a", 2)]


def test_fewer_than_k_visible_chunks_end_the_search(index, make_chunks, make_head):
    index.upsert(make_chunks(doc("a"), 1, 3))
    index.flip(make_head(doc("a"), 1))
    assert len(index.search_visible("acme", QUESTION, 10)) == 3
    assert index.search_visible("globex", QUESTION, 10) == []


def test_a_document_that_moves_on_between_search_and_heads_does_not_drop_out(index, make_chunks, make_head):
    """It was live at every moment: its old points were found, its new head read, and its new points are there."""
    index.upsert(make_chunks(doc("a"), 1, vectors=[near(0.9)]))
    index.flip(make_head(doc("a"), 1))

    def update() -> None:
        index.upsert(make_chunks(doc("a"), 2, vectors=[near(0.8)]))
        index.flip(make_head(doc("a"), 2))

    with before_call(index, 2, update):  # call 1: the search, call 2: the heads
        assert found(index.search_visible("acme", QUESTION, 3)) == [("a", 2)]


def test_a_head_shows_the_points_of_its_content_and_those_that_do_not_say(index, make_chunks, make_head):
    """Points that a refused writer of the same version left are not visible, not listed and not counted."""
    ours, unknown, others = make_chunks(doc("a"), 1, vectors=[near(0.9), near(0.8), near(0.7)])
    points = [replace(ours, content_digest="d"), unknown, replace(others, content_digest="of what was refused")]
    index.upsert(points)
    head = make_head(doc("a"), 1, digest="d")
    index.flip(head)
    assert [hit.chunk.chunk.ordinal for hit in index.search_visible("acme", QUESTION, 3)] == [0, 1]
    assert [point.chunk.ordinal for point in index.live_chunks(head)] == [0, 1]
    assert (index.count_live(head), index.count(doc("a"), 1)) == (2, 3)
    assert index.count_live(make_head(doc("a"), 1, digest="d", live=False)) == 0
