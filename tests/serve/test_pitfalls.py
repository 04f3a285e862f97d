"""Capacity: what an answer's combination of chunks costs in stored KV.

Of the pitfalls of vector stores and of capacity these do not apply:

- CAP-02 (no eviction on the remote server), CAP-05 (two quota owners evict each other's data): the object store holds
  what live versions name; it has no cap, and nobody who keeps to one. Only `retire`, `gc` and `reconcile` delete, and
  each deletes what no live version names, whoever else runs. Tiers in memory have a bound and one owner, their process
  (tests/stores/test_tiers.py).
- CAP-04 (pins, TTL): documents have no `retention`: they are live until they are changed or deleted, and an artifact
  is never out of date before its chunk is. What an answer uses is pinned in memory (tests/serve/test_tiers.py).

VEC-03 (a delete leaves an older copy visible when the newest was deferred) is of one server version's optimiser. What
it would do to us is tested here: a point that comes back is not visible.
"""

from __future__ import annotations

import random

import pytest

from schemas.head import DocumentState
from schemas.ids import DocumentKey

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty")


@pytest.mark.slow
def test_cap_01_new_combinations_of_chunks_store_nothing_and_hit_as_often_as_the_first(client, bench):
    """Keys that are chained over a prompt make an object of every combination, and push out what is used."""
    names = [f"{a} {b}" for a in WORDS for b in WORDS]
    for name in names:
        bench.corpus.put(name, f"{name} lies by the water")
    stored = {path for path, _ in bench.blobs.list("kv")}
    assert len(stored) == 100
    rng, cached = random.Random(1), []
    for _ in range(200):
        question = " ".join(rng.sample(names, 3))
        body = client.post("/v1/answer", json={"question": question, "k": 14, "max_tokens": 1}).json()
        sources = [citation["source"] for citation in body["citations"]]
        assert len(sources) == 14
        cached.append(sources.count("cached"))
    assert sum(cached[-50:]) >= sum(cached[:50]) == 50 * 14
    assert {path for path, _ in bench.blobs.list("kv")} == stored
    assert len(bench.blobs.reads) <= 100, "each artifact is read once, however it is combined"


def test_vec_03_a_deleted_point_that_comes_back_is_not_visible(client, bench):
    """A store may show an older copy of a deleted point again: after a crash, an optimiser's run, a restored shard."""
    old = bench.corpus.put("lake", "The lake is deep.", version=1)
    bench.corpus.put("lake", "The lake is dry.", version=2)
    bench.parts.index.delete([chunk.chunk.id for chunk in old])
    bench.parts.index.upsert(old)
    ask = {"question": "How deep is the lake?", "k": 4}
    assert [c["text"] for c in client.post("/v1/retrieve", json=ask).json()["chunks"]] == ["The lake is dry."]
    bench.corpus.flip("lake", 3, state=DocumentState.DELETED, n_chunks=0)
    assert client.post("/v1/retrieve", json=ask).json()["chunks"] == []
    assert bench.parts.index.count(DocumentKey("default", "lake")) == 2, "they are there, and nobody sees them"
