"""Every metric of the pipelines, in one place. They live in prometheus-client's default registry.

Beam's own metrics are readable only after a run has ended, which a streaming run does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

_STAGE_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300)
_FRESHNESS_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)

EVENTS = Counter("kvquilt_events", "Messages that a pipeline is done with", ["pipeline", "outcome"])
DEAD_LETTERS = Counter("kvquilt_dlq", "Messages put aside in the dead-letter topic", ["stage"])
STAGE_SECONDS = Histogram("kvquilt_ingest_stage_seconds", "Seconds per batch", ["stage"], buckets=_STAGE_BUCKETS_S)
FRESHNESS_SECONDS = Histogram(
    "kvquilt_freshness_seconds", "Change event to servable, for text and for KV", ["kind"], buckets=_FRESHNESS_BUCKETS_S
)
EMBEDDED_CHUNKS = Counter("kvquilt_embedded_chunks", "Chunks that were embedded")
PREFILLED_CHUNKS = Counter("kvquilt_prefilled_chunks", "Chunks whose KV was computed")
PREFILLED_TOKENS = Counter("kvquilt_prefilled_tokens", "Tokens of the chunks whose KV was computed")
FUSED_CHUNKS = Counter("kvquilt_fused_chunks", "Chunks whose KV was computed behind their neighbours")
UNFUSED = Counter("kvquilt_unfused_chunks", "Fused artifacts that were dropped or not made, by cause", ["cause"])
KV_WRITES = Counter("kvquilt_kv_writes", "KV artifacts written to a tier", ["tier", "generation"])
KV_STORE_FAILURES = Counter(
    "kvquilt_kv_store_failures", "Calls of a tier's store that failed, also those tried again", ["tier", "generation"]
)
RETIRED = Counter("kvquilt_retired", "What retiring older versions removed", ["kind"])
DELETIONS = Counter("kvquilt_deletions", "Deletions that PREFILL or reconcile judged, by their receipt", ["state"])
DRIFT = Counter("kvquilt_drift", "What reconcile found that did not agree", ["kind"])
PARTITIONS = Gauge("kvquilt_partitions", "Partitions of its topic that a pipeline of this process reads", ["topic"])
LAG = Gauge("kvquilt_consumer_lag", "Offsets between what a pipeline is done with and the end of its topic", ["topic"])
RECORDS_LAST = Gauge("kvquilt_records_last_seconds", "Since a pipeline last read a message; NaN before", ["topic"])
BROKER_CONTACT = Gauge("kvquilt_broker_contact_seconds", "Since the broker last answered a pipeline", ["topic"])
UNCOMMITTED = Gauge("kvquilt_uncommitted", "Offsets that are done and that the broker has not confirmed", ["topic"])
RETRIES = Counter("kvquilt_retries", "Calls of outside systems that failed and were tried again", ["action"])
LAST_BUNDLE = Gauge("kvquilt_last_bundle_timestamp_seconds", "When a pipeline last finished a bundle", ["pipeline"])

_OBJECT = "object"  # the only tier that pipelines write to

PIPELINES = {  # label values, so that each series is there, at zero, from the start
    "index": ("superseded", "repeated", "committed", "dead"),
    "prefill": ("superseded", "confirmed", "dead"),
}
for _pipeline, _outcomes in PIPELINES.items():
    for _outcome in _outcomes:
        EVENTS.labels(_pipeline, _outcome)
for _stage in ("parse", "plan", "embed", "prefill"):
    DEAD_LETTERS.labels(_stage)
for _kind in ("text", "kv"):
    FRESHNESS_SECONDS.labels(_kind)
for _kind in ("points", "artifacts"):
    RETIRED.labels(_kind)
for _state in ("pending", "waiting", "complete"):
    DELETIONS.labels(_state)


class _Activity:
    """When a step last finished a batch."""

    at_s = time.monotonic()


def idle_s() -> float:
    """Seconds since any step finished a batch, or since the process began."""
    return time.monotonic() - _Activity.at_s


@contextmanager
def stage_seconds(stage: str) -> Iterator[None]:
    """Measure a block as one batch of `stage`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        STAGE_SECONDS.labels(stage).observe(time.perf_counter() - start)
        _Activity.at_s = time.monotonic()


def watch_generation(generation: str) -> None:
    """A pipeline works on that generation: its counters are there, at zero at first."""
    for counter in (KV_WRITES, KV_STORE_FAILURES):
        counter.labels(_OBJECT, generation)


def kv_written(generation: str) -> None:
    """A KV artifact was put that was not there before."""
    KV_WRITES.labels(_OBJECT, generation).inc()


def kv_store_failed(generation: str) -> None:
    """The store of the KV artifacts did not do what it was asked."""
    KV_STORE_FAILURES.labels(_OBJECT, generation).inc()


def freshness(kind: str, event_ms: int, now_ms: int) -> None:
    """A change of `event_ms` is servable since `now_ms`, as `text` or as `kv`."""
    FRESHNESS_SECONDS.labels(kind).observe(max(0.0, (now_ms - event_ms) / 1000))
