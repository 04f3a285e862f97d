"""Exact prefixes in memory: the same chunks in the same order are taken over, and nothing outlives its document."""

from __future__ import annotations

import pytest

from schemas.head import DocumentState
from schemas.ids import DocumentKey
from tests.serve.fakes import certificate, until
from tests.serve.scripted import PREFIX

TEXTS = ("The lake is deep.", "The lake is deep and cold.", "The lake is deep and cold and blue.")
LAKE = DocumentKey("default", "lake")


def ask(client, mode="exact", question="How deep is the lake?", **fields):
    headers = fields.pop("headers", None)
    body = {"question": question, "cache_mode": mode, "k": 3} | fields
    return client.post("/v1/answer", json=body, headers=headers).json()


def sources(body):
    return [citation["source"] for citation in body["citations"]]


@pytest.fixture
def lake(bench):
    bench.corpus.put("lake", *TEXTS)
    return bench


def test_the_same_chunks_in_the_same_order_are_taken_over_and_counted_apart(client, lake):
    first, second = ask(client), ask(client, question="How deep is the lake, then?")
    front = len(PREFIX) + sum(map(len, TEXTS)) + 3  # three separators
    assert first["usage"]["prefix_tokens"] == first["usage"]["reused_tokens"] == len(PREFIX)
    assert sources(first) == ["fresh"] * 3
    usage = second["usage"]
    assert usage["prefix_tokens"] == usage["reused_tokens"] == front
    assert usage["reused_tokens"] + usage["repaired_tokens"] + usage["fresh_tokens"] == usage["prompt_tokens"]
    assert sources(second) == ["prefix"] * 3
    assert lake.model.prefixes == [0, front]


def test_what_is_exact_is_used_before_anything_approximate(client, lake):
    """The longest exact prefix costs nothing and is right; only what follows it needs stitching."""
    ask(client, k=2)
    body = ask(client, "reuse")
    assert sources(body) == ["prefix", "prefix", "cached"]
    assert len(lake.blobs.reads) == 1, "an artifact is not loaded for a chunk whose exact rows are there"
    lake.certificates.append(certificate(("shared_prefix", "closure", 0.5, 0.01)))
    body = ask(client, "blend")
    assert sources(body) == ["prefix", "prefix", "cached"]
    assert lake.model.selected == [("closure", 0.5, False)], "the next chunk does not stand behind the prefix alone"
    usage = body["usage"]
    assert usage["prefix_tokens"] + usage["repaired_tokens"] < usage["prompt_tokens"]
    assert usage["reused_tokens"] + usage["repaired_tokens"] + usage["fresh_tokens"] == usage["prompt_tokens"]


def test_only_answers_in_exact_mode_lend_their_rows(client, lake):
    """Stitched rows are no exact prefix of anything."""
    ask(client, "reuse")
    assert ask(client)["usage"]["prefix_tokens"] == len(PREFIX)


def test_another_order_shares_only_what_is_equal(client, lake):
    ask(client)
    body = ask(client, question="Is it blue and cold and deep?")
    taken = body["usage"]["prefix_tokens"]
    same = [a["chunk_id"] for a in body["citations"]] == [a["chunk_id"] for a in ask(client)["citations"]]
    assert same or taken < ask(client)["usage"]["prefix_tokens"]


def test_tenants_do_not_share_rows(start, bench):
    """The time to the first token would tell one tenant what another has asked."""
    for tenant in ("a", "b"):
        bench.corpus.put("lake", *TEXTS, tenant=tenant)
    client = start(api_keys={"key-a": "a", "key-b": "b"})
    a, b = ({"authorization": f"Bearer key-{tenant}"} for tenant in "ab")
    ask(client, headers=a)
    assert ask(client, headers=b)["usage"]["prefix_tokens"] == len(PREFIX)
    assert ask(client, headers=a)["usage"]["prefix_tokens"] > len(PREFIX)


@pytest.mark.parametrize("change", ["deleted", "changed"])
def test_rows_in_memory_go_when_their_document_does(start, bench, change):
    """Nothing asks for them any more, and they hold a deleted document's text."""
    bench.corpus.put("lake", *TEXTS)
    bench.commits.away = True
    client = start(tier_check_s=0.01)
    ask(client)
    prefixes = client.kvquilt.service.tiers.prefixes
    assert prefixes.nbytes > 0
    assert LAKE in {document for document, _ in prefixes._tree.owners()}
    state = DocumentState.DELETED if change == "deleted" else DocumentState.LIVE
    bench.corpus.flip("lake", 2, state=state, n_chunks=0)
    until(lambda: prefixes._tree.owners() == set(), "rows of a document that is gone")


def test_rows_are_not_kept_of_a_document_that_went_while_it_was_answered_from(start, bench):
    """It is gone before the rows are there, and nothing would look again before the next round."""
    bench.corpus.put("lake", *TEXTS)
    bench.commits.away = True
    client = start(tier_check_s=3600.0)
    plain = bench.model.generate

    def meanwhile(*args, **kwargs):
        bench.corpus.flip("lake", 2, state=DocumentState.DELETED, n_chunks=0)
        return plain(*args, **kwargs)

    bench.model.generate = meanwhile
    ask(client)
    assert client.kvquilt.service.tiers.prefixes._tree.owners() == set()


def test_without_bytes_nothing_is_kept(start, bench):
    bench.corpus.put("lake", *TEXTS)
    client = start(prefix_cache_bytes=0)
    ask(client)
    assert ask(client)["usage"]["prefix_tokens"] == len(PREFIX)


def test_a_model_whose_rows_depend_on_the_prompts_length_keeps_none(start, bench):
    """Rows of a short prompt are wrong in a longer one where frequencies follow the length."""
    bench.model.exact_rows_last = False
    bench.corpus.put("lake", *TEXTS)
    client = start()
    ask(client)
    assert ask(client)["usage"]["prefix_tokens"] == len(PREFIX)
