"""The service over a real (tiny, random) model, the real embedder, Qdrant in memory and a folder of blobs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import httpx
import numpy as np
import pytest

from engine import resolve_generation
from schemas import kv_artifact
from schemas.chunk import Chunk, IndexedChunk
from schemas.head import DocumentState, Head
from schemas.ids import DocumentKey, artifact_key
from schemas.kv_artifact import FORMAT_VERSION, ArtifactHeader, KvArtifact, payload_sha256
from schemas.settings import load_settings
from serve import BackgroundServer, build_parts
from stores import open_index
from tests.ingest.tiny import make_tiny_model, text

LAKE = DocumentKey("default", "lake")
ASK = {"question": "What is said of the lake?", "max_tokens": 24, "k": 3}


class Served:
    """A running service and the parts behind it."""

    def __init__(self, folder: Path) -> None:
        model = make_tiny_model(folder / "tiny")
        self.settings = load_settings(
            {
                "data_dir": folder,
                "cache_dir": folder / "cache",
                "kafka": {"bootstrap": "nowhere:9092"},
                "qdrant": {"url": ":memory:serve-real"},
                "model": {"name": str(model), "dtype": "float32"},
                "serve": {"port": 0, "prefix_cache_bytes": 0, "host_tier_bytes": 0},  # artifacts are read every time
            }
        )
        generation = resolve_generation(self.settings).generation
        self.made = open_index(self.settings.qdrant, ":memory:serve-real", generation.name, generation.embedding_dim)
        self.made.ensure()  # as ingest does
        self.parts = build_parts(self.settings)
        self.chunks = [self._chunk(n) for n in range(3)]

    def _chunk(self, ordinal: int) -> IndexedChunk:
        content = text(ordinal, 4)
        ids = tuple(self.parts.model.tokenizer.encode(content))
        chunk = Chunk(LAKE, 1, ordinal, content, 1000 * ordinal, 1000 * ordinal + len(content), ids)
        key = artifact_key(self.parts.generation.fingerprint.digest, self.parts.template.prefix_sha256, ids)
        return IndexedChunk(chunk, key, self.parts.embedder.embed([content])[0], True)

    def write(self) -> None:
        """Put the document with all its KV, sound and whole."""
        self.parts.kv.delete(LAKE, [chunk.kv_key for chunk in self.chunks])
        for chunk in self.chunks:
            self.parts.kv.put(LAKE, chunk.kv_key, self.artifact(chunk))
        self.parts.index.upsert(self.chunks)
        self.parts.index.flip(
            Head(
                tenant="default",
                doc_id="lake",
                version=1,
                state=DocumentState.LIVE,
                generation=self.parts.generation.name,
                content_digest="x",
                n_chunks=3,
                event_ms=1,
                committed_ms=1,
            )
        )

    def artifact(self, indexed: IndexedChunk) -> KvArtifact:
        chunk = indexed.chunk
        (rows,) = self.parts.model.prefill_chunks(self.parts.template.prefix_ids, [chunk.token_ids])
        k, v = rows.to_bytes()
        ids = np.asarray(chunk.token_ids, np.int32)
        header = ArtifactHeader(
            format_version=FORMAT_VERSION,
            generation=self.parts.generation.name,
            fingerprint=self.parts.generation.fingerprint,
            prefix_sha256=self.parts.template.prefix_sha256,
            tenant="default",
            doc_id="lake",
            version=1,
            ordinal=chunk.ordinal,
            token_sha256=chunk.token_digest,
            payload_sha256=payload_sha256(k, v, ids),
        )
        return KvArtifact(header, bytes(k), bytes(v), ids)

    def replace(self, indexed: IndexedChunk, data: bytes) -> None:
        path = self.parts.kv.path(LAKE, indexed.kv_key)
        self.parts.blobs.delete([path])
        assert self.parts.blobs.put_new(path, data)


def with_nan(sound: KvArtifact) -> KvArtifact:
    """One number of `v` is NaN, and the checksum is right."""
    v = np.frombuffer(sound.v, np.float32).copy()
    v[7] = np.nan
    header = sound.header.model_copy(update={"payload_sha256": payload_sha256(sound.k, v.tobytes(), sound.token_ids)})
    return dataclasses.replace(sound, header=header, v=v.tobytes())


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = Served(tmp_path_factory.mktemp("served"))
    yield made
    made.parts.close()
    made.made.close()


@pytest.fixture(scope="module")
def client(served):
    with BackgroundServer(served.settings, served.parts) as server, httpx.Client(base_url=server.url) as client:
        yield client


@pytest.fixture
def whole(served, client):
    """The answer with all KV sound."""
    served.write()
    body = client.post("/v1/answer", json=ASK).json()
    assert body["fallback"] == {}
    assert {citation["source"] for citation in body["citations"]} == {"cached"}
    return body


def test_the_real_service_is_ready_and_counts_add_up(client, whole):
    """Everything above is a fake of this."""
    assert client.get("/readyz").text == "ready"
    usage = whole["usage"]
    assert usage["reused_tokens"] + usage["repaired_tokens"] + usage["fresh_tokens"] == usage["prompt_tokens"]
    chunk_tokens = usage["reused_tokens"]
    exact = client.post("/v1/answer", json=ASK | {"cache_mode": "exact"}).json()["usage"]
    assert exact["prompt_tokens"] == usage["prompt_tokens"]
    assert exact["reused_tokens"] < chunk_tokens


@pytest.mark.parametrize("fault", ["missing", "truncated", "checksum", "nan", "foreign", "all missing"])
def test_eng_05_the_answer_with_a_bad_artifact_equals_the_answer_with_a_sound_one(served, client, whole, fault):
    """A failed read fed uninitialised blocks, and the "recompute" policy gave another answer."""
    chunk = served.chunks[1]
    good = kv_artifact.encode(served.artifact(chunk))
    if fault in ("missing", "all missing"):
        doomed = served.chunks if fault == "all missing" else [chunk]
        served.parts.kv.delete(LAKE, [one.kv_key for one in doomed])
    elif fault == "truncated":
        served.replace(chunk, good[: len(good) // 2])
    elif fault == "checksum":
        served.replace(chunk, good[:-100] + bytes(100))
    elif fault == "nan":
        served.replace(chunk, kv_artifact.encode(with_nan(served.artifact(chunk))))
    else:
        other = served.artifact(served.chunks[2])  # sound, and of another chunk
        served.replace(chunk, kv_artifact.encode(other))
    body = client.post("/v1/answer", json=ASK).json()
    reason = {"foreign": "token_ids", "all missing": "missing", "nan": "format"}.get(fault, fault)
    assert body["fallback"] == {reason: 3 if fault == "all missing" else 1}
    assert body["answer"] == whole["answer"]
    assert body["usage"]["fresh_tokens"] > whole["usage"]["fresh_tokens"]
    assert body["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_eng_05_wrong_rows_would_have_changed_the_answer(served, client, whole):
    """If the tiny model did not look at its chunks, the test above could not fail."""
    sound = served.artifact(served.chunks[1])
    v = np.frombuffer(sound.v, np.float32)[::-1].tobytes()
    header = sound.header.model_copy(update={"payload_sha256": payload_sha256(sound.k, v, sound.token_ids)})
    served.replace(served.chunks[1], kv_artifact.encode(dataclasses.replace(sound, header=header, v=v)))
    body = client.post("/v1/answer", json=ASK).json()
    assert body["fallback"] == {}
    assert body["answer"] != whole["answer"]


def test_the_same_seed_gives_the_same_answer(client, whole):
    """A seed that is not carried to the sampler makes no answer reproducible."""
    sampled = ASK | {"temperature": 1.5, "seed": 7}
    first, again = (client.post("/v1/answer", json=sampled).json()["answer"] for _ in range(2))
    other = client.post("/v1/answer", json=sampled | {"seed": 8}).json()["answer"]
    assert first == again != other
