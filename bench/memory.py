"""Whether the pipelines' memory stays flat: the resident size of their process while events go through both.

    python -m bench.memory [--events 100000] [--every 5000] [--documents 500] [--broker HOST:PORT] [--json]

INDEX and PREFILL run as in `kvquilt up`, supervised in rounds, over fake models and an index in memory; the broker is a
process of its own. The events are ever newer versions of the same documents, so that what is stored does not grow:
whatever does is a leak. Progress goes to stderr, the last line of stdout is one JSON object.

`growth_mb` is the resident size at the end less that after a tenth of the events; `kb_per_1000_events` is the slope of
a line through the second half. `--broker` names Apache Kafka; without it the embedded broker is started.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.ingest import count, running
from ingest import run_index, run_prefill
from ingest.fake_parts import fake_index_parts, fake_prefill_parts
from ingest.fakes import FakeEmbedder, FakePrefiller, Forgetful
from ingest.handles import held
from schemas.events import EventBody
from schemas.settings import BlobSettings, IngestSettings, KafkaSettings, Settings
from stores.broker import EmbeddedBroker
from stores.memory_index import MemoryIndex
from stores.topics import Publisher, ensure_topics

STALLED_S = 300
PAGE = 2_500  # events are published this many at a time, never far ahead of what is done


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=5_000, help="events between two looks at the memory")
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--broker", default="", help="bootstrap of an Apache Kafka; empty: the embedded broker")
    parser.add_argument("--round-bundles", type=int, default=IngestSettings().round_bundles)
    parser.add_argument("--json", action="store_true", help="print only the JSON object on stdout")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bootstrap = chosen.broker or stack.enter_context(EmbeddedBroker()).bootstrap
        name = f"memory-{time.time_ns()}"
        kafka = KafkaSettings(
            bootstrap=bootstrap, documents_topic=name, commits_topic=f"{name}.commits", group=name, partitions=4
        )
        settings = Settings(
            kafka=kafka,
            data_dir=Path(folder),
            blobs=BlobSettings(url="memory://"),
            ingest=IngestSettings(batch_documents=256, round_bundles=chosen.round_bundles),
        )
        result = measure(settings, chosen.events, chosen.every, chosen.documents)
    result["broker"] = chosen.broker or "embedded"
    if not chosen.json:
        for field, value in result.items():
            print(f"{field:>20}  {value}")
    print(json.dumps(result))


def measure(settings: Settings, n_events: int, every: int, n_documents: int) -> dict[str, Any]:
    """Publish events as they are done, and look at the memory in between."""
    ensure_topics(settings.kafka)
    index = MemoryIndex()
    embedder, model = FakeEmbedder(embedded=Forgetful()), FakePrefiller(prefilled=Forgetful())
    looks: list[tuple[int, float]] = []
    start = time.perf_counter()
    with (
        held(fake_index_parts(settings, index, embedder)) as index_parts,
        held(fake_prefill_parts(settings, index, model)) as prefill_parts,
        Publisher(settings.kafka) as publisher,
        running(
            lambda stop: run_index(settings, stop, index_parts), lambda stop: run_prefill(settings, stop, prefill_parts)
        ) as alive,
    ):
        for first in range(0, n_events, PAGE):
            items = [_event(number, n_documents) for number in range(first, min(first + PAGE, n_events))]
            publisher.publish_many(settings.kafka.documents_topic, items)
            _wait(first + len(items), alive)
            if not looks or first + len(items) >= looks[-1][0] + every or first + len(items) == n_events:
                gc.collect()
                looks.append((first + len(items), _resident_mb()))
                _say(f"{looks[-1][0]:>8} events  {looks[-1][1]:8.1f} MB  {time.perf_counter() - start:8.0f} s")
    return _result(looks, time.perf_counter() - start)


def _event(number: int, n_documents: int) -> tuple[bytes, bytes, tuple[()]]:
    document, version = number % n_documents, number // n_documents + 1
    text = f"document {document} says in version {version} that {number} came after {number - 1}"
    return f"doc-{document}".encode(), EventBody(content=text, version=version).to_bytes(), ()


def _wait(n_events: int, alive: Any) -> None:
    """Until both pipelines are done with so many events."""
    moved, last = time.monotonic(), -1
    while True:
        done = min(_done("index"), _done("prefill"))
        if done >= n_events:
            return
        if done != last:
            moved, last = time.monotonic(), done
        if not alive() or time.monotonic() - moved > STALLED_S:
            raise RuntimeError(f"{done} of {n_events} events are done, and no more will be")
        time.sleep(0.01)


def _done(pipeline: str) -> int:
    outcomes = ("committed", "repeated", "superseded", "dead") if pipeline == "index" else ("confirmed", "superseded")
    return sum(count("events", pipeline=pipeline, outcome=outcome) for outcome in outcomes)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def _result(looks: Sequence[tuple[int, float]], wall_s: float) -> dict[str, Any]:
    events, sizes = np.array([at for at, _ in looks]), np.array([mb for _, mb in looks])
    early = sizes[np.searchsorted(events, events[-1] / 10)]
    late = events >= events[-1] / 2
    slope = np.polyfit(events[late], sizes[late], 1)[0] if late.sum() > 1 else 0.0  # MB per event
    return {
        "growth_mb": round(float(sizes[-1] - early), 1),
        "kb_per_1000_events": round(float(slope) * 1e6, 1),
        "rss_mb": round(float(sizes[-1]), 1),
        "rss_max_mb": round(float(sizes.max()), 1),
        "events": int(events[-1]),
        "wall_s": round(wall_s, 1),
        "events_per_s": round(events[-1] / wall_s, 1),
        "looks": [[at, round(mb, 1)] for at, mb in looks],
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
