"""Documents over HTTP: one way in (the topic), versions, and what a tenant can see."""

from __future__ import annotations

import json

import pytest

from schemas.events import MAX_CONTENT_BYTES, parse_event
from schemas.head import DocumentState
from schemas.ids import DocumentKey, packed_version
from schemas.receipt import Place, ReceiptPart, Stage, judge
from stores.receipts import Receipts


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
    bench.corpus.flip("hill", 2, n_chunks=3)
    body = client.get("/v1/documents/hill").json()
    assert (body["chunks"], body["kv_ready"]) == (3, 0), "points that were lost are not ready"
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


NOT_JSON = ['"a": NaN', '"a": 1e999', '"a": "\\ud800"', '"\\ud800": 1', '"a": ' + "[" * 300 + "]" * 300]


@pytest.mark.parametrize("pair", NOT_JSON, ids=lambda pair: pair[:12])
@pytest.mark.parametrize("route", ["PUT /v1/documents/lake metadata", "POST /v1/documents/delete filter"])
def test_what_json_cannot_say_is_a_400_that_names_the_parameter(client, bench, route, pair):
    """Bug: a filter with NaN or half a surrogate pair was a 500, and metadata with NaN was published as null."""
    method, path, field = route.split()
    content = f'{{"{field}": {{{pair}}}' + (', "content": "x"}' if method == "PUT" else "}")
    response = client.request(method, path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split(".")[0] == field
    assert bench.publisher.messages == []


@pytest.mark.parametrize("field", ["content", "title", "uri"])
def test_half_a_surrogate_pair_is_refused(client, bench, field):
    """JSON can carry it; UTF-8, Kafka and the tokenizer cannot."""
    body = json.dumps({"content": "x"} | {field: "\ud800"})
    response = client.put("/v1/documents/lake", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert bench.publisher.messages == []


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


def receipt(client, doc_id="lake", **params):
    return client.get(f"/v1/documents/{doc_id}/receipt", params=params)


def noted(bench, stage, found, left=0, version=2):
    counts = {Place.POINTS: found, Place.OBJECTS: found}
    part = ReceiptPart(
        tenant="default", doc_id="lake", version=version, generation=bench.parts.generation.name, stage=stage,
        asked_ms=10, at_ms=20, found=counts, left=dict.fromkeys(counts, left),
    )  # fmt: skip
    Receipts(bench.parts.blobs).note(part)
    return part


def test_vec_09_a_receipt_is_pending_until_everything_is_gone_and_counts_what_is_left_now(client, bench):
    """Users cannot tell whether a deletion happened; a receipt that repeats what was planned would not tell either."""
    points = bench.corpus.put("lake", "one", "two")
    bench.corpus.flip("lake", 2, n_chunks=0, state=DocumentState.DELETED)
    noted(bench, Stage.FOUND, 2)
    got = receipt(client).json()
    assert (got["state"], got["version"], got["asked_ms"], got["invisible_ms"]) == ("PENDING", 2, 10, 20)
    assert got["counts"] == [
        {"place": "vectors/index", "found": 2, "deleted": 0, "left": 2},
        {"place": "kv/object", "found": 2, "deleted": 0, "left": 2},
        {"place": "kv/fused", "found": 0, "deleted": 0, "left": 0},
    ]
    assert got["missing"] == [
        "the index pipeline has not deleted and recounted yet",
        "the prefill pipeline has not passed the tombstone yet",
        "2 left in vectors/index",
        "2 left in kv/object",
    ]
    bench.parts.index.delete([points[0].chunk.id])
    assert receipt(client).json()["counts"][0] == {"place": "vectors/index", "found": 2, "deleted": 1, "left": 1}


def test_a_complete_receipt_is_given_as_it_was_kept(client, bench):
    bench.corpus.flip("lake", 2, n_chunks=0, state=DocumentState.DELETED)
    parts = {stage: noted(bench, stage, 2) for stage in (Stage.FOUND, Stage.INDEX)}
    kept = judge(
        DocumentKey("default", "lake"), 2, bench.parts.generation.name, parts, {}, 30, prefill_passed=True
    )  # fmt: skip
    Receipts(bench.parts.blobs).complete(kept)
    assert receipt(client).json() == kept.model_dump(mode="json")
    assert receipt(client).json()["state"] == "COMPLETE"
    assert receipt(client, version=2).json() == receipt(client).json()


def test_a_receipt_is_pending_as_soon_as_the_head_says_deleted(client, bench):
    """Between the flip and the first note a crash may lie: the deletion is known all the same."""
    bench.corpus.put("lake", "one")
    bench.corpus.flip("lake", 2, n_chunks=0, state=DocumentState.DELETED)
    assert receipt(client).json()["state"] == "PENDING"


@pytest.mark.parametrize("params", [{}, {"version": 1}, {"version": 9}])
def test_a_deletion_that_is_not_known_has_no_receipt(client, bench, params):
    bench.corpus.put("lake", "one")
    answer = receipt(client, **params)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "receipt_not_found")


def test_a_receipt_of_another_tenant_is_not_found(start, bench):
    """The receipt's existence tells that a document was there."""
    client = start(api_keys={"sk-a": "a", "sk-b": "b"})
    bench.corpus.put("lake", "one", tenant="a")
    bench.corpus.flip("lake", 2, n_chunks=0, state=DocumentState.DELETED, tenant="a")
    codes = [
        client.get("/v1/documents/lake/receipt", headers={"authorization": f"Bearer sk-{name}"}).status_code
        for name in ("a", "b")
    ]
    assert codes == [200, 404]


def test_a_document_whose_id_ends_like_the_receipts_path_is_still_found(client, bench):
    """Ids hold slashes, so `a/receipt` is an id."""
    bench.corpus.put("lake/receipt", "one")
    assert client.get("/v1/documents/lake%2Freceipt").json()["doc_id"] == "lake/receipt"
    assert client.get("/v1/documents/lake/receipt").status_code == 404
    bench.corpus.flip("lake/receipt", 2, n_chunks=0, state=DocumentState.DELETED)
    assert client.get("/v1/documents/lake%2Freceipt/receipt").json()["doc_id"] == "lake/receipt"


def delete_many(client, **body):
    return client.post("/v1/documents/delete", json=body)


@pytest.fixture
def shelf(bench):
    """Three documents of two teams, one of another tenant, and a tombstone."""
    for doc_id, tenant, team in (("a", "default", "x"), ("b", "default", "x"), ("c", "default", "y"), ("d", "o", "x")):
        bench.corpus.put(doc_id, doc_id, tenant=tenant)
        key = DocumentKey(tenant, doc_id)
        head = bench.parts.index.heads([key])[key]
        bench.parts.index.flip(head.model_copy(update={"version": 5, "metadata": {"team": team, "year": 2024}}))
    bench.corpus.flip("e", 3, n_chunks=0, state=DocumentState.DELETED)
    return bench


def test_vec_09_documents_are_deleted_by_metadata_and_the_answer_lists_them(client, shelf):
    """There is one way in: each deletion is an event, ordered like every other."""
    answer = delete_many(client, filter={"team": "x", "year": 2024})
    assert answer.status_code == 202
    assert sorted((one["doc_id"], one["version"]) for one in answer.json()["deletions"]) == [("a", 6), ("b", 6)]
    assert answer.json()["next"] is None
    events = [event_of(message) for message in shelf.publisher.messages]
    assert sorted((event.doc_id, event.tenant, event.deletes) for event in events) == [
        ("a", "default", True), ("b", "default", True)
    ]  # fmt: skip


def test_a_whole_tenant_is_deleted_only_with_its_name_as_confirmation(client, shelf):
    """One field too few must not empty an index."""
    for body in ({"all": True}, {"all": True, "confirm": "o"}):
        refused = delete_many(client, **body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_confirmed")
    answer = delete_many(client, all=True, confirm="default")
    assert sorted(one["doc_id"] for one in answer.json()["deletions"]) == ["a", "b", "c"], "live ones, of this tenant"


@pytest.mark.parametrize("body", [{}, {"filter": {}}, {"filter": {"team": "x"}, "all": True, "confirm": "default"}])
def test_a_deletion_of_many_that_names_none_is_refused(client, shelf, body):
    """An empty filter matches everything."""
    assert delete_many(client, **body).json()["error"]["code"] == "nothing_named"
    assert shelf.publisher.messages == []


@pytest.mark.parametrize("value", [None, ["x"], {"a": 1}])
def test_a_filter_by_what_has_no_label_is_refused(client, shelf, value):
    assert delete_many(client, filter={"team": value}).status_code == 400
    assert shelf.publisher.messages == []


def test_a_deletion_of_many_goes_page_by_page(client, shelf):
    listed, after = [], None
    while True:
        answer = delete_many(client, all=True, confirm="default", limit=2, after=after).json()
        listed += [one["doc_id"] for one in answer["deletions"]]
        after = answer["next"]
        if after is None:
            break
    assert sorted(listed) == ["a", "b", "c"]
