"""Health, readiness with a reason, metrics at zero, settings without secrets, and the page."""

from __future__ import annotations

import re
import threading

import pytest

from schemas.errors import BlobError, UnsupportedModelError, VectorIndexError
from schemas.fingerprint import Fingerprint
from schemas.settings import load_settings
from serve import BackgroundServer, run
from tests.serve.fakes import until


def reason(client):
    response = client.get("/readyz")
    assert response.status_code == 503
    return response.json()["error"]["message"]


def test_ready_once_model_index_and_blobs_answer(client):
    """A load balancer sends questions as soon as this is 200."""
    assert (client.get("/healthz").text, client.get("/readyz").text) == ("ok", "ready")


def test_alive_and_not_ready_with_a_reason_while_the_model_loads(settings, bench):
    """A process that does not answer probes while it loads is killed and loads again, for ever."""
    import httpx

    loaded = threading.Event()

    def make():
        assert loaded.wait(20)
        return bench.parts

    with BackgroundServer(settings, make) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/healthz").status_code == 200
        assert reason(client) == "the model is being loaded"
        response = client.post("/v1/answer", json={"question": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert "generation" not in client.get("/version").json()
        loaded.set()
        until(lambda: client.get("/readyz").status_code == 200, "ready")


def test_a_store_that_is_down_at_the_start_is_waited_for(settings, bench, monkeypatch):
    """Start order of containers is not guaranteed."""
    import httpx

    from serve import readiness

    monkeypatch.setattr(readiness, "FIRST_RETRY_S", 0.01)
    attempts = iter([BlobError("no bucket yet"), None])

    def make():
        if error := next(attempts):
            raise error
        return bench.parts

    with BackgroundServer(settings, make) as server, httpx.Client(base_url=server.url) as client:
        until(lambda: client.get("/readyz").status_code == 200, "ready")


def test_a_model_that_cannot_be_served_ends_the_process_with_its_sentence(settings):
    """A service that stays up and can never be ready hides a wrong setting."""

    def make():
        raise UnsupportedModelError("model 'x' has no rotary embedding that is known")

    with pytest.raises(UnsupportedModelError, match="model 'x' has no rotary"):
        run(settings, make)


@pytest.mark.parametrize(
    ("part", "error", "said"),
    [
        ("index", VectorIndexError("no collection"), "no index of generation .* no collection.* `ingest index`"),
        ("blobs", BlobError("access denied"), "the object store does not answer: access denied"),
    ],
)
def test_not_ready_says_which_store_does_not_answer(client, bench, monkeypatch, part, error, said):
    """`503` alone sends somebody to read logs at night."""

    def down():
        raise error

    monkeypatch.setattr(getattr(bench.parts, part), "ready", down)
    assert re.search(said, reason(client))


def test_not_ready_where_the_model_is_not_the_one_of_the_generation(client, bench):
    """Another model's KV would be a miss for every chunk, silently."""
    bench.model.fingerprint = Fingerprint(**(bench.model.fingerprint.model_dump() | {"weights_sha256": "new"}))
    assert "was made by another model" in reason(client)


def test_not_ready_where_the_index_of_this_generation_does_not_exist(start, bench):
    """An empty index that the service made itself would answer `nothing found` to everybody."""
    from stores import open_index

    client = start()
    other = open_index(load_settings().qdrant, ":memory:empty", bench.parts.generation.name, 16)
    object.__setattr__(bench.parts, "index", other)
    assert "It exists once `ingest index` has run" in reason(client)
    other.close()


METRICS = [
    'kvquilt_ttft_seconds_count{cache_mode="reuse",model="smollm2"}',
    'kvquilt_ttft_seconds_count{cache_mode="exact",model="smollm2"}',
    'kvquilt_stage_seconds_count{stage="retrieve"}',
    'kvquilt_stage_seconds_count{stage="first_step"}',
    'kvquilt_stage_seconds_count{stage="select"}',
    'kvquilt_stage_seconds_count{stage="repair"}',
    'kvquilt_ttft_seconds_count{cache_mode="blend",model="smollm2"}',
    'kvquilt_repaired_tokens_total{policy="closure"}',
    'kvquilt_requested_tokens_total{model="smollm2"}',
    'kvquilt_hit_tokens_total{model="smollm2"}',
    'kvquilt_reused_tokens_total{policy="none"}',
    'kvquilt_repaired_tokens_total{policy="none"}',
    'kvquilt_fresh_tokens_total{policy="full"}',
    'kvquilt_kv_load_bytes_total{tier="object"}',
    'kvquilt_kv_load_seconds_count{tier="object"}',
    'kvquilt_fallback_total{reason="missing"}',
    'kvquilt_fallback_total{reason="timeout"}',
    'kvquilt_fallback_total{reason="checksum"}',
    "kvquilt_fingerprint_mismatch_total",
    "kvquilt_checksum_failures_total",
    'kvquilt_stale_served_total{kind="text"}',
    'kvquilt_stale_served_total{kind="kv"}',
    'kvquilt_stale_checks_total{outcome="done"}',
    "kvquilt_cancelled_total",
    "kvquilt_rejected_total",
    "kvquilt_active_requests",
    "kvquilt_queued_requests",
    "kvquilt_queue_seconds_count",
]


@pytest.mark.parametrize("sample", METRICS)
def test_each_metric_is_there_at_zero(client, sample):
    """A rate over a series that appears with its first event misses that event."""
    assert f"{sample} 0.0" in client.get("/metrics").text.splitlines()


def test_metrics_move_and_never_hold_a_document_id(client, bench):
    """A label with an id in it is a time series per document."""
    bench.corpus.put("very-secret-id", "The lake is deep")
    client.post("/v1/answer", json={"question": "lake"})
    client.get("/v1/documents/very-secret-id")
    text = client.get("/metrics").text
    assert 'kvquilt_ttft_seconds_count{cache_mode="reuse",model="smollm2"} 1.0' in text
    assert 'kvquilt_http_requests_total{route="/v1/answer",status="200"} 1.0' in text
    assert 'kvquilt_http_requests_total{route="/v1/documents/{doc_id:path}",status="200"} 1.0' in text
    assert "very-secret-id" not in text


def test_config_is_redacted_and_version_names_the_generation(start, bench):
    """Secrets in a dump end up in tickets."""
    client = start(api_keys={"sk-1": "a"})
    shown = client.get("/config", headers={"authorization": "Bearer sk-1"})
    assert shown.json()["serve"]["api_keys"] == 1
    assert "sk-1" not in shown.text
    version = client.get("/version").json()
    assert (version["model"], version["generation"]) == ("smollm2", bench.parts.generation.name)


def test_the_page_needs_nothing_from_elsewhere(client):
    """An air-gapped machine, and a privacy page, both want one file."""
    response = client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert not re.search(r"(src|href)=[\"'](https?:)?//", response.text)
    assert "innerHTML" not in response.text
