"""Heads by their metadata: any key, one index, a page at a time; and what points are called."""

from __future__ import annotations

import pytest

from schemas.ids import DocumentKey


@pytest.fixture
def put(index, make_head):
    """Store a head with metadata."""

    def put(doc_id, version=1, tenant="acme", live=True, **metadata):
        head = make_head(DocumentKey(tenant, doc_id), version, live=live)
        return index.flip(head.model_copy(update={"metadata": metadata}))

    return put


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"team": "blue"}, ["a", "b"]),
        ({"team": "blue", "year": 2024}, ["a"]),
        ({"year": 2024.0}, ["a"]),
        ({"year": "2024"}, ["b"]),
        ({"tags": "draft"}, ["a", "c"]),
        ({"open": True}, ["b"]),
        ({"open": 1}, []),
        ({"team": "green"}, []),
        ({}, ["a", "b", "c"]),
    ],
    ids=str,
)
def test_heads_are_found_by_any_key_of_their_metadata_through_one_index(index, put, wanted, found):
    """An index per key cannot be made beforehand, and without one a delete by filter reads every head."""
    put("a", 1, **{"team": "blue", "year": 2024, "tags": ["draft", "x"]})
    put("b", 1, **{"team": "blue", "year": "2024", "open": True})
    put("c", 1, **{"tags": ["draft"], "nested": {"team": "blue"}})
    heads, following = index.documents_page("acme", wanted)
    assert sorted(head.doc_id for head in heads) == found
    assert following is None


def test_heads_are_found_page_by_page(index, put):
    for n in range(7):
        put(f"doc {n}", team="blue")
    seen, after = [], None
    while True:
        heads, after = index.documents_page("acme", {"team": "blue"}, after=after, limit=3)
        seen += [head.doc_id for head in heads]
        if after is None:
            break
    assert sorted(seen) == [f"doc {n}" for n in range(7)]


def test_a_tombstone_is_not_found_by_the_metadata_of_what_it_deleted(index, put):
    put("a", 1, **{"team": "blue"})
    put("a", 2, live=False)
    assert index.documents_page("acme", {"team": "blue"}) == ([], None)


@pytest.mark.parametrize("value", [None, {"a": 1}, ["x"], [], float("nan")])
def test_a_value_that_cannot_be_looked_for_is_refused(index, put, value):
    """Left out of the filter, a value that is no label would find, and delete, every document."""
    put("a", team="blue")
    with pytest.raises(ValueError, match="'k' must be a string, a number or a boolean"):
        index.documents_page("acme", {"team": "blue", "k": value})


def test_another_tenants_heads_are_not_found(index, put):
    put("a", tenant="acme", team="blue")
    put("b", tenant="other", team="blue")
    assert [head.doc_id for head in index.documents_page("acme", {"team": "blue"})[0]] == ["a"]
    assert [head.doc_id for head in index.documents_page(None, {"team": "blue"})[0]] != []


def test_points_are_listed_without_what_they_hold(index, make_chunks):
    written = make_chunks(DocumentKey("acme", "a"), 1, 3) + make_chunks(DocumentKey("other", "b"), 4, 2)
    index.upsert(written)
    listed = {point.id: point for page in index.points() for point in page}
    assert set(listed) == {indexed.chunk.id for indexed in written}
    for indexed in written:
        point = listed[indexed.chunk.id]
        chunk = indexed.chunk
        assert (point.document, point.version, point.ordinal) == (chunk.document, chunk.version, chunk.ordinal)
        assert (point.names, point.ready) == ((indexed.kv_key,), ())
    assert sum(len(page) for page in index.points("other")) == 2
