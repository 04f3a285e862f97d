"""A server that stops: open answers are finished, and those that take too long are told, in the stream's own words."""

from __future__ import annotations

import dataclasses
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serve import BackgroundServer
from tests.serve.fakes import ListPublisher, events, until

CUT_OFF = {
    "message": "the server is stopping, and the answer was cut off; ask again",
    "type": "server_error",
    "param": None,
    "code": "server_stopping",
}


class HangingPublisher(ListPublisher):
    """A broker that does not answer while the server stops."""

    def __init__(self):
        super().__init__()
        self.asked, self.answers = threading.Event(), threading.Event()

    def publish(self, *what):
        self.asked.set()
        assert self.answers.wait(20)
        return super().publish(*what)


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as pool:
        yield pool


def ask(server, **fields):
    """Each on a connection of its own."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        return client.post("/v1/answer", json={"question": "lake", **fields})


def quiet(caplog):
    """Nothing but a line about what was cut off."""
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    return True


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(settings, bench, pool, caplog):
    """Bug: after 10 s the connection broke in the middle of an event, and the log had tracebacks."""
    bench.corpus.put("lake", "The lake is deep")
    bench.model.hold_at = 1
    with BackgroundServer(settings, bench.parts, drain_s=0.3) as server:
        asked = pool.submit(ask, server, stream=True)
        assert bench.model.held.acquire(timeout=20), "the first word is out"
        server.stop()
        response = asked.result(20)
    assert response.status_code == 200
    assert [(name, data) for name, data in events(response) if name != "citations"] == [
        ("token", {"text": "It "}),
        ("error", {"error": CUT_OFF}),
    ]
    assert bench.model.stopped.is_set(), "the model does not go on for nobody"
    assert quiet(caplog)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_which_nothing_was_sent_is_refused_like_any_other(settings, bench, pool, caplog, stream):
    """A stream that still waits for its first event is an ordinary 503."""
    bench.corpus.put("lake", "The lake is deep")
    bench.blobs.gate.clear()
    with BackgroundServer(settings, bench.parts, drain_s=0.3) as server:
        asked = pool.submit(ask, server, stream=stream, cache_mode="reuse")
        until(lambda: bench.blobs.reads, "it waits for its KV")
        server.stop()
        response = asked.result(20)
    bench.blobs.gate.set()
    assert (response.status_code, response.json()["error"]) == (503, CUT_OFF)
    assert quiet(caplog)


def test_an_answer_that_ends_in_time_is_whole(settings, bench, pool, caplog):
    bench.corpus.put("lake", "The lake is deep")
    bench.model.hold_at = 1
    with BackgroundServer(settings, bench.parts, drain_s=20) as server:
        asked = pool.submit(ask, server, stream=True)
        assert bench.model.held.acquire(timeout=20)
        stopping = pool.submit(server.stop)
        until(lambda: server._server.should_exit, "it was asked to stop")
        bench.model.hold.set()
        name, done = events(asked.result(20))[-1]
        stopping.result(20)
    assert (name, done["answer"]) == ("done", "It is so.")
    assert quiet(caplog)


def test_a_request_that_cannot_be_stopped_is_left_with_a_503_and_without_a_traceback(settings, bench, pool, caplog):
    """A thread that waits for a broker ends when the broker answers; the server does not wait for that."""
    publisher = HangingPublisher()
    parts = dataclasses.replace(bench.parts, publisher=publisher)
    with BackgroundServer(settings, parts, drain_s=0.3) as server, httpx.Client(base_url=server.url) as client:
        put = pool.submit(client.put, "/v1/documents/d", json={"content": "text"}, timeout=30)
        assert publisher.asked.wait(20)
        server.stop()
        response = put.result(20)
        publisher.answers.set()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_stopping")
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert any(record.getMessage().endswith("PUT /v1/documents/d was cut off") for record in caplog.records)
