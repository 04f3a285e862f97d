"""The head of a document moves forwards only, whoever moves it, on every kind of Qdrant."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qdrant_client import models

from schemas.errors import VectorIndexError
from schemas.head import DocumentState
from schemas.ids import DocumentKey, head_id, packed_version
from schemas.settings import QdrantSettings
from stores.vectors import open_index

DOC = DocumentKey("acme", "handbook/1")


def test_a_document_that_never_was_has_no_head(index):
    assert index.heads([DOC]) == {}
    assert index.heads([]) == {}


def test_the_first_flip_inserts_the_head_and_reads_it_back_as_it_was(index, make_head):
    """Times, metadata or a null title that came back changed would make an equal event look like a conflict."""
    head = make_head(DOC, 7)
    assert index.flip(head) == head
    assert index.heads([DOC, DOC, DocumentKey("acme", "other")]) == {DOC: head}


@pytest.mark.parametrize("version", [6, 7])
def test_a_flip_to_an_older_or_equal_version_changes_nothing_and_says_what_is_stored(index, make_head, version):
    """The loser of a compare-and-set is told "completed" by Qdrant; only the head that is read back is the truth."""
    index.flip(make_head(DOC, 7, digest="first"))
    stored = index.flip(make_head(DOC, version, digest="second"))
    assert (stored.version, stored.content_digest) == (7, "first")


def test_a_tombstone_is_not_undone_by_a_late_older_version(index, make_head):
    index.flip(make_head(DOC, 7, live=False, n=0))
    stored = index.flip(make_head(DOC, 6))
    assert stored.state is DocumentState.DELETED
    assert not index.heads([DOC])[DOC].live


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (packed_version(1_764_000_000_000, 5), packed_version(1_764_000_000_000, 6)),
        ((1 << 62) + 1, (1 << 62) + 2),
        ((1 << 31) - 1, 1 << 31),
        ((1 << 63) - 2, (1 << 63) - 1),
        (0, 1),
    ],
)
def test_versions_that_differ_in_the_last_of_63_bits_are_told_apart(index, make_head, low, high):
    """Qdrant compares ranges as float64: two events of one millisecond would be equal, and the later one lost."""
    assert index.flip(make_head(DOC, low)).version == low
    assert index.flip(make_head(DOC, high)).version == high
    assert index.flip(make_head(DOC, low)).version == high


def test_a_point_without_a_version_is_never_overwritten(index, make_head):
    """Conditional upserts judge by the stored payload; a point that is not ours must be reported, not replaced."""
    foreign = models.PointStruct(id=str(head_id(DOC)), vector={}, payload={"note": "not a head"})
    index._connection.call("upsert", collection_name=index._heads.collection, points=[foreign], wait=True)
    with pytest.raises(VectorIndexError, match="is no head"):
        index.flip(make_head(DOC, 9))
    stored = index._connection.call("retrieve", collection_name=index._heads.collection, ids=[str(head_id(DOC))])
    assert stored[0].payload == {"note": "not a head"}


def test_of_many_threads_that_flip_one_head_the_highest_version_wins(index, make_head):
    """Without the condition on the server the last writer would win, whatever its version."""
    threads = 8
    for round_ in range(5):
        versions = [100 * round_ + 10 + n for n in range(threads)]
        gate = threading.Barrier(threads)

        def flip(version, gate=gate):
            gate.wait()
            return version, index.flip(make_head(DOC, version, digest=str(version))).version

        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(flip, versions))
        assert index.heads([DOC])[DOC].content_digest == str(max(versions))
        assert all(stored >= version for version, stored in results)


def test_of_many_threads_with_the_same_version_exactly_one_wins(index, make_head):
    """Two different events with one version: all callers must see the same winner."""
    threads = 8
    for version in range(1, 11):
        gate = threading.Barrier(threads)

        def flip(n, version=version, gate=gate):
            gate.wait()
            return index.flip(make_head(DOC, version, digest=f"{version}-{n}")).content_digest

        with ThreadPoolExecutor(threads) as pool:
            seen = set(pool.map(flip, range(threads)))
        assert len(seen) == 1
        assert index.heads([DOC])[DOC].content_digest in seen


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(versions=st.lists(st.integers(0, (1 << 63) - 1) | st.integers(0, 4), min_size=1, max_size=8))
def test_every_order_of_versions_ends_in_the_highest(make_head, versions):
    with open_index(QdrantSettings(prefix="order"), ":memory:order", "gen", 8) as index:
        index.ensure()
        for n, version in enumerate(versions):
            assert index.flip(make_head(DOC, version, digest=str(n))).version == max(versions[: n + 1])
        winner = index.heads([DOC])[DOC]
        assert (winner.version, winner.content_digest) == (max(versions), str(versions.index(max(versions))))


def test_documents_lists_every_head_of_a_tenant_and_no_other(index, make_head):
    """Status and audits count heads: a page that is lost is a document that is never audited."""
    mine = {index.flip(make_head(DocumentKey("acme", f"{n}"), n + 1, live=n % 2 == 0)).document for n in range(5)}
    index.flip(make_head(DocumentKey("other", "1"), 1))
    assert {head.document for head in index.documents("acme")} == mine
    assert len(list(index.documents())) == 6
    assert list(index.documents("nobody")) == []


def test_documents_pages_through_more_heads_than_one_answer_holds(make_head):
    with open_index(QdrantSettings(prefix="pages"), ":memory:pages", "gen", 8) as index:
        index.ensure()
        for n in range(1003):
            index.flip(make_head(DocumentKey("acme", f"{n}")))
        assert len({head.doc_id for head in index.documents("acme")}) == 1003
