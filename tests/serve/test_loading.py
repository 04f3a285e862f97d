"""KV that is missing, late, damaged or foreign makes its chunk fresh, is counted, and never reaches the model."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from schemas import kv_artifact
from schemas.ids import DocumentKey
from tests.serve.fakes import metric, until

LAKE = DocumentKey("default", "lake")


def replace(bench, chunk, change):
    """Put other bytes where an artifact was."""
    path = bench.parts.kv.path(LAKE, chunk.kv_key)
    data = bytearray(bytes(bench.blobs.get(path)))
    bench.blobs.delete([path])
    assert bench.blobs.put_new(path, bytes(change(data)))


def flip_last_bit(data):
    data[-1] ^= 1
    return data


def of_another_model(bench, chunk):
    artifact = bench.corpus.artifact(chunk.chunk)
    foreign = artifact.header.fingerprint.model_copy(update={"weights_sha256": "other"})
    header = artifact.header.model_copy(update={"fingerprint": foreign})
    return kv_artifact.encode(dataclasses.replace(artifact, header=header))


@pytest.mark.parametrize("reason", ["missing", "truncated", "checksum", "format", "fingerprint", "store"])
def test_eng_05_a_bad_artifact_makes_its_chunk_fresh_and_is_counted(client, bench, reason):
    """Uninitialised or foreign rows give plausible nonsense; a fresh chunk is only slower."""
    chunks = bench.corpus.put("lake", "lake one", "lake two", "lake three")
    if reason == "missing":
        bench.parts.kv.delete(LAKE, [chunks[1].kv_key])
    elif reason == "store":
        bench.blobs.fails = chunks[1].kv_key
    else:
        change = {
            "truncated": lambda data: data[:-9],
            "checksum": flip_last_bit,
            "format": lambda data: b"\x08\0\0\0\0\0\0\0not json" + data,
            "fingerprint": lambda data: of_another_model(bench, chunks[1]),
        }[reason]
        replace(bench, chunks[1], change)
    body = client.post("/v1/answer", json={"question": "lake"}).json()
    assert {c["text"]: c["source"] for c in body["citations"]} == {
        "lake one": "cached", "lake two": "fresh", "lake three": "cached"
    }  # fmt: skip
    assert body["fallback"] == {reason: 1}
    assert bench.model.stitched_rows == [2]
    usage = body["usage"]
    assert usage["reused_tokens"] + usage["fresh_tokens"] == usage["prompt_tokens"]
    assert metric(client, f'kvquilt_fallback_total{{reason="{reason}"}}') == 1
    assert metric(client, "kvquilt_checksum_failures_total") == (reason == "checksum")
    assert metric(client, "kvquilt_fingerprint_mismatch_total") == (reason == "fingerprint")


def test_a_late_artifact_makes_its_chunk_fresh_and_the_answer_does_not_wait(start, bench):
    """A hung object store must cost its time-out, not the request."""
    client = start(load_timeout_s=0.05)
    bench.corpus.put("lake", "lake one", "lake two")
    bench.blobs.gate.clear()
    body = client.post("/v1/answer", json={"question": "lake"}).json()
    assert (body["answer"], body["fallback"]) == ("It is so.", {"timeout": 2})
    client.post("/v1/answer", json={"question": "lake"})
    assert len(bench.blobs.reads) == 2, "a hung store is asked once per artifact, not once per request"
    bench.blobs.gate.set()
    until(
        lambda: client.post("/v1/answer", json={"question": "lake"}).json()["fallback"] == {},
        "artifacts are used again once the store answers",
    )


def test_one_fetch_per_artifact_however_many_wait(start, bench):
    """A popular chunk would be read once per request from a slow store."""
    client = start(max_concurrent=4)
    bench.corpus.put("lake", "lake one")
    bench.blobs.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(client.post, "/v1/answer", json={"question": "lake"}) for _ in range(4)]
        until(lambda: metric(client, "kvquilt_active_requests") == 4, "all four are being answered")
        until(lambda: metric(client, "kvquilt_kv_waiters") == 4, "all four wait for the artifact")
        bench.blobs.gate.set()
        assert [answer.result().json()["fallback"] for answer in answers] == [{}] * 4
    assert len(bench.blobs.reads) == 1


def test_a_waiter_that_leaves_does_not_take_the_fetch_from_the_others(start, bench):
    """Cancelling a shared read on behalf of one client would fail the rest."""
    from tests.serve.test_disconnect import raw_request

    client = start(max_concurrent=4)
    bench.corpus.put("lake", "lake one")
    bench.blobs.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        with raw_request(client, {"question": "lake"}):
            until(lambda: metric(client, "kvquilt_kv_waiters") == 1, "the first waits")
            answer = pool.submit(client.post, "/v1/answer", json={"question": "lake"})
            until(lambda: metric(client, "kvquilt_kv_waiters") == 2, "the second waits")
        until(lambda: metric(client, "kvquilt_kv_waiters") == 1, "the first has gone")
        bench.blobs.gate.set()
        assert answer.result().json()["fallback"] == {}
    assert len(bench.blobs.reads) == 1


def test_what_was_loaded_is_counted(client, bench):
    """Hit rate 0 without an error is how a cache fails silently."""
    bench.corpus.put("lake", "lake one")
    client.post("/v1/answer", json={"question": "lake"})
    assert metric(client, 'kvquilt_kv_load_seconds_count{tier="object"}') == 1
    assert metric(client, 'kvquilt_kv_load_bytes_total{tier="object"}') == 2 * 8 * 2 * 4 + 8 * 4
    assert metric(client, 'kvquilt_hit_tokens_total{model="smollm2"}') == 8
    assert metric(client, 'kvquilt_requested_tokens_total{model="smollm2"}') == 8
