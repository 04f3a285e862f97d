"""POST /v1/answer: what it answers from, what it says of itself, and the order of its events."""

from __future__ import annotations

from schemas.head import DocumentState
from serve.answer import NOTHING_FOUND
from tests.serve.fakes import events, metric
from tests.serve.scripted import PREFIX

ASK = {"question": "How deep is the lake?"}


def test_an_answer_states_its_chunks_and_its_token_counts_add_up(client, bench):
    """A count that does not add up hides recomputed tokens."""
    bench.corpus.put("lake", "The lake is 40 m deep.", title="Lakes")
    body = client.post("/v1/answer", json=ASK).json()
    assert body["answer"] == "It is so."
    assert (body["finish_reason"], body["cache_mode"], body["policy"]) == ("stop", "reuse", "none")
    (citation,) = body["citations"]
    assert (citation["doc_id"], citation["version"], citation["source"]) == ("lake", 1, "cached")
    assert (citation["char_start"], citation["char_end"], citation["title"]) == (0, 22, "Lakes")
    assert citation["text"] == "The lake is 40 m deep."
    usage = body["usage"]
    assert usage["reused_tokens"] == len(PREFIX) + 22
    assert usage["reused_tokens"] + usage["repaired_tokens"] + usage["fresh_tokens"] == usage["prompt_tokens"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (3, usage["prompt_tokens"] + 3)
    assert (body["fallback"], body["note"]) == ({}, None)


def test_the_parts_of_the_time_to_the_first_token_are_parts_of_it(client, bench):
    """A split that exceeds the whole was measured from different starts."""
    bench.corpus.put("lake", "The lake is 40 m deep.")
    response = client.post("/v1/answer", json=ASK)
    timing = response.json()["timing"]
    assert 0 < sum(timing[f"{part}_s"] for part in ("retrieve", "load", "stitch", "first_step")) <= timing["ttft_s"]
    assert response.headers["server-timing"].startswith("retrieve;dur=")


def test_exact_mode_reuses_the_prefix_only_and_says_so(client, bench):
    """A composed answer must never be labelled exact."""
    bench.corpus.put("lake", "The lake is 40 m deep.")
    body = client.post("/v1/answer", json=ASK | {"cache_mode": "exact"}).json()
    assert (body["cache_mode"], body["policy"], body["citations"][0]["source"]) == ("exact", "full", "fresh")
    assert body["usage"]["reused_tokens"] == len(PREFIX)
    assert body["fallback"] == {}
    assert bench.model.stitched_rows == []
    assert bench.blobs.reads == []


def test_a_model_that_refuses_reuse_is_served_in_exact_with_a_note(client, bench):
    """An unknown RoPE layout would mis-rotate keys and still answer plausibly."""
    bench.model.reuse_refusal = "its rotary layout is not known."
    bench.corpus.put("lake", "The lake is 40 m deep.")
    body = client.post("/v1/answer", json=ASK).json()
    assert body["cache_mode"] == "exact"
    assert body["note"] == "Answered in exact mode: its rotary layout is not known."


def test_a_chunk_without_kv_yet_is_fresh_and_counted(client, bench):
    """A point without KV is legal; asking the store for it would only cost time."""
    bench.corpus.put("lake", "The lake is 40 m deep.", kv=False)
    body = client.post("/v1/answer", json=ASK).json()
    assert (body["citations"][0]["source"], body["fallback"]) == ("fresh", {"missing": 1})
    assert body["cache_mode"] == "reuse"
    assert bench.model.stitched_rows == [0], "a fresh chunk must see what a cached one saw"
    assert bench.blobs.reads == []
    assert metric(client, 'kvquilt_fallback_total{reason="missing"}') == 1


def test_the_worst_chunks_are_left_out_whole_where_the_prompt_is_full(client, bench):
    """A chunk that is cut silently gives a wrong answer without a word."""
    bench.model.max_tokens = 120
    bench.corpus.put("a", "lake deep " * 4)
    bench.corpus.put("b", "lake " * 6)
    bench.corpus.put("c", "unlike that " * 3)
    body = client.post("/v1/answer", json={"question": "lake deep", "max_tokens": 16, "k": 3}).json()
    assert [citation["doc_id"] for citation in body["citations"]] == ["a", "b"]
    assert body["note"] == "1 of 3 retrieved chunks did not fit into 104 prompt tokens."
    assert body["usage"]["prompt_tokens"] <= 104


def test_without_a_visible_chunk_the_model_is_not_asked(client, bench):
    """A language model without passages makes something up."""
    body = client.post("/v1/answer", json=ASK).json()
    assert (body["answer"], body["citations"]) == (NOTHING_FOUND, [])
    assert body["usage"]["prompt_tokens"] == body["usage"]["completion_tokens"] == 0
    assert body["note"] == "No visible chunk was found, so the model was not asked."
    assert bench.model.calls == 0


def test_a_stream_has_citations_then_tokens_then_done(client, bench):
    """Clients show sources first; the last event must hold the same body as without a stream."""
    bench.corpus.put("lake", "The lake is 40 m deep.")
    response = client.post("/v1/answer", json=ASK | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    got = events(response)
    assert [name for name, _ in got] == ["citations", "token", "token", "token", "done"]
    done = got[-1][1]
    assert "".join(data["text"] for name, data in got if name == "token") == done["answer"] == "It is so."
    assert got[0][1]["citations"] == done["citations"]
    plain = client.post("/v1/answer", json=ASK).json()
    assert done.keys() == plain.keys()
    assert done["usage"] == plain["usage"]


def test_a_stream_without_a_visible_chunk_has_the_same_events(client):
    """A client must not need a second code path for an empty tenant."""
    got = events(client.post("/v1/answer", json=ASK | {"stream": True}))
    assert [name for name, _ in got] == ["citations", "token", "done"]


def test_a_fault_in_mid_stream_is_an_error_event_and_tells_no_internals(client, bench):
    """A stream that just ends looks complete."""
    bench.model.fails_at = 1
    bench.corpus.put("lake", "The lake is 40 m deep.")
    got = events(client.post("/v1/answer", json=ASK | {"stream": True}))
    assert [name for name, _ in got] == ["citations", "token", "error"]
    assert got[-1][1]["error"]["type"] == "server_error"
    assert "secret" not in str(got[-1])


def test_max_tokens_ends_an_answer_with_length(client, bench):
    """`stop` would say that the answer is complete."""
    bench.corpus.put("lake", "The lake is 40 m deep.")
    body = client.post("/v1/answer", json=ASK | {"max_tokens": 2}).json()
    assert (body["answer"], body["finish_reason"], body["usage"]["completion_tokens"]) == ("It is ", "length", 2)


def test_retrieve_gives_the_best_chunks_first_without_the_model(client, bench):
    """Scores out of order, or a model call, would make it useless for debugging."""
    bench.corpus.put("lake", "The lake is 40 m deep.")
    bench.corpus.put("hill", "A hill.")
    body = client.post("/v1/retrieve", json=ASK | {"k": 2}).json()
    assert [chunk["doc_id"] for chunk in body["chunks"]] == ["lake", "hill"]
    assert body["chunks"][0]["score"] > body["chunks"][1]["score"]
    assert body["retrieve_s"] > 0
    assert bench.model.calls == 0


def test_a_flipped_head_hides_old_chunks_at_once_and_k_is_refilled(client, bench):
    """Old points exist until they are retired; none may be answered from after the commit."""
    bench.corpus.put("lake", *(f"The lake is {n} m deep" for n in range(6)))
    bench.corpus.put("other", "The lake far away is deep")
    bench.corpus.points("lake", "The lake is dry", version=2)
    assert {chunk["version"] for chunk in client.post("/v1/retrieve", json=ASK).json()["chunks"]} == {1}
    bench.corpus.flip("lake", 2)
    chunks = client.post("/v1/retrieve", json=ASK | {"k": 2}).json()["chunks"]
    assert {(chunk["doc_id"], chunk["version"]) for chunk in chunks} == {("lake", 2), ("other", 1)}
    bench.corpus.flip("lake", 3, state=DocumentState.DELETED, n_chunks=0)
    body = client.post("/v1/answer", json=ASK | {"k": 2}).json()
    assert [citation["doc_id"] for citation in body["citations"]] == ["other"]
