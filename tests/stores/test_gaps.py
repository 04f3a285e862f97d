"""What one generation lacks of another, document by document."""

import numpy as np
import pytest

from ingest.fakes import DIM
from schemas.chunk import Chunk, IndexedChunk
from schemas.head import DocumentState
from schemas.ids import DocumentKey
from stores.gaps import compare, compare_again
from tests.stores.generations_world import NEW, OLD, Deployment, head_of


@pytest.fixture
def pair():
    deployment = Deployment()
    yield deployment.indexes[OLD.name], deployment.indexes[NEW.name]
    deployment.close()


def key(doc_id):
    return DocumentKey("default", doc_id)


def put(index, doc_id, version, ready=True):
    chunk = Chunk(key(doc_id), version, 0, "text", 0, 4, (1, 2))
    vectors = np.ones((1, DIM), np.float32)
    index.upsert([IndexedChunk(chunk, f"{doc_id}-{version}", vectors, ready, None)])
    index.flip(head_of(key(doc_id), version))
    return chunk.id


def test_equal_generations_have_no_gap_and_newer_is_no_gap(pair):
    live, new = pair
    for index in pair:
        put(index, "same", 3)
        index.flip(head_of(key("gone"), 2, state=DocumentState.DELETED, n_chunks=0))
    put(live, "newer", 1)
    put(new, "newer", 2)
    gap = compare(live, new)
    assert not gap
    assert str(gap) == "nothing is missing (documents compared: 3)"


def test_what_is_missing_older_other_or_without_kv_is_named(pair):
    live, new = pair
    for doc_id in ("a", "b", "c", "d", "e", "f"):
        put(live, doc_id, 2)
    for doc_id, version in (("b", 1), ("c", 2), ("d", 2)):
        put(new, doc_id, version)
    new.flip(head_of(key("c"), 3))
    live.flip(head_of(key("c"), 3, digest="other content of the same version"))
    point = put(new, "d", 2, ready=False)
    gap = compare(live, new)
    assert sorted(gap.missing) == [key("a"), key("e"), key("f")]
    assert sorted(gap.behind) == [key("b"), key("c")]
    assert gap.without_kv == {key("d"): 1}
    assert "documents missing: 3 (default/" in str(gap)
    assert "chunks without KV: 1 (default/d)" in str(gap)

    for doc_id in ("a", "b", "e", "f"):
        put(new, doc_id, 2)
    new.mark_kv([point], True)
    later = compare_again(live, new, gap)
    assert (later.documents, later.without_kv) == ([key("c")], {})


def test_kv_that_the_live_one_lacks_too_is_no_gap(pair):
    """Bug: a model without reuse could never be promoted."""
    live, new = pair
    for index in pair:
        put(index, "d", 1, ready=False)
    assert not compare(live, new)
    assert compare(replace_ready(live), new).without_kv == {key("d"): 1}


def replace_ready(index):
    ids = [chunk.chunk.id for chunk in index.chunks(key("d"))]
    index.mark_kv(ids, True)
    return index


def test_a_deletion_that_is_not_known_there_is_a_gap(pair):
    """Bug: a late older event would have brought the document back after the switch."""
    live, new = pair
    live.flip(head_of(key("d"), 5, state=DocumentState.DELETED, n_chunks=0))
    assert compare(live, new).missing == [key("d")]
