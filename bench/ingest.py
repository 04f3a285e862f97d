"""How fast documents become servable, and how much of the time is not spent in the two models.

    python -m bench.ingest [--documents 24] [--json]
    python -m bench.ingest --prefill-processes 2 [--documents 400] [--model-s 0.05] [--broker HOST:PORT]
    python -m bench.ingest --flat-points 100000 [--chunks 5] [--window 10000] [--index URL|local|memory]

Documents go through the embedded broker's real topic; INDEX and PREFILL run as in `kvquilt up`, with the real small
models. The clock runs from the first publish until the KV of the last document is in place. Progress goes to stderr,
the last line of stdout is one JSON object. The second and the third form are in `bench.scale`, with fake models:
processes that share a group, which needs Apache Kafka (started from the tests' jars if none is named), and the cost per
document as the corpus grows, which is flat on a Qdrant server only: local mode looks at every point for every filter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from ingest import run_index, run_prefill
from ingest.connect import ConnectIndex, ConnectPrefill, connected
from ingest.handles import held
from schemas.events import EventBody
from schemas.settings import BlobSettings, KafkaSettings, QdrantSettings, Settings, load_settings
from stores.broker import EmbeddedBroker
from stores.topics import Publisher, ensure_topics

CORPUS = Path(__file__).parents[2] / "shared" / "data" / "turborag_corpus_1200.jsonl"
WARM_UP = 2
TIMEOUT_S = 1800


@dataclass
class ModelTime:
    """When a model was at work; calls may overlap."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The block is a model's work."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append((start, time.perf_counter()))

    def busy_s(self, start: float, end: float) -> float:
        """Seconds of `start..end` in which at least one model was at work."""
        busy, reached = 0.0, start
        for begin, finish in sorted(self.spans):
            begin, finish = max(begin, reached), min(finish, end)
            if finish > begin:
                busy, reached = busy + finish - begin, finish
        return busy


class Timed:
    """A model whose one method is measured; everything else is passed on."""

    def __init__(self, model: Any, method: str, clock: ModelTime) -> None:
        self._model, self._method, self._clock = model, method, clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if name != self._method:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._clock.measured():
                return found(*args, **kwargs)

        return call


def documents(n: int) -> tuple[str, list[str]]:
    """`n` texts of 1 to 7 KB and where they come from: the shared corpus, or generated where it is absent."""
    if CORPUS.is_file():
        with CORPUS.open(encoding="utf-8") as lines:
            return CORPUS.name, [json.loads(line)["text"] for _, line in zip(range(n), lines, strict=False)]
    return "generated", [_generated(number) for number in range(n)]


def _generated(number: int) -> str:
    subjects = ["The pump", "A valve", "The northern line", "Each operator", "This meter", "The old station"]
    verbs = ["is checked", "was replaced", "must be opened", "stays closed", "was moved", "is read"]
    return "\n\n".join(
        " ".join(
            f"{subjects[(number + p + s) % 6]} {verbs[(3 * number + 5 * p + s) % 6]} on day {number * 97 + p * 13 + s}."
            for s in range(12)
        )
        for p in range(6 + number % 10)
    )


def count(name: str, **labels: str) -> int:
    """The value of a counter."""
    return int(REGISTRY.get_sample_value(f"kvquilt_{name}_total", labels) or 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--prefill-processes", type=int, default=0, help="compare so many with one")
    parser.add_argument("--model-s", type=float, default=0.05, help="seconds that the fake model takes per document")
    parser.add_argument("--broker", default="", help="bootstrap of an Apache Kafka")
    parser.add_argument("--flat-points", type=int, default=0, help="let the corpus grow to so many points")
    parser.add_argument("--chunks", type=int, default=5, help="points per document")
    parser.add_argument("--window", type=int, default=10_000, help="documents at either end that are compared")
    parser.add_argument("--index", default="local", help="a Qdrant URL, `local` or `memory`")
    parser.add_argument("--json", action="store_true", help="print only the JSON object on stdout")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        result = _chosen(chosen, Path(folder), stack)
    if not chosen.json:
        for name, value in result.items():
            print(f"{name:>20}  {value}")
    print(json.dumps(result))


def _chosen(chosen: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Any]:
    from bench import scale

    if chosen.prefill_processes:
        kafka = chosen.broker or _apache_kafka(folder, stack)
        return scale.shared_prefill(kafka, folder, chosen.prefill_processes, chosen.documents, chosen.model_s)
    if chosen.flat_points:
        kafka = chosen.broker or stack.enter_context(EmbeddedBroker()).bootstrap
        return scale.flat_cost(kafka, folder, chosen.index, chosen.flat_points, chosen.chunks, chosen.window, _say)
    broker = stack.enter_context(EmbeddedBroker(folder / "broker"))
    return measure(_settings(folder, broker.bootstrap), chosen.documents)


def _apache_kafka(folder: Path, stack: ExitStack) -> str:
    from tests.services.kafka import ApacheKafka

    (folder / "kafka").mkdir()
    broker = ApacheKafka(folder / "kafka")
    stack.callback(broker.stop)
    return broker.start()


def measure(settings: Settings, n_documents: int) -> dict[str, Any]:
    """Publish, wait until all is servable, and give the figures."""
    corpus, texts = documents(WARM_UP + n_documents)
    clock = ModelTime()
    index, prefill = ConnectIndex(settings), ConnectPrefill(settings)
    ensure_topics(settings.kafka)
    _say("loading the models")
    with ExitStack() as stack:
        stack.enter_context(connected(index, prefill))
        dtype = prefill().model.fingerprint.dtype
        timed_index = replace(index(), embedder=Timed(index().embedder, "embed", clock))
        timed_prefill = replace(prefill(), model=Timed(prefill().model, "prefill_chunks", clock))
        connect_index = stack.enter_context(held(timed_index))
        connect_prefill = stack.enter_context(held(timed_prefill))
        alive = stack.enter_context(
            running(
                lambda stop: run_index(settings, stop, connect_index),
                lambda stop: run_prefill(settings, stop, connect_prefill),
            )
        )
        _publish(settings, texts[:WARM_UP], 0)
        _wait(WARM_UP, alive)
        chunks, tokens = count("prefilled_chunks"), count("prefilled_tokens")
        start = time.perf_counter()
        _publish(settings, texts[WARM_UP:], WARM_UP)
        text_s = _wait_for("index", "committed", len(texts), alive) - start
        end = _wait(len(texts), alive)
    wall_s, n_chunks = end - start, count("prefilled_chunks") - chunks
    model_s = clock.busy_s(start, end)
    return {
        "documents_per_s": round(n_documents / wall_s, 3),
        "chunks_per_s": round(n_chunks / wall_s, 3),
        "overhead_share": round(1 - model_s / wall_s, 4),
        "documents": n_documents,
        "chunks": n_chunks,
        "tokens_per_s": round((count("prefilled_tokens") - tokens) / wall_s, 1),
        "wall_s": round(wall_s, 2),
        "models_s": round(model_s, 2),
        "text_servable_s": round(text_s, 2),
        "corpus": corpus,
        "model": settings.model.name,
        "dtype": dtype,
    }


@contextmanager
def running(*pipelines: Callable[[threading.Event], None]) -> Iterator[Callable[[], bool]]:
    """Run each pipeline in a thread while the block runs; gives a function that says whether all are alive."""
    stop = threading.Event()
    threads = [threading.Thread(target=pipeline, args=(stop,)) for pipeline in pipelines]
    for thread in threads:
        thread.start()
    try:
        yield lambda: all(thread.is_alive() for thread in threads)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _settings(folder: Path, bootstrap: str) -> Settings:
    stores: dict[str, Any] = {"kafka": KafkaSettings(bootstrap=bootstrap), "qdrant": QdrantSettings()}
    return load_settings({"data_dir": folder}).model_copy(update=stores | {"blobs": BlobSettings()})


def _publish(settings: Settings, texts: Sequence[str], first: int) -> None:
    with Publisher(settings.kafka) as publisher:
        publisher.publish_many(
            settings.kafka.documents_topic,
            [
                (f"doc-{number}".encode(), EventBody(content=text, version=1).to_bytes(), ())
                for number, text in enumerate(texts, start=first)
            ],
        )


def _wait(n_documents: int, alive: Callable[[], bool]) -> float:
    return _wait_for("prefill", "confirmed", n_documents, alive)


def _wait_for(pipeline: str, outcome: str, n_documents: int, alive: Callable[[], bool]) -> float:
    """The time when so many documents had that outcome."""
    deadline, told = time.monotonic() + TIMEOUT_S, -1
    while (done := count("events", pipeline=pipeline, outcome=outcome)) < n_documents:
        if not alive() or time.monotonic() > deadline:
            raise RuntimeError(f"{pipeline}: {done} of {n_documents} documents are {outcome}, and no more will be")
        if done != told:
            told = done
            _say(f"{pipeline}: {done} of {n_documents} documents {outcome}")
        time.sleep(0.01)
    return time.perf_counter()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
