"""The vector index: the same contract in memory, in a folder and on a server."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from schemas.chunk import Chunk, IndexedChunk
from schemas.errors import VectorIndexError
from schemas.ids import DocumentKey, chunk_id, packed_version
from stores import vectors
from stores.vectors import open_index

DIM = 8
DOC = DocumentKey("acme", "handbook/1")


def unit(axis: int, *, lean: float = 0.0) -> np.ndarray:
    """A direction: `axis`, leaning towards the last one by `lean`."""
    vector = np.zeros(DIM, np.float32)
    vector[axis] = 1.0
    vector[-1] += lean
    return vector


def test_ensure_can_be_called_again_and_ready_then_says_nothing(index):
    index.ensure()
    index.ready()


def test_ready_names_the_collection_that_is_missing(place):
    settings, location = place
    with open_index(settings, location, "gen", DIM) as index, pytest.raises(VectorIndexError, match="gen_chunks"):
        index.ready()


def test_vec_04_another_dimension_is_refused_with_what_to_do(place, index):
    """Vector configuration cannot change in place: writing into the old collection would fail at every point."""
    settings, location = place
    with open_index(settings, location, "gen", 2 * DIM) as other:
        for call in (other.ensure, other.ready):
            with pytest.raises(VectorIndexError, match=f"holds vectors of {DIM} numbers.*makes {2 * DIM}.*prefix"):
                call()


def test_a_chunk_comes_back_as_it_was_put(index):
    """The token ids that were prefilled are the ids that are served: any change here changes the prompt."""
    ids = (0, 1, 49_151, 2**31 - 1)
    chunk = Chunk(DOC, packed_version(1_764_000_000_000, 7), 3, "naïve ☃ \U0001f600\n", 5, 17, ids)
    put = IndexedChunk(
        chunk=chunk,
        kv_key="k" * 64,
        vectors=np.stack([3 * unit(0), unit(1)]),
        kv_ready=True,
        title="T",
        uri="https://example.org/a?b=c",
        metadata={"a.b": {"c": [1, None, "x"]}, "n": 2**53 + 1},
    )
    index.upsert([put])
    (got,) = index.chunks(DOC, chunk.version, vectors=True)
    assert (got.chunk, got.kv_key, got.kv_ready) == (chunk, put.kv_key, True)
    assert (got.title, got.uri, got.metadata) == (put.title, put.uri, put.metadata)
    np.testing.assert_allclose(got.vectors, np.stack([unit(0), unit(1)]), rtol=0, atol=1e-6)  # cosine: normalised
    assert index.chunks(DOC, chunk.version + 1) == []


def test_chunks_are_ordered_and_read_without_vectors_unless_asked(index, make_chunks):
    index.upsert(list(reversed(make_chunks(DOC, 2, 12))))
    index.upsert(make_chunks(DOC, 1, 2))
    got = index.chunks(DOC)
    assert [(c.chunk.version, c.chunk.ordinal) for c in got] == [(1, 0), (1, 1)] + [(2, n) for n in range(12)]
    assert all(c.vectors is None for c in got)
    assert got[0].title is None
    assert got[0].metadata == {}


def test_vectors_that_are_copied_to_a_new_version_stay_the_same(index, make_chunks):
    """An unchanged chunk copies its vector; rounding at each copy would let it drift from version to version."""
    index.upsert(make_chunks(DOC, 1, 3))
    first = index.chunks(DOC, 1, vectors=True)
    index.upsert(make_chunks(DOC, 2, 3, vectors=[c.vectors for c in first]))
    for one, two in zip(first, index.chunks(DOC, 2, vectors=True), strict=True):
        np.testing.assert_allclose(one.vectors, two.vectors, rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "got None"),
        (np.zeros((0, DIM), np.float32), r"n_windows >= 1, 8\] \(got \(0, 8\)"),
        (np.ones(DIM, np.float32), r"got \(8,\)"),
        (np.ones((1, DIM + 1), np.float32), r"got \(1, 9\)"),
        (np.full((1, DIM), np.nan, np.float32), "finite"),
        (np.full((1, DIM), np.inf, np.float32), "finite"),
    ],
)
def test_one_bad_vector_among_many_and_nothing_is_written(index, make_chunks, bad, message):
    """Half a document would be indexed, and look complete after the flip."""
    chunks = make_chunks(DOC, 1, 200)
    chunks[-1] = IndexedChunk(chunks[-1].chunk, "k", bad)
    with pytest.raises(ValueError, match=message):
        index.upsert(chunks)
    assert index.count(DOC) == 0


def test_upserting_nothing_and_deleting_nothing_is_fine(index):
    index.upsert([])
    index.delete([])
    index.mark_kv([], True)
    assert index.stale_chunk_ids(DOC, 5) == []


def test_vec_10_the_same_document_twice_is_the_same_points(index, make_chunks):
    index.upsert(make_chunks(DOC, 1, 5))
    ids = [c.chunk.id for c in index.chunks(DOC)]
    index.upsert(make_chunks(DOC, 1, 5))
    assert [c.chunk.id for c in index.chunks(DOC)] == ids
    assert index.count(DOC) == 5


def test_vec_06_a_document_that_shrinks_from_3_chunks_to_1_has_exactly_1_point(index, make_chunks):
    index.upsert(make_chunks(DOC, 1, 3))
    index.upsert(make_chunks(DOC, 2, 1))
    index.delete(index.stale_chunk_ids(DOC, below_version=2))
    assert [c.chunk.version for c in index.chunks(DOC)] == [2]
    assert index.count(DOC) == 1


def test_vec_07_250_chunks_in_smaller_batches_and_a_second_identical_event_finds_nothing_stale(index, make_chunks):
    """Cleaning up per batch, not per document, deletes the live chunks of the other batches."""
    assert vectors.MAX_BATCH_POINTS < 250
    other = DocumentKey("acme", "handbook/2")
    index.upsert(make_chunks(other, 1, 2))
    for _ in range(2):
        index.upsert(make_chunks(DOC, 4, 250))
        assert index.stale_chunk_ids(DOC, below_version=4) == []
    assert [c.chunk.ordinal for c in index.chunks(DOC, 4)] == list(range(250))
    assert len(index.stale_chunk_ids(DOC, below_version=5)) == 250
    assert index.count(other) == 2


def test_batches_are_bounded_by_bytes_too(make_chunks):
    """A request over 32 MB is refused by the server: many windows and long metadata must split the batch."""
    chunks = make_chunks(DOC, 1, 6, vectors=[np.ones((40, 4096), np.float32)] * 6)
    batches = list(vectors._batches(chunks))
    assert [len(batch) for batch in batches] == [2, 2, 2]
    assert [c.chunk.ordinal for batch in batches for c in batch] == list(range(6))


def test_vec_01_deleting_the_old_version_under_concurrent_upserts_takes_no_new_point(index, make_chunks):
    """A delete by filter also removed points that other writers had just added."""
    documents = [DocumentKey("acme", f"d{n}") for n in range(10)]
    for document in documents:
        index.upsert(make_chunks(document, 1, 4))
    gate = threading.Barrier(2 * len(documents))

    def write(document):
        gate.wait()
        index.upsert(make_chunks(document, 2, 4))

    def retire(document):
        gate.wait()
        index.delete(index.stale_chunk_ids(document, below_version=2))

    with ThreadPoolExecutor(2 * len(documents)) as pool:
        done = [pool.submit(write, d) for d in documents] + [pool.submit(retire, d) for d in documents]
        for future in done:
            future.result()
    for document in documents:
        assert [(c.chunk.version, c.chunk.ordinal) for c in index.chunks(document)] == [(2, n) for n in range(4)]


def test_vec_02_deleted_points_stay_away_when_the_index_is_opened_again(place, index, make_chunks):
    """As far as it goes without restarting a server: the folder is closed and read again from the disk."""
    settings, location = place
    if location.startswith(":memory:"):
        pytest.skip("memory is gone when the last handle is closed, by design")
    index.upsert(make_chunks(DOC, 1, 5))
    index.delete(index.stale_chunk_ids(DOC, below_version=2))
    index.close()
    with open_index(settings, location, "gen", DIM) as again:
        assert again.count(DOC) == 0
        assert again.search("acme", unit(0), 5) == []


def test_search_orders_by_the_best_window_of_each_chunk(index, make_chunks):
    """A long chunk has several windows; the mean of them would hide the one that answers the question."""
    rows = [np.stack([unit(1), unit(2)]), np.stack([unit(3), unit(0)]), unit(0, lean=1.0)[None]]
    index.upsert(make_chunks(DOC, 1, vectors=rows))
    hits = index.search("acme", unit(0), 3)
    assert [hit.chunk.chunk.ordinal for hit in hits] == [1, 2, 0]
    np.testing.assert_allclose([hit.score for hit in hits], [1.0, 2**-0.5, 0.0], rtol=0, atol=1e-6)


def test_search_leaves_out_what_it_is_told_to_and_may_find_fewer_than_k(index, make_chunks):
    chunks = make_chunks(DOC, 1, 4)
    index.upsert(chunks)
    hits = index.search("acme", unit(0), 10, exclude=[chunks[0].chunk.id, chunks[2].chunk.id])
    assert {hit.chunk.chunk.ordinal for hit in hits} == {1, 3}


@pytest.mark.parametrize("bad", [np.zeros(DIM + 1, np.float32), np.zeros((1, DIM), np.float32), unit(0) * np.nan])
def test_a_bad_question_vector_is_refused(index, bad):
    with pytest.raises(ValueError, match=r"vector must be \[8\] and finite"):
        index.search("acme", bad, 3)


def test_vec_05_a_tenant_never_gets_the_chunks_of_another(index, make_chunks):
    """Fails where the store ignores the filter: the other tenant's chunk is the better match."""
    other = DocumentKey("globex", DOC.doc_id)
    index.upsert(make_chunks(other, 1, vectors=[unit(0)[None]]))
    index.upsert(make_chunks(DOC, 1, vectors=[unit(1)[None]]))
    assert [hit.chunk.chunk.document for hit in index.search("acme", unit(0), 5)] == [DOC]
    assert index.search("nobody", unit(0), 5) == []


class IgnoresFilters:
    """A client as some releases of the local mode were: it takes a filter and does not apply it."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        def call(**arguments):
            for filter_ in ("query_filter", "scroll_filter"):
                if filter_ in arguments:
                    arguments[filter_] = None
            return getattr(self._client, name)(**arguments)

        return call


def test_vec_05_a_store_that_ignores_filters_is_an_error_and_not_a_leak(index, make_chunks, make_head):
    other = DocumentKey("globex", DOC.doc_id)
    index.upsert(make_chunks(other, 1, vectors=[unit(0)[None]]))
    index.upsert(make_chunks(DOC, 1, vectors=[unit(1)[None]]))
    index.flip(make_head(other))
    connection = index._connection
    client, connection.client = connection.client, IgnoresFilters(connection.client)
    try:
        with pytest.raises(VectorIndexError, match="does not apply its filters"):
            index.search("acme", unit(0), 5)
        assert [c.chunk.document for c in index.chunks(DOC)] == [DOC]
        assert index.stale_chunk_ids(DOC, below_version=2) == [chunk_id(DOC, 1, 0)]
        assert list(index.documents("acme")) == []
    finally:
        connection.client = client


def test_mark_kv_marks_what_is_there_and_brings_nothing_back(index, make_chunks):
    """A late prefill confirms points that were retired meanwhile: it must neither fail nor resurrect them."""
    chunks = make_chunks(DOC, 1, 4)
    index.upsert(chunks)
    index.delete([chunks[1].chunk.id])
    index.mark_kv([c.chunk.id for c in chunks[:3]], True)
    assert [(c.chunk.ordinal, c.kv_ready) for c in index.chunks(DOC)] == [(0, True), (2, True), (3, False)]
    index.mark_kv([chunks[0].chunk.id], False)
    assert [c.kv_ready for c in index.chunks(DOC)] == [False, True, False]
    index.mark_kv([chunks[1].chunk.id], True)
    assert index.count(DOC) == 3


def test_mark_kv_changes_nothing_else_of_a_point(index, make_chunks):
    chunks = make_chunks(DOC, 1, 1)
    index.upsert(chunks)
    (before,) = index.chunks(DOC, vectors=True)
    index.mark_kv([chunks[0].chunk.id], True)
    (after,) = index.chunks(DOC, vectors=True)
    assert (after.chunk, after.kv_key) == (before.chunk, before.kv_key)
    np.testing.assert_allclose(after.vectors, before.vectors, rtol=0, atol=1e-7)
    assert len(index.search("acme", unit(0), 3)) == 1


def test_count_is_per_document_and_per_version(index, make_chunks):
    index.upsert(make_chunks(DOC, 1, 3))
    index.upsert(make_chunks(DOC, 2, 2))
    assert (index.count(DOC), index.count(DOC, 1), index.count(DOC, 2), index.count(DOC, 3)) == (5, 3, 2, 0)


def test_a_failure_of_qdrant_is_a_vector_index_error_that_says_where_and_what(place):
    settings, location = place
    expected = pytest.raises(VectorIndexError, match=r"Qdrant at .* failed: retrieve on collection .*nothing_heads")
    with open_index(settings, location, "nothing", DIM) as index, expected:
        index.heads([DOC])
