"""Fused chunks over a real (tiny, random) model, from a file through both pipelines to an answer."""

import httpx
import pytest

from engine import KvRows, load_model, resolve_generation
from ingest import run_backfill
from ingest.connect import ConnectPrefill
from ingest.sources import survey
from schemas.errors import SettingsError
from schemas.settings import load_settings
from serve import BackgroundServer, build_parts
from stores import KvStore, open_blobs, open_index
from tests.ingest.backfilling import jsonl
from tests.ingest.tiny import make_tiny_model, text

DOCUMENTS, N = 8, 3


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["fused", "fused_company"])
def test_what_is_stored_is_what_the_model_computes_behind_the_neighbours_and_it_is_served(
    memory_broker, tmp_path, variant
):
    """Everything else about fusing is shown on fakes."""
    (tmp_path / "company.txt").write_text(text(99, 3))
    topics = {"documents_topic": f"documents-{variant}", "commits_topic": f"commits-{variant}"}
    settings = load_settings(
        {
            "data_dir": str(tmp_path / "data"),
            "cache_dir": str(tmp_path / "cache"),
            "kafka": {"bootstrap": memory_broker.bootstrap, **topics},
            "model": {"name": str(make_tiny_model(tmp_path / "model")), "dtype": "float32", "device": "cpu"},
            "chunker": {"max_tokens": 48},
            "prefill": {"variant": variant, "neighbours": N, "company": str(tmp_path / "company.txt")},
            "serve": {"port": 0},
        }
    )
    file = jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"a{n}", "content": text(n, 6)} for n in range(DOCUMENTS)])
    assert run_backfill(settings, survey([file])).prefilled == DOCUMENTS

    identity = resolve_generation(settings)
    generation, model = identity.generation, load_model(settings.model, settings.cache_folder)
    kv = KvStore(open_blobs(settings.blobs_url, {}), generation.name)
    index = open_index(settings.qdrant, settings.qdrant_location, generation.name, generation.embedding_dim)
    points = [point for head in index.documents() for point in index.chunks(head.document, head.version)]
    assert len(points) > 2 * DOCUMENTS

    def rows(document, key, token_digest, neighbours=()):
        asked = {"fingerprint": generation.fingerprint.digest, "token_sha256": token_digest}
        artifact = kv.get(document, key, **asked, neighbours=neighbours)
        return KvRows.from_bytes(artifact.k, artifact.v, artifact.header.fingerprint)

    digests = {(point.chunk.document, point.kv_key): point.chunk.token_digest for point in points}
    for point in points:
        chunk, fusion = point.chunk, point.fusion
        assert (point.kv_ready, fusion.ready, len(fusion.neighbours)) == (True, True, N)
        names = [one.kv_key for one in fusion.neighbours]
        behind = [rows(one.document, one.kv_key, digests[one.document, one.kv_key]) for one in fusion.neighbours]
        stored = rows(chunk.document, fusion.kv_key, chunk.token_digest, names)
        made = model.prefill_behind(identity.front_ids, behind, chunk.token_ids)
        assert (stored.k - made.k).abs().max() < 1e-5
        assert (stored.v - made.v).abs().max() < 1e-5
        pass_1 = rows(chunk.document, point.kv_key, chunk.token_digest)
        assert (stored.v - pass_1.v).abs().max() > 1e-3, "neighbours make a difference"
        assert (point.first_key is None) is (variant == "fused")
        if point.first_key is not None:
            first = rows(chunk.document, point.first_key, chunk.token_digest)
            (made,) = model.prefill_chunks(identity.template.prefix_ids, [chunk.token_ids])
            assert (first.v - made.v).abs().max() < 1e-5
    assert run_backfill(settings, survey([file])).repeated == DOCUMENTS

    parts = build_parts(settings)
    try:
        with BackgroundServer(settings, parts) as server, httpx.Client(base_url=server.url, timeout=60) as client:
            body = client.post("/v1/answer", json={"question": text(3, 1), "k": 4, "max_tokens": 4}).json()
            assert (body["fallback"], len(body["citations"])) == ({}, 4)
            assert {citation["source"] for citation in body["citations"]} == {"cached"}
            blend = {"question": text(3, 1), "k": 4, "max_tokens": 4, "cache_mode": "blend"}
            body = client.post("/v1/answer", json=blend).json()
            assert (body["cache_mode"], "no valid certificate" in body["note"]) == ("exact", True)
    finally:
        parts.close()
        index.close()


def test_a_front_that_leaves_no_room_for_chunks_is_refused_at_the_start(tmp_path):
    """Every chunk would be a dead letter."""
    settings = load_settings(
        {
            "data_dir": str(tmp_path / "data"),
            "cache_dir": str(tmp_path / "cache"),
            "kafka": {"bootstrap": "nowhere:1"},
            "qdrant": {"url": ":memory:no-room"},
            "blobs": {"url": "memory://no-room"},
            "model": {"name": str(make_tiny_model(tmp_path / "model")), "dtype": "float32", "device": "cpu"},
            "prefill": {"variant": "company"},
        }
    )
    with pytest.raises(SettingsError, match=r"prefill.variant company: .* in front of a chunk of up to 512"):
        ConnectPrefill(settings)()
