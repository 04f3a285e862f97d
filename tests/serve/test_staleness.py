"""The counter that must stay 0: that it does, and that it moves when visibility is broken on purpose."""

from __future__ import annotations

import pytest

from schemas.chunk import Chunk
from schemas.errors import VectorIndexError
from schemas.head import DocumentState, Head
from schemas.ids import DocumentKey
from serve.staleness import SLACK_MS, is_stale
from stores import VisibleHit
from stores.clock import SystemClock
from tests.serve.fakes import metric, until


class Broken:
    """An index whose search believes every point that it finds, as if nobody had ever written a new version."""

    def __init__(self, index):
        self._index = index

    def __getattr__(self, name):
        return getattr(self._index, name)

    def search_visible(self, tenant, vector, k):
        hits = self._index.search(tenant, vector, k)
        heads = self._index.heads([hit.chunk.chunk.document for hit in hits])
        return [VisibleHit(chunk, score, heads[chunk.chunk.document]) for chunk, score in hits]


def ask(client, **body):
    answer = client.post("/v1/answer", json={"question": "How deep is the lake?", **body})
    assert answer.status_code == 200
    return answer.json()


def checked(client, outcome="done"):
    return metric(client, f'kvquilt_stale_checks_total{{outcome="{outcome}"}}')


def stale(client):
    return tuple(metric(client, f'kvquilt_stale_served_total{{kind="{kind}"}}') for kind in ("text", "kv"))


@pytest.fixture
def broken(bench, start):
    """A service that does not look at heads when it searches."""
    object.__setattr__(bench.parts, "index", Broken(bench.parts.index))
    return start()


def test_cap_03_after_an_update_the_next_answer_is_of_the_new_version_and_the_counter_stays_0(client, bench):
    """Caches with a time to live serve what was deleted until it has passed."""
    bench.corpus.put("lake", "The lake is 10 m deep")
    assert ask(client)["citations"][0]["version"] == 1
    bench.corpus.put("lake", "The lake is 12 m deep", version=2)
    answer = ask(client)
    assert [(c["version"], c["text"], c["source"]) for c in answer["citations"]] == [
        (2, "The lake is 12 m deep", "cached")
    ]
    until(lambda: checked(client) == 2, "both answers are checked")
    assert stale(client) == (0, 0)


@pytest.mark.parametrize("deleted", [False, True], ids=["updated", "deleted"])
def test_an_answer_from_an_old_version_is_counted(broken, bench, deleted):
    """A counter that cannot move proves nothing."""
    bench.corpus.put("lake", "The lake is 10 m deep")
    if deleted:
        bench.corpus.flip("lake", 2, state=DocumentState.DELETED, n_chunks=0)
    else:
        bench.corpus.flip("lake", 2)
    assert ask(broken)["citations"][0]["version"] == 1, "it is broken as it should be"
    until(lambda: checked(broken) == 1, "checked")
    assert stale(broken) == (1, 1)


def test_an_answer_from_old_text_without_its_kv_is_stale_in_its_text_alone(broken, bench):
    bench.corpus.put("lake", "The lake is 10 m deep", kv=False)
    bench.corpus.flip("lake", 2)
    ask(broken)
    until(lambda: checked(broken) == 1, "checked")
    assert stale(broken) == (1, 0)


def test_an_answer_is_counted_once_however_many_of_its_chunks_are_stale(broken, bench):
    bench.corpus.put("lake", "The lake is 10 m deep", "The lake is cold")
    bench.corpus.flip("lake", 2)
    assert len(ask(broken)["citations"]) == 2
    until(lambda: checked(broken) == 1, "checked")
    assert stale(broken) == (1, 1)


def test_a_document_that_changes_while_its_answer_is_written_is_not_stale(client, bench):
    """The answer was right when its text was found; it is the next one that must be new."""
    bench.corpus.put("lake", "The lake is 10 m deep")
    bench.model.hold_at = 1
    with client.stream("POST", "/v1/answer", json={"question": "lake", "stream": True}) as response:
        assert bench.model.held.acquire(timeout=20)
        # committed now, as a version of these heads says: the watch's look at them may come before or after
        bench.corpus.flip("lake", SystemClock().now_ms())
        bench.model.hold.set()
        response.read()
    until(lambda: checked(client) == 1, "checked")
    assert stale(client) == (0, 0)


def test_heads_that_cannot_be_read_again_cost_nothing_but_the_check(client, bench, monkeypatch):
    bench.corpus.put("lake", "The lake is 10 m deep")
    search = bench.parts.index.search_visible

    def fails(documents):
        raise VectorIndexError("away")

    def then_fail(*arguments):
        found = search(*arguments)
        monkeypatch.setattr(bench.parts.index, "heads", fails)
        return found

    monkeypatch.setattr(bench.parts.index, "search_visible", then_fail)
    assert ask(client)["answer"]
    until(lambda: checked(client, "failed") == 1, "counted as not checked")
    assert (checked(client), stale(client)) == (0, (0, 0))


def head(version, committed_ms, live=True):
    return Head(
        tenant="t", doc_id="d", version=version, state=DocumentState.LIVE if live else DocumentState.DELETED,
        generation="g", content_digest="c", n_chunks=1, event_ms=0, committed_ms=committed_ms,
    )  # fmt: skip


BEGAN_MS = 1_000_000


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (head(5, 0), False),
        (head(6, BEGAN_MS - SLACK_MS - 1), True),
        (head(6, BEGAN_MS - SLACK_MS), False),
        (head(6, BEGAN_MS + 1), False),
        (head(6, 0, live=False), True),
        (head(5, 0, live=False), True),
        (head(4, 0), True),
        (None, True),
    ],
    ids=["live", "superseded before", "within the slack", "superseded since", "deleted", "tombstone", "ahead", "none"],
)
def test_stale_means_superseded_before_retrieval_began(now, expected):
    chunk = Chunk(DocumentKey("t", "d"), 5, 0, "text", 0, 4, (1,))
    assert is_stale(chunk, now, BEGAN_MS) is expected
