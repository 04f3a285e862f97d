"""Documents over HTTP: one way in (the topic), versions, and what a tenant can see."""

from __future__ import annotations

import json

import pytest

from schemas.events import MAX_CONTENT_BYTES, parse_event
from schemas.head import DocumentState
from schemas.ids import DocumentKey, packed_version


def event_of(message):
    return parse_event(
        message.key, message.value, timestamp_ms=message.timestamp_ms, offset=message.offset, headers=message.headers
    )


def test_put_publishes_the_event_that_the_pipeline_reads(client, bench):
    """A second way in would order changes differently."""
    body = {"content": "# Lake", "content_type": "markdown", "title": "Lake", "metadata": {"a": 1}, "version": 7}
    response = client.put("/v1/documents/guides/lake.md", json=body)
    assert response.status_code == 202
    assert response.json() == {
        "doc_id": "guides/lake.md", "topic": "documents", "partition": 0, "offset": 0, "version": 7
    }  # fmt: skip
    event = event_of(bench.publisher.messages[0])
    assert (event.document, event.version) == (DocumentKey("default", "guides/lake.md"), 7)
    assert (event.content, event.content_type, event.title, event.metadata) == ("# Lake", "markdown", "Lake", {"a": 1})


def test_delete_publishes_a_null_value_with_its_version_in_a_header(client, bench):
    """A tombstone without its version would be ordered by the broker's clock and lose against a late update."""
    response = client.delete("/v1/documents/lake", params={"version": 8})
    assert (response.status_code, response.json()["version"]) == (202, 8)
    (message,) = bench.publisher.messages
    assert (message.key, message.value) == (b"lake", None)
    assert ("kvquilt.version", b"8") in message.headers
    assert event_of(message).deletes


def test_without_a_version_the_brokers_timestamp_decides(client, bench):
    """The service has no clock of its own that could order changes."""
    assert client.put("/v1/documents/lake", json={"content": "x"}).json()["version"] is None
    event = event_of(bench.publisher.messages[0])
    assert event.version == packed_version(1_700_000_000_000, 0)
    bench.corpus.put("lake", "x", version=event.version)
    assert client.delete("/v1/documents/lake").json()["version"] is None


def test_a_document_with_its_producers_own_versions_goes_on_counting(client, bench):
    """A timestamp as version would outrank every later version of the producer, for ever."""
    bench.corpus.put("lake", "x", version=41)
    assert client.put("/v1/documents/lake", json={"content": "y"}).json()["version"] == 42
    assert client.put("/v1/documents/lake", json={"content": "z"}).json()["version"] == 43, "not committed yet"
    assert client.delete("/v1/documents/lake").json()["version"] == 44
    assert client.put("/v1/documents/lake", json={"content": "z", "version": 100}).json()["version"] == 100
    assert client.delete("/v1/documents/lake").json()["version"] == 101


def test_get_tells_state_version_and_how_much_is_servable(client, bench):
    """Users wait for this before they ask."""
    bench.corpus.put("lake", "one", "two", version=3, title="Lake")
    body = client.get("/v1/documents/lake").json()
    assert (body["version"], body["state"], body["chunks"], body["kv_ready"]) == (3, "live", 2, 2)
    assert body["title"] == "Lake"
    bench.corpus.put("hill", "one", kv=False)
    body = client.get("/v1/documents/hill").json()
    assert (body["chunks"], body["kv_ready"]) == (1, 0)
    bench.corpus.flip("lake", 4, state=DocumentState.DELETED, n_chunks=0)
    body = client.get("/v1/documents/lake").json()
    assert (body["version"], body["state"], body["chunks"], body["kv_ready"]) == (4, "deleted", 0, 0)


def test_an_unknown_document_is_a_404(client):
    """An empty status would read as an empty document."""
    response = client.get("/v1/documents/none")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "document_not_found"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "content is missing"),
        ({"content": " "}, "the document is empty"),
        ({"content": "a\x00b"}, "NUL character"),
        ({"content": "x", "version": -1}, "greater than or equal to 0"),
        ({"content": "x", "version": 1 << 63}, "less than"),
        ({"content": "x", "content_type": "docx"}, "content_type"),
        ({"content": "x", "tenant": "other"}, "tenant is not a field"),
    ],
)
def test_what_would_be_a_dead_letter_is_refused_at_the_door(client, bench, body, message):
    """A 202 for a document that can never be served is a lie."""
    response = client.put("/v1/documents/lake", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert bench.publisher.messages == []


@pytest.mark.parametrize("field", ["content", "title"])
def test_half_a_surrogate_pair_is_refused(client, bench, field):
    """JSON can carry it; UTF-8, Kafka and the tokenizer cannot."""
    body = json.dumps({"content": "x"} | {field: "\ud800"})
    response = client.put("/v1/documents/lake", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert bench.publisher.messages == []


def test_not_a_number_in_metadata_is_refused(client, bench):
    """The pipeline's JSON parser refuses it, so the door has to."""
    body = '{"content": "x", "metadata": {"a": NaN}}'
    response = client.put("/v1/documents/lake", content=body, headers={"content-type": "application/json"})
    published = [event_of(message).metadata for message in bench.publisher.messages]
    assert (response.status_code, published) in [(400, []), (202, [{"a": None}])]


def test_a_document_over_the_limit_is_a_413(client, bench):
    """It would be a dead letter, and nobody would tell the caller."""
    response = client.put("/v1/documents/lake", json={"content": "x" * (MAX_CONTENT_BYTES + 1)})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "document_too_large"
    assert bench.publisher.messages == []


@pytest.mark.parametrize("path", ["/v1/documents/", "/v1/documents/" + "x" * 513, "/v1/documents/%FF"])
def test_an_impossible_document_id_is_a_400(client, bench, path):
    """An id that is decoded with replacement characters names another document."""
    for response in (client.get(path), client.delete(path), client.put(path, json={"content": "x"})):
        assert (response.status_code, response.json()["error"]["param"]) == (400, "doc_id"), response.text
    assert bench.publisher.messages == []


def test_an_id_with_slashes_and_other_scripts_is_one_document(client, bench):
    """Encoded slashes are decoded before routing."""
    client.put("/v1/documents/%C3%BC%2F%20%3F", json={"content": "x"})
    assert bench.publisher.messages[0].key == "ü/ ?".encode()


def test_a_broker_that_is_down_is_a_503(client, bench):
    """A 202 means that the broker has it."""
    bench.publisher.down = True
    response = client.put("/v1/documents/lake", json={"content": "x"})
    assert response.status_code == 503
    assert "no broker at nowhere:9092" in response.json()["error"]["message"]


KEYS = {"key-a": "a", "key-b": "b"}


def as_tenant(key):
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer nope"}, {"authorization": "Basic key-a"}])
def test_without_a_known_key_nothing_of_v1_answers(start, bench, header):
    """Body parsing must not come before the key: a stranger could make us read megabytes."""
    client = start(api_keys=KEYS)
    for response in (
        client.post("/v1/answer", content=b"{", headers=header | {"content-type": "application/json"}),
        client.get("/v1/documents/lake", headers=header),
        client.delete("/v1/documents/lake", headers=header),
        client.get("/config", headers=header),
    ):
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
    assert client.get("/healthz").status_code == 200
    assert bench.publisher.messages == []


def test_api_04_another_tenant_finds_nothing_and_the_own_tenant_does(start, bench):
    """The tenant comes from the key alone, and reaches search, heads, KV and the topic."""
    client = start(api_keys=KEYS)
    bench.corpus.put("lake", "The lake is deep", tenant="a")
    bench.corpus.put("lake", "The lake is dry", tenant="b", version=5)
    for key, tenant, text in (("key-a", "a", "The lake is deep"), ("key-b", "b", "The lake is dry")):
        body = client.post("/v1/answer", json={"question": "lake", "k": 9}, headers=as_tenant(key)).json()
        (citation,) = body["citations"]
        assert (citation["tenant"], citation["text"], citation["source"]) == (tenant, text, "cached")
        folder = bench.parts.kv.folder(DocumentKey(tenant, "lake"))
        assert bench.blobs.reads.pop().startswith(folder)
    assert client.get("/v1/documents/lake", headers=as_tenant("key-b")).json()["version"] == 5
    bench.corpus.put("only-a", "secret", tenant="a")
    assert client.get("/v1/documents/only-a", headers=as_tenant("key-b")).status_code == 404
    client.put("/v1/documents/lake", json={"content": "x"}, headers=as_tenant("key-b"))
    client.delete("/v1/documents/lake", headers=as_tenant("key-a"))
    assert [event_of(message).tenant for message in bench.publisher.messages] == ["b", "a"]
