"""Every response that is not a 2xx carries OpenAI's error object and says what was wrong."""

from __future__ import annotations

import json

import pytest

from schemas.errors import SettingsError, VectorIndexError
from schemas.settings import load_settings
from serve import BackgroundServer
from tests.serve.fakes import until

JSON = {"content-type": "application/json"}


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("body", "code", "param", "message"),
    [
        ({}, "missing_field", "question", "question is missing"),
        ({"question": ""}, "invalid_value", "question", "at least 1 character"),
        ({"question": " \n\t"}, "empty_question", "question", "holds no text"),
        ({"question": "x" * 8001}, "invalid_value", "question", "at most 8000 characters"),
        ({"question": 7}, "invalid_value", "question", "valid string"),
        ({"question": "x", "k": 0}, "invalid_value", "k", "greater than or equal to 1"),
        ({"question": "x", "temperature": 3}, "invalid_value", "temperature", "less than or equal to 2"),
        ({"question": "x", "cache_mode": "fast"}, "invalid_value", "cache_mode", "'exact', 'blend' or 'reuse'"),
        ({"question": "x", "kv": "AAAA"}, "unknown_field", "kv", "kv is not a field of this request"),
        ({"question": "x", "tenant": "other"}, "unknown_field", "tenant", "tenant is not a field"),
        ({"question": "x", "max_tokens": 4096}, "context_length_exceeded", "max_tokens", "a window of 4,096 tokens"),
        ([], "invalid_value", None, "the body"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_a_400_that_names_the_field(client, body, code, param, message, stream):
    """A stream that answers 200 and then an error event hides a client's mistake from its HTTP library."""
    if stream and isinstance(body, dict):
        body = body | {"stream": True}
    error = error_of(client.post("/v1/answer", json=body), 400)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
    assert message in error["message"]
    assert len(error["message"]) < 300


def test_a_question_that_does_not_fit_is_refused_before_anything_is_streamed(client, bench):
    """Cutting the question would answer another one."""
    bench.model.max_tokens = 64
    bench.corpus.put("lake", "deep")
    for stream in (False, True):
        error = error_of(client.post("/v1/answer", json={"question": "x" * 100, "stream": stream}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "the question makes a prompt of 106 tokens" in error["message"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is missing"),
        (b"{", "the body is not JSON"),
        (b'{"question": "\xff"}', "parsing the body"),
        (b"[" * 100_000, "parsing the body"),
        (b'{"question": "\\ud800"}', "unable to parse raw data as a unicode string"),
        (b'{"question": "x", "temperature": NaN}', "temperature"),
    ],
)
def test_a_broken_body_is_a_400(client, content, message):
    """Each of these reached a tokenizer or a parser as a 500 somewhere."""
    error = error_of(client.post("/v1/answer", content=content, headers=JSON), 400)
    assert message in error["message"]


def test_an_unknown_model_is_a_404_that_names_the_known_one(client):
    """Answering with another model than the one asked for is a silent lie."""
    error = error_of(client.post("/v1/answer", json={"question": "x", "model": "gpt-9"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "model 'gpt-9' is not served here; 'scripted' is"


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_a_415(client, media_type):
    """A form that a foreign page posts must not be read as a request."""
    response = client.post("/v1/answer", content=b'{"question": "x"}', headers={"content-type": media_type})
    assert "content-type must be application/json" in error_of(response, 415)["message"]


def test_a_body_that_is_too_large_is_a_413_whether_or_not_it_says_its_length(client):
    """A body without a length would be read into memory without an end."""
    large = b'{"question": "' + b"x" * 300_000 + b'"}'
    assert error_of(client.post("/v1/answer", content=large, headers=JSON), 413)["code"] == "body_too_large"
    pieces = (large[at : at + 50_000] for at in range(0, len(large), 50_000))
    error = error_of(client.post("/v1/answer", content=pieces, headers=JSON), 413)
    assert "more than 262,144 bytes" in error["message"]


def test_a_path_and_a_method_that_do_not_exist_have_the_error_object_too(client):
    """Frameworks answer these themselves, in a shape of their own."""
    assert "/nothing does not exist" in error_of(client.get("/nothing"), 404)["message"]
    assert error_of(client.get("/v1/answers"), 404)["code"] == "not_found"
    response = client.get("/v1/answer")
    assert error_of(response, 405)["message"] == "/v1/answer does not take GET"
    assert response.headers["allow"] == "POST"


def test_a_fault_of_ours_is_a_500_with_an_id_and_without_internals(client, bench, caplog):
    """A traceback in a response tells an attacker about us, and the log needs the id to be found."""
    bench.model.fails_at = 0
    bench.corpus.put("lake", "deep")
    response = client.post("/v1/answer", json={"question": "lake"}, headers={"x-request-id": "mine-1"})
    error = error_of(response, 500)
    assert (error["type"], response.headers["x-request-id"]) == ("server_error", "mine-1")
    assert "secret" not in response.text
    until(lambda: "request mine-1" in caplog.text, "the log has the id")


def test_an_index_that_does_not_answer_is_a_503_to_try_again(client, bench, monkeypatch):
    """A store's outage is not the client's mistake; clients retry a 503."""

    def down(*_: object) -> None:
        raise VectorIndexError("Qdrant at nowhere did not answer in 10 s")

    monkeypatch.setattr(bench.parts.index, "search_visible", down)
    response = client.post("/v1/answer", json={"question": "lake", "stream": True})
    assert "Qdrant at nowhere" in error_of(response, 503)["message"]
    assert response.headers["retry-after"] == "2"


def test_a_store_that_is_away_is_named_without_its_password(client, bench, monkeypatch):
    """Bug: `/readyz`, which wants no key, told the URL of the store with user name and password."""

    def down(*_: object) -> None:
        raise VectorIndexError("https://u:s3cr3t@qdrant:6333 did not answer")

    monkeypatch.setattr(bench.parts.index, "ready", down)
    monkeypatch.setattr(bench.parts.index, "search_visible", down)
    for response in (client.get("/readyz"), client.post("/v1/answer", json={"question": "lake"})):
        assert "https://qdrant:6333 did not answer" in error_of(response, 503)["message"]


def test_request_ids_come_back_and_odd_ones_are_replaced(client):
    """An id with a line break in it would forge log lines."""
    assert client.get("/healthz", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"
    made = client.get("/healthz", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert made != "a b"
    assert made != client.get("/healthz").headers["x-request-id"]


def test_a_port_in_use_is_one_sentence(settings, bench, start):
    """A traceback of asyncio does not say which setting to change."""
    port = start().base_url.port
    taken = load_settings({"serve": {"port": port}})
    with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}: .*; set serve.host and serve.port"):
        BackgroundServer(taken, bench.parts).start()


def test_the_error_object_is_in_the_description_of_the_api(client):
    """Generated clients otherwise decode a validation error of FastAPI that is never sent."""
    described = client.get("/openapi.json").json()
    assert "HTTPValidationError" not in json.dumps(described)
    assert "4XX" in described["paths"]["/v1/answer"]["post"]["responses"]
    assert client.get("/docs").status_code == 200


@pytest.mark.parametrize("path", ["lake%0a", "lake%0d", "a%0ab", "%00", "lake%7f"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_control_character_in_a_path_names_no_document(client, bench, method, path):
    """Bug: a route's pattern let a last line feed go, so that `lake%0a` changed and deleted `lake`."""
    response = client.request(method, f"/v1/documents/{path}", json={"content": "x"} if method == "PUT" else None)
    assert error_of(response, 400)["message"] == "the path holds a control character; no document id may"
    assert not bench.publisher.messages
