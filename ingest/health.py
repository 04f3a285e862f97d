"""Whether the pipelines of this process work: the gauges that are exported, and what `/readyz` says."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Gauge

from ingest import telemetry
from ingest.feed import Feed, FeedHealth
from schemas.errors import StoreError

CONTACT_S = 30.0  # without an answer for so long, the broker is away
STALLED_S = 300.0  # with work waiting and nothing done for so long, the pipeline hangs

_GAUGES: dict[Gauge, Callable[[FeedHealth], float | int | None]] = {
    telemetry.PARTITIONS: lambda health: health.partitions,
    telemetry.LAG: lambda health: health.lag,
    telemetry.RECORDS_LAST: lambda health: health.record_age_s,
    telemetry.BROKER_CONTACT: lambda health: health.contact_age_s,
    telemetry.UNCOMMITTED: lambda health: health.uncommitted,
}

_pipelines: dict[str, Feed | None] = {}  # by name; None: it is starting
_lock = threading.Lock()


@contextmanager
def starting(name: str) -> Iterator[None]:
    """A pipeline of this process exists, and is not ready, while the block runs."""
    with _lock:
        _pipelines[name] = None
    try:
        yield
    finally:
        with _lock:
            _pipelines.pop(name, None)


@contextmanager
def watched(name: str, feed: Feed, *, gauges: bool = True) -> Iterator[None]:
    """Export what the feed of a pipeline knows of itself while the block runs; without `gauges` only readiness."""
    with _lock:
        _pipelines[name] = feed
    exported = _GAUGES if gauges else {}  # labelled by topic, which two generations share
    for gauge, value in exported.items():
        gauge.labels(feed.topic).set_function(lambda value=value: _number(feed, value))  # type: ignore[misc]
    try:
        yield
    finally:
        for gauge in exported:
            gauge.remove(feed.topic)
        with _lock:
            _pipelines[name] = None


def not_ready() -> str | None:
    """Why the pipelines of this process are not ready, in one sentence; None where they are."""
    with _lock:
        pipelines = dict(_pipelines)
    if not pipelines:
        return "no pipeline runs in this process yet"
    reasons = []
    for name, feed in pipelines.items():
        reason = "it is starting" if feed is None else judge(feed.health(), telemetry.idle_s())
        if reason is not None:
            reasons.append(f"{name}: {reason}")
    return "; ".join(reasons) or None


def remarks() -> list[str]:
    """What else there is to say of pipelines that are ready, a sentence each."""
    with _lock:
        feeds = {name: feed for name, feed in _pipelines.items() if feed is not None}
    return [
        f"{name}: group {feed.group} has no partition of topic {feed.topic} left for this process, it waits for one"
        for name, feed in feeds.items()
        if feed.health().partitions == 0
    ]


def judge(health: FeedHealth, idle_s: float) -> str | None:
    """Why a pipeline is not ready; None where it is.

    Args:
        idle_s: since any step of this process finished a batch.
    """
    if health.contact_age_s > CONTACT_S:
        return f"the broker has not answered for {health.contact_age_s:.0f} s"
    if health.partitions is None:
        return f"it waits for group {health.group} to give it partitions of topic {health.topic}"
    if health.lag and min(idle_s, _or_infinity(health.record_age_s)) > STALLED_S:
        return f"{health.lag} messages wait, and nothing was read or done for {STALLED_S:.0f} s"
    if not health.caught_up:
        behind = "" if health.lag is None else f", {health.lag} left to read"
        return f"it is catching up with what was in topic {health.topic} when it started{behind}"
    return None


def _number(feed: Feed, value: Callable[[FeedHealth], float | int | None]) -> float:
    try:
        found = value(feed.health())
    except StoreError:  # no answer is no reason to fail the whole page of metrics
        found = None
    return math.nan if found is None else float(found)


def _or_infinity(value: float | None) -> float:
    return math.inf if value is None else value
