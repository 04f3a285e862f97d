"""The parts of both pipelines with fake models: for tests and benches that are about everything else."""

from __future__ import annotations

from typing import Any

from ingest.chunking import Chunker
from ingest.fakes import FakeEmbedder, FakePrefiller, WordTokenizer, fake_generation
from ingest.parts import IndexParts, PrefillParts
from schemas.settings import Settings
from stores.blobs import open_blobs
from stores.kv_store import KvStore
from stores.topics import Publisher


def fake_index_parts(settings: Settings, index: Any, embedder: Any = None) -> IndexParts:
    """INDEX over `index`, with the broker and the object store of the settings."""
    made = _stores(settings, index)
    chunker = Chunker(WordTokenizer(), made["generation"].chunk_max_tokens)
    return IndexParts(**made, embedder=embedder or FakeEmbedder(), chunker=chunker)


def fake_prefill_parts(settings: Settings, index: Any, model: Any = None) -> PrefillParts:
    """PREFILL over `index`, as `fake_index_parts`."""
    made, model = _stores(settings, index), model or FakePrefiller()
    return PrefillParts(**made, model=model, prefix_ids=(1, 2, 3), read_rows=lambda artifact: artifact)


def _stores(settings: Settings, index: Any) -> dict[str, Any]:
    generation = fake_generation()
    blobs = open_blobs(settings.blobs_url, settings.blobs.options)
    kv, publisher = KvStore(blobs, generation.name), Publisher(settings.kafka)
    return {"settings": settings, "generation": generation, "index": index, "kv": kv, "publisher": publisher}
