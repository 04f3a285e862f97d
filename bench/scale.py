"""How ingest scales: prefill processes that share a group, and the cost of a document as the corpus grows.

Both are about the pipelines and the stores, so the models are fakes. `bench.ingest` runs them by its options.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from bench.ingest import count, running
from bench.member import Members
from ingest import run_index, run_prefill
from ingest.embedding import embed
from ingest.fake_parts import fake_index_parts, fake_prefill_parts
from ingest.fakes import DIM, FakeEmbedder, FakePrefiller, Forgetful, fake_generation
from ingest.handles import held
from ingest.planning import parse, plan
from ingest.sinks import flip_heads, upsert_points
from schemas.events import EventBody
from schemas.head import CommitRecord
from schemas.ids import canonical_bytes
from schemas.settings import BlobSettings, IngestSettings, KafkaSettings, QdrantSettings, Settings
from stores.index_server import IndexServer
from stores.memory_index import MemoryIndex
from stores.topics import Message, Publisher, ensure_topics
from stores.vectors import open_index

PARTITIONS = 8
STALLED_S = 300
BATCH = 64  # documents


def shared_prefill(bootstrap: str, folder: Path, processes: int, n_documents: int, model_s: float) -> dict[str, Any]:
    """Documents/s of one prefill process and of several in one group.

    Args:
        bootstrap: an Apache Kafka; the embedded broker divides nothing.
        model_s: how long the model takes for a document. It sleeps, as if each process had a device of its own.
    """
    rates = {n: _prefill_rate(bootstrap, folder / str(n), n, n_documents, model_s) for n in (1, processes)}
    return {
        "docs_per_s": {str(n): round(rate, 2) for n, rate in rates.items()},
        "speed_up": round(rates[processes] / rates[1], 3),
        "processes": processes,
        "documents": n_documents,
        "model_s": model_s,
    }


def _prefill_rate(bootstrap: str, folder: Path, n: int, n_documents: int, model_s: float) -> float:
    kafka = _topics(bootstrap, f"shared-{n}")
    settings = Settings(kafka=kafka, data_dir=folder)
    index = MemoryIndex()
    with IndexServer(index) as server:
        records = _indexed(settings, index, n_documents)
        # passes of one chunk: what the model takes is per document then, as with one that is busy with each
        members = Members("prefill", n, kafka, folder, server.address, model_s, batch_documents=8, batch_tokens=16)
        with members, Publisher(kafka) as publisher:
            start = time.perf_counter()
            publisher.publish_many(kafka.commits_topic, records)
            _until(lambda: _servable(index), n_documents, 0.1)
            return n_documents / (time.perf_counter() - start)


def _servable(index: MemoryIndex) -> int:
    return sum(all(point.kv_ready for point in index.chunks(head.document)) for head in index.documents())


def _indexed(settings: Settings, index: MemoryIndex, n_documents: int) -> list[tuple[bytes, bytes, tuple[()]]]:
    """Put documents of one chunk into the index and give their commit records."""
    parts = fake_index_parts(settings, index, FakeEmbedder())
    with closing(parts):
        batch: tuple[Any, ...] = tuple(
            parse(parts, Message("documents", 0, k, 0, f"doc-{k}".encode(), _body(k, 1))) for k in range(n_documents)
        )
        for step in (plan, embed, upsert_points, flip_heads):
            batch = step(parts, batch)
    heads = [CommitRecord.of(work.head) for work in batch]
    return [(canonical_bytes([head.tenant, head.doc_id]), head.to_bytes(), ()) for head in heads]


def flat_cost(
    bootstrap: str, folder: Path, index: str, n_points: int, chunks: int, window: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds per document of the first `window` documents and of the last, while the corpus grows to `n_points`.

    Args:
        index: a Qdrant URL, `local` for its local mode, or `memory` for dictionaries.
        chunks: points per document.
        window: documents; at most half of them all.
    """
    n_documents = math.ceil(n_points / chunks)
    window = max(1, min(window, n_documents // 2))
    kafka = _topics(bootstrap, "flat")
    ingest = IngestSettings(batch_documents=BATCH)
    settings = Settings(kafka=kafka, data_dir=folder, ingest=ingest, blobs=BlobSettings(url="memory://"))
    marks = [0, window, *range(2 * window, n_documents - window, window), n_documents - window, n_documents]
    marks = sorted(set(marks))
    seconds: list[float] = []
    with ExitStack() as stack:
        opened = stack.enter_context(closing(_index(index, folder)))
        model = FakePrefiller(prefilled=Forgetful())
        index_parts = stack.enter_context(held(fake_index_parts(settings, opened, FakeEmbedder(embedded=Forgetful()))))
        prefill_parts = stack.enter_context(held(fake_prefill_parts(settings, opened, model)))
        publisher = stack.enter_context(Publisher(kafka))
        alive = stack.enter_context(
            running(
                lambda stop: run_index(settings, stop, index_parts),
                lambda stop: run_prefill(settings, stop, prefill_parts),
            )
        )
        before = _done()
        for first, end in itertools.pairwise(marks):
            start = time.perf_counter()
            items = [(f"doc-{k}".encode(), _body(k, chunks), ()) for k in range(first, end)]
            publisher.publish_many(kafka.documents_topic, items)
            _until(lambda: _done() - before, end, 0.02, alive)
            seconds.append((time.perf_counter() - start) / (end - first))
            say(f"{end} documents, {end * chunks} points: {1000 * seconds[-1]:.2f} ms per document")
    return {
        "first_ms_per_document": round(1000 * seconds[0], 3),
        "last_ms_per_document": round(1000 * seconds[-1], 3),
        "last_over_first": round(seconds[-1] / seconds[0], 3),
        "points": n_documents * chunks,
        "documents": n_documents,
        "window": window,
        "index": index,
        "ms_per_document": [round(1000 * one, 3) for one in seconds],
    }


def _done() -> int:
    return count("events", pipeline="prefill", outcome="confirmed")


def _index(kind: str, folder: Path) -> Any:
    if kind == "memory":
        return MemoryIndex()
    location = str(folder / "qdrant") if kind == "local" else kind
    index = open_index(QdrantSettings(prefix=f"bench_{time.time_ns()}"), location, fake_generation().name, DIM)
    index.ensure()
    return index


def _topics(bootstrap: str, name: str) -> KafkaSettings:
    unique = f"{name}-{time.time_ns()}"
    kafka = KafkaSettings(
        bootstrap=bootstrap,
        documents_topic=unique,
        commits_topic=f"{unique}.commits",
        group=unique,
        partitions=PARTITIONS,
    )
    ensure_topics(kafka)
    return kafka


def _body(number: int, chunks: int) -> bytes:
    """An event whose document is cut into so many chunks of the fake chunker's 16 words."""
    words = [f"word{number}x{position}" for position in range(16 * chunks)]
    return EventBody(content=" ".join(words), version=1).to_bytes()


def _until(done: Callable[[], int], wanted: int, every_s: float, alive: Callable[[], bool] = lambda: True) -> None:
    moved, last = time.monotonic(), -1
    while (now := done()) < wanted:
        if now != last:
            moved, last = time.monotonic(), now
        if not alive() or time.monotonic() - moved > STALLED_S:
            raise RuntimeError(f"{now} of {wanted} documents are done, and no more will be")
        time.sleep(every_s)
