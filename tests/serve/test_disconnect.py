"""A client that goes away stops the work: over a real socket, streaming or not, before and after the first token."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager

import httpx
import pytest

from schemas.api import AnswerRequest
from serve import BackgroundServer
from serve.answer import Asked, Cited, Done
from tests.serve.fakes import metric, until


@contextmanager
def raw_request(client, body):
    """An open socket with a request on its way; leaving the block closes it."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/answer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=10) as connection:
        connection.sendall(head.encode() + data)
        yield connection


def read_until(connection, text):
    got = b""
    while text not in got:
        piece = connection.recv(65536)
        assert piece, f"closed before {text!r} came: {got!r}"
        got += piece


@pytest.mark.parametrize("stream", [False, True])
def test_api_01_api_02_a_socket_closed_before_the_first_token_stops_the_model(client, bench, stream):
    """BaseHTTPMiddleware and a server that looks only when it writes both let the model run on."""
    bench.corpus.put("lake", "The lake is deep")
    bench.model.hold_at = 0
    with raw_request(client, {"question": "lake", "stream": stream}):
        assert bench.model.held.acquire(timeout=10)
        assert metric(client, "kvquilt_active_requests") == 1
    assert bench.model.stopped.wait(1), "the model went on for more than a second"
    until(lambda: metric(client, "kvquilt_active_requests") == 0, "the slot is free again")
    assert metric(client, "kvquilt_cancelled_total") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_api_01_api_02_a_socket_closed_after_three_tokens_stops_the_model(client, bench, stream):
    """A streaming generator kept running behind a closed socket, and so did the path without a stream."""
    bench.corpus.put("lake", "The lake is deep")
    bench.model.words, bench.model.hold_at = ["a ", "b ", "c ", "d "], 3
    with raw_request(client, {"question": "lake", "stream": stream}) as connection:
        assert bench.model.held.acquire(timeout=10)
        if stream:
            read_until(connection, b'{"text": "c "}')
    assert bench.model.stopped.wait(1), "the model went on for more than a second"
    until(lambda: metric(client, "kvquilt_active_requests") == 0, "the slot is free again")
    assert metric(client, "kvquilt_cancelled_total") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_api_03_a_closed_socket_stops_reading_the_object_store(client, bench, stream):
    """Cancelling only the socket leaves a queue of reads that nobody waits for."""
    bench.corpus.put("lake", *(f"The lake {n}" for n in range(20)))
    bench.blobs.gate.clear()
    with raw_request(client, {"question": "lake", "k": 20, "stream": stream}):
        until(lambda: len(bench.blobs.reads) == 8, "all load threads are busy")
    until(lambda: metric(client, "kvquilt_active_requests") == 0, "the slot is free again")
    bench.blobs.gate.set()
    assert client.post("/v1/answer", json={"question": "lake", "k": 1}).status_code == 200
    assert len(bench.blobs.reads) <= 9, "reads were started for a request that had gone"
    assert bench.model.calls == 1


def test_api_02_a_client_that_leaves_the_queue_is_never_answered(start, bench):
    """A queue of clients that have gone would delay those that have not."""
    client = start(max_concurrent=1, max_queue=5)
    bench.corpus.put("lake", "The lake is deep")
    bench.model.hold_at = 0
    with raw_request(client, {"question": "lake"}):
        assert bench.model.held.acquire(timeout=10)
        with raw_request(client, {"question": "lake"}):
            until(lambda: waiting(client) == 1, "the second waits")
        until(lambda: waiting(client) == 0, "the second left the queue")
        bench.model.hold.set()
        until(lambda: metric(client, "kvquilt_active_requests") == 0, "the first is answered")
    assert bench.model.calls == 1


def test_a_client_that_does_not_read_its_stream_gives_its_slot_back(start, bench, caplog):
    """Bug: it held the slot for as long as it liked, and `max_concurrent` of them stopped the service."""
    client = start(max_concurrent=1, max_queue=1, send_timeout_s=0.3)
    bench.corpus.put("lake", "The lake is deep")
    bench.model.words = ["long " * 200_000] * 20
    with raw_request(client, {"question": "lake", "stream": True}):
        until(lambda: metric(client, "kvquilt_cancelled_total") == 1, "it counts as gone")
        until(lambda: metric(client, "kvquilt_active_requests") == 0, "the slot is free again")
        bench.model.words = ["short"]
        assert client.post("/v1/answer", json={"question": "lake"}).json()["answer"] == "short"
    assert "nothing was read for 0.3 s; it was cut off" in caplog.text
    assert [record for record in caplog.records if record.exc_info] == []


def test_the_slot_is_free_before_the_last_event_is_sent(bench, start):
    """The client has its answer by then; how fast it reads the end is no matter of those who wait."""
    client = start()
    bench.corpus.put("lake", "The lake is deep")
    asked = Asked(AnswerRequest(question="lake"), "default", "r-1", time.perf_counter())

    async def active_at_the_end():
        async with aclosing(client.kvquilt.service.answerer.events(asked)) as events:
            seen = {type(event): metric(client, "kvquilt_active_requests") async for event in events}
        return seen[Cited], seen[Done]

    assert asyncio.run(active_at_the_end()) == (1, 0)


def waiting(client):
    return int(metric(client, "kvquilt_queued_requests"))


def test_the_queue_is_bounded_and_says_when_to_come_back(start, bench):
    """Without a bound every client waits longer than its time-out and none is answered."""
    client = start(max_concurrent=1, max_queue=1)
    bench.corpus.put("lake", "The lake is deep")
    bench.model.hold_at = 0
    with raw_request(client, {"question": "lake"}) as first, raw_request(client, {"question": "lake"}) as second:
        assert bench.model.held.acquire(timeout=10)
        until(lambda: waiting(client) == 1, "one waits")
        for stream in (False, True):
            response = client.post("/v1/answer", json={"question": "lake", "stream": stream})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"
        bench.model.hold.set()
        read_until(first, b'"finish_reason"')
        read_until(second, b'"finish_reason"')
    assert metric(client, "kvquilt_rejected_total") == 2
    assert client.post("/v1/answer", json={"question": "lake"}).status_code == 200


def test_stopping_the_service_finishes_open_answers(settings, bench):
    """A deployment must not cut answers off in the middle of a word."""
    bench.corpus.put("lake", "The lake is deep")
    bench.model.hold_at = 1
    server = BackgroundServer(settings, bench.parts)
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.start(), timeout=20) as client:
        with raw_request(client, {"question": "lake", "stream": True}) as connection:
            assert bench.model.held.acquire(timeout=10)
            stopping = pool.submit(server.stop)
            until(lambda: refuses(client), "no new connection is taken")
            bench.model.hold.set()
            read_until(connection, b"event: done")
        stopping.result(timeout=10)


def refuses(client):
    try:
        socket.create_connection((client.base_url.host, client.base_url.port), timeout=1).close()
    except OSError:
        return True
    return False


def test_searches_have_a_bounded_queue_of_their_own(start, bench, monkeypatch):
    """A flood of searches must neither pile up nor take the slots of answers."""
    client = start(max_queue=0)
    entered, go = threading.Semaphore(0), threading.Event()
    search = bench.parts.index.search_visible

    def slow(*args):
        entered.release()
        assert go.wait(20)
        return search(*args)

    monkeypatch.setattr(bench.parts.index, "search_visible", slow)
    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(client.post, "/v1/retrieve", json={"question": "lake"}) for _ in range(8)]
        for _ in range(8):
            assert entered.acquire(timeout=10)
        assert client.post("/v1/retrieve", json={"question": "lake"}).status_code == 429
        go.set()
        assert {one.result().status_code for one in busy} == {200}
