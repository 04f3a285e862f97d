"""How old an answer can be: from the producer's timestamp to the moment a question could use the text, and the KV.

    python -m bench.freshness [--broker kafka|embedded] [--rate 1] [--seconds 60] [--burst 200] --json

INDEX and PREFILL run as in `kvquilt up`, with the real small models, over the embedded index and object store. First a
steady stream, each document of 1 to 4 chunks of up to 512 tokens; when all of it has its KV, a burst, of which only the
text is waited for, while prefill is behind. Text is usable when the flip of the head has returned, KV when the mark of
the document's last chunk has. In the end every document is looked for the way a question finds it.

`kv_over_prefill_p95`: KV's delay by what the forward passes with the document's chunks took. `prefill_load`: the share
of the stream's time in which prefill was at work; near 1 it is the model that sets the delay, not the pipeline.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.ingest import documents, running
from engine.threads import wait_passively
from ingest import run_index, run_prefill
from ingest.connect import ConnectIndex, ConnectPrefill, connected
from ingest.handles import held
from schemas.events import EventBody
from schemas.ids import DocumentKey
from schemas.settings import Settings, load_settings
from stores.broker import EmbeddedBroker
from stores.topics import Publisher, ensure_topics

TOKENS = range(64, 1536)  # of a document; a chunk has 256 to 512 unless it is the last
WARM_UP = 3
TIMEOUT_S = 1800


@dataclass
class Seen:
    """When what became usable, by document; seconds since the epoch."""

    sent: dict[str, float] = field(default_factory=dict)
    text: dict[str, float] = field(default_factory=dict)
    kv: dict[str, float] = field(default_factory=dict)
    chunks: dict[str, dict[Any, tuple[int, ...]]] = field(default_factory=lambda: defaultdict(dict))  # ids -> tokens
    open: dict[Any, str] = field(default_factory=dict)  # chunk ids without KV -> document
    passes: dict[tuple[int, ...], float] = field(default_factory=dict)  # tokens -> seconds of the pass with them


class SeenIndex:
    """The index, with a note of what has become usable when a call returns."""

    def __init__(self, index: Any, seen: Seen) -> None:
        self._index, self._seen = index, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def upsert(self, points: Sequence[Any]) -> None:
        """Points of a version that nobody sees yet."""
        for point in points:
            document = point.chunk.document.doc_id
            self._seen.chunks[document][point.chunk.id] = point.chunk.token_ids
            self._seen.open[point.chunk.id] = document
        self._index.upsert(points)

    def flip(self, head: Any) -> Any:
        """The text is usable when this returns."""
        stored = self._index.flip(head)
        self._seen.text.setdefault(head.doc_id, time.time())
        return stored

    def mark_kv(self, ids: Sequence[Any], ready: bool) -> None:
        """The KV is usable when this returns."""
        self._index.mark_kv(ids, ready)
        touched = {self._seen.open.pop(id) for id in ids if id in self._seen.open}
        left = set(self._seen.open.values())
        for document in touched - left:
            self._seen.kv.setdefault(document, time.time())


class SeenModel:
    """The LLM, with a note of how long each pass took."""

    def __init__(self, model: Any, seen: Seen) -> None:
        self._model, self._seen = model, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prefill_chunks(self, prefix_ids: Sequence[int], chunks: Sequence[Sequence[int]]) -> Any:
        """One pass."""
        start = time.perf_counter()
        rows = self._model.prefill_chunks(prefix_ids, chunks)
        seconds = time.perf_counter() - start
        self._seen.passes |= {tuple(chunk): seconds for chunk in chunks}
        return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = _options(arguments)
    wait_passively()
    with tempfile.TemporaryDirectory() as folder, _broker(options.broker, Path(folder)) as bootstrap:
        flags: dict[str, Any] = {"data_dir": folder, "kafka": {"bootstrap": bootstrap}}
        if options.nice is not None:
            flags["prefill"] = {"nice": options.nice}
        with ExitStack() as stack:
            result = measure(load_settings(flags), options, stack)
            if options.burst:
                kept = stack.pop_all()  # not drained: the burst's KV, minutes of prefill, is of no interest
    if not options.json:
        for name, value in result.items():
            print(f"{name:>26}  {value}")
    print(json.dumps(result), flush=True)
    if options.burst:
        logging.disable()
        os._exit(kept is None)


def measure(settings: Settings, options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """The stream, then the burst. `stack` holds what runs; behind a burst it goes on."""
    seen = Seen()
    index, prefill = ConnectIndex(settings), ConnectPrefill(settings)
    ensure_topics(settings.kafka)
    _say("loading the models")
    stack.enter_context(connected(index, prefill))
    model: Any = SeenModel(prefill().model, seen)
    for_index: Any = SeenIndex(index().index, seen)
    for_prefill: Any = SeenIndex(prefill().index, seen)
    of_index = replace(index(), index=for_index)
    of_prefill = replace(prefill(), index=for_prefill, model=model)
    texts = Texts(of_index.chunker.tokenizer)
    connect_index, connect_prefill = stack.enter_context(held(of_index)), stack.enter_context(held(of_prefill))
    alive = stack.enter_context(
        running(
            lambda stop: run_index(settings, stop, connect_index),
            lambda stop: run_prefill(settings, stop, connect_prefill),
        )
    )
    publisher = stack.enter_context(Publisher(settings.kafka))
    send = Sender(publisher, settings, seen)
    names = send.all("warm-up", [texts.next() for _ in range(WARM_UP)])
    _wait(lambda: all(name in seen.kv for name in names), alive, "warming up")
    seen.passes.clear()

    _say(f"{options.rate:g} documents/s for {options.seconds:g} s")
    start, stream = time.time(), []
    for number in range(round(options.rate * options.seconds)):
        time.sleep(max(0.0, start + number / options.rate - time.time()))
        stream += send.all(f"stream-{number}", [texts.next()])
    sent_s = time.time() - start
    _wait(lambda: all(name in seen.kv for name in stream), alive, "the stream's KV")
    text = sorted(seen.text[name] - seen.sent[name] for name in stream)
    kv = sorted(seen.kv[name] - seen.sent[name] for name in stream)
    prefill_s = {name: sum({seen.passes[ids] for ids in seen.chunks[name].values()}) for name in stream}
    ratios = sorted((seen.kv[name] - seen.sent[name]) / prefill_s[name] for name in stream)
    result: dict[str, Any] = {
        "text_p50_s": _at(text, 0.5),
        "text_p95_s": _at(text, 0.95),
        "kv_p50_s": _at(kv, 0.5),
        "kv_p95_s": _at(kv, 0.95),
        "prefill_s_per_document_p50": _at(sorted(prefill_s.values()), 0.5),
        "prefill_s_per_document_p95": _at(sorted(prefill_s.values()), 0.95),
        "kv_over_prefill_p95": _at(ratios, 0.95),
        "prefill_load": round(sum(set(seen.passes.values())) / max(sent_s, seen.kv[stream[-1]] - start), 3),
    }
    if options.burst:
        _say(f"a burst of {options.burst} documents")
        burst = send.all("burst", [texts.next() for _ in range(options.burst)])
        _wait(lambda: all(name in seen.text for name in burst), alive, "the burst's text")
        first = min(seen.sent[name] for name in burst)
        result["burst_text_last_s"] = round(max(seen.text[name] for name in burst) - first, 3)
        result["burst_kv_behind"] = sum(name not in seen.kv for name in burst)
        stream += burst
    missing = _not_found(of_index, stream)
    result |= {
        "not_found": len(missing),
        "documents": len(stream),
        "chunks": dict(sorted(Counter(len(seen.chunks[name]) for name in stream).items())),
        "tokens_mean": round(statistics.mean(sum(map(len, seen.chunks[name].values())) for name in stream), 1),
        "broker": options.broker,
        "rate": options.rate,
        "dtype": of_prefill.model.fingerprint.dtype,
        "nice": settings.prefill.nice,
    }
    return result


class Texts:
    """Texts of so many tokens as `TOKENS` says, one after the other; no two share a chunk."""

    def __init__(self, tokenizer: Any) -> None:
        _, self._pool = documents(200)
        self._tokenizer, self._n, self._at = tokenizer, 0, 0

    def next(self) -> str:
        """The next one."""
        wanted = TOKENS[(self._n * 617) % len(TOKENS)]  # evenly spread, the same every time
        paragraphs, n_tokens = [f"Document {self._n}."], 0
        while n_tokens < wanted:
            part = self._pool[self._at % len(self._pool)]
            self._at += 1
            ids = self._tokenizer.encode(part)
            if n_tokens + len(ids) > wanted:
                part = part[: len(part) * (wanted - n_tokens) // len(ids)]
            paragraphs.append(f"{self._n}: {part}")
            n_tokens += len(ids)
        self._n += 1
        return "\n\n".join(paragraphs)


class Sender:
    """Publishes documents; when each was sent is what the topic says."""

    def __init__(self, publisher: Publisher, settings: Settings, seen: Seen) -> None:
        self._publisher, self._topic, self._seen = publisher, settings.kafka.documents_topic, seen

    def all(self, name: str, texts: Sequence[str]) -> list[str]:
        """Publish new documents; returns their ids."""
        names = [f"{name}-{number}" for number in range(len(texts))]
        items = [
            (n.encode(), EventBody(content=t, version=1).to_bytes(), ()) for n, t in zip(names, texts, strict=True)
        ]
        for n in names:
            self._seen.sent[n] = time.time()
        if len(items) == 1:
            self._seen.sent[names[0]] = self._publisher.publish(self._topic, *items[0]).timestamp_ms / 1000
        else:
            self._publisher.publish_many(self._topic, items)
        return names


def _not_found(parts: Any, names: Sequence[str]) -> list[str]:
    """Documents that a question does not find: the search is for each document's own first chunk."""
    missing = []
    for name in names:
        document = DocumentKey("default", name)
        head = parts.index.heads([document])[document]
        (first, *_) = parts.index.chunks(document, head.version, vectors=True)
        hits = parts.index.search_visible("default", first.vectors[0], 4)
        if all(hit.chunk.chunk.document != document for hit in hits):
            missing.append(name)
    return missing


@contextmanager
def _broker(kind: str, folder: Path) -> Iterator[str]:
    if kind == "embedded":
        with EmbeddedBroker(folder / "broker") as broker:
            yield broker.bootstrap
        return
    from tests.services.kafka import ApacheKafka

    (folder / "kafka").mkdir()
    kafka = ApacheKafka(folder / "kafka")
    kafka.start()
    try:
        yield kafka.bootstrap
    finally:
        kafka.stop()


def _wait(done: Callable[[], bool], alive: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not done():
        if not alive() or time.monotonic() > end_s:
            raise RuntimeError(f"{what}: a pipeline ended, or {TIMEOUT_S} s have passed")
        time.sleep(0.05)


def _at(values: Sequence[float], share: float) -> float:
    return round(values[min(len(values) - 1, int(share * len(values)))], 3)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", choices=("embedded", "kafka"), default="embedded")
    parser.add_argument("--rate", type=float, default=1.0, help="documents per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the stream")
    parser.add_argument("--burst", type=int, default=200, help="documents at once, afterwards; 0: none")
    parser.add_argument("--nice", type=int, help="as the setting prefill.nice")
    parser.add_argument("--json", action="store_true", help="print only the JSON object on stdout")
    return parser.parse_args(arguments)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
