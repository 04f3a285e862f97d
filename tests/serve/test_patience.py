"""Loading KV against computing it: what is known to be slower is not waited for."""

from __future__ import annotations

import threading

from engine.variants import VARIANTS
from schemas.ids import DocumentKey
from serve.forms import wanted
from serve.patience import Patience
from tests.serve.fakes import metric, until

FAST = 1e-6  # seconds per token: less than any load


def ask(client):
    return client.post("/v1/answer", json={"question": "lake"}).json()


def test_while_nothing_is_known_of_the_pace_the_time_out_holds():
    patience = Patience(5.0, lambda: None, 8)
    patience.loaded(1.0)
    assert patience.for_chunks([512] * 4) == 5.0


def test_a_load_is_worth_as_long_a_wait_as_computing_takes_and_never_more_than_the_time_out():
    patience = Patience(5.0, lambda: 0.001, 8)
    assert patience.for_chunks([400, 400]) == 0.8
    assert patience.for_chunks([4000, 4000]) == 5.0
    assert patience.for_chunks([]) == 5.0
    assert 0 < patience.for_chunks([1]) < 0.1, "threads need a moment to start"


def test_chunks_are_loaded_side_by_side_and_computed_one_by_one():
    """Four loads of 50 ms are sooner than four times 20 ms of computing, though each of them is not."""
    patience = Patience(5.0, lambda: 0.00004, 8)
    patience.loaded(0.05)
    assert patience.for_chunks([500]) == 0.0
    assert patience.for_chunks([500] * 4) > 0.0
    assert patience.for_chunks([500] * 9) > patience.for_chunks([500] * 4), "two rounds of loads, 0.1 s against 0.18"


def test_a_store_that_has_become_fast_again_is_waited_for_again():
    patience = Patience(5.0, lambda: 0.0001, 8)
    patience.loaded(1.0)
    assert patience.for_chunks([500]) == 0.0
    for _ in range(12):
        patience.loaded(0.001)
    assert patience.for_chunks([500]) > 0.0


def test_kv_14_kv_that_would_come_later_than_computed_rows_is_not_waited_for(start, bench):
    """A cache that is slower than no cache: round trips, a slow disk, short prompts."""
    client = start(load_timeout_s=600.0)
    bench.model.prefill_pace_s = FAST
    bench.corpus.put("lake", "lake one", "lake two")
    bench.blobs.gate.clear()
    body = ask(client)
    assert (body["answer"], body["fallback"]) == ("It is so.", {"slower": 2}), "given up long before the time-out"
    assert {citation["source"] for citation in body["citations"]} == {"fresh"}
    assert metric(client, 'kvquilt_fallback_total{reason="slower"}') == 2

    bench.blobs.gate.set()
    until(lambda: ask(client)["tiers"] == {"host": 2}, "what came late is in memory for the next question")

    patience = client.kvquilt.service.patience
    assert patience.for_chunks([9]) == 0.0, "loads took longer than computing"
    bench.corpus.put("pond", "lake three")
    bench.blobs.gate.clear()
    body = ask(client)
    assert (body["fallback"], body["tiers"]) == ({"slower": 1}, {"host": 2})
    assert metric(client, "kvquilt_kv_waiters") == 0
    until(lambda: len(bench.blobs.reads) == 3, "it is on its way for the next question")


def test_a_slow_store_is_not_asked_for_more_than_it_can_answer(start, bench):
    """Nobody waits for these loads, so nothing else would hold them back."""
    client = start(load_timeout_s=600.0)
    bench.model.prefill_pace_s = FAST
    client.kvquilt.service.patience.loaded(10.0)
    bench.corpus.put("lake", *(f"lake {n}" for n in range(20)))
    bench.blobs.gate.clear()
    body = client.post("/v1/answer", json={"question": "lake", "k": 20}).json()
    assert body["fallback"] == {"slower": 20}
    until(lambda: len(bench.blobs.reads) == 8, "as many as are loaded side by side")
    assert len(client.kvquilt.service.answerer._loader._flights) == 8


def test_what_stands_in_for_fused_kv_is_worth_no_longer_a_wait_than_computing_it(start, fused):
    """A fused artifact that is missing is known at once; its rows of pass 1 can be computed."""
    client = start(load_timeout_s=600.0)
    fused.model.prefill_pace_s = FAST
    chunks = fused.parts.index.chunks(DocumentKey("default", "lake"))
    wait = client.kvquilt.service.answerer._loader._wait([wanted(one, 1, VARIANTS["fused"], True) for one in chunks])
    assert wait.worth_s is not None
    assert wait.longest_s - wait.worth_s > 500


def test_fused_kv_is_waited_for_because_it_cannot_be_computed_here(start, fused):
    client = start(load_timeout_s=600.0)
    fused.model.prefill_pace_s = FAST
    client.kvquilt.service.patience.loaded(10.0)
    fused.blobs.gate.clear()
    timer = threading.Timer(0.2, fused.blobs.gate.set)
    timer.start()
    body = client.post("/v1/answer", json={"question": "How deep is the lake?", "k": 3}).json()
    assert body["fallback"] == {"slower": 1}, "the first chunk, which is not fused"
    timer.join()
