"""Running the two streaming pipelines: topics and parts made ready, a feed, and rounds on Beam's local runner.

What it costs to commit offsets only after the effects: one commit per bundle, which is up to 500 messages or 0.3 s of
reading. Measured: 0.9 ms (embedded broker) and 2.6 ms (Apache Kafka on the same machine) in the median.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from ingest import health
from ingest.connect import ConnectIndex, ConnectPrefill, connected
from ingest.feed import Feed
from ingest.handles import Handle, held
from ingest.parts import Connect, IndexParts, PrefillParts
from ingest.pipeline import IndexDocuments, PrefillDocuments
from ingest.retry import store_retry
from ingest.source import ReadMessages
from ingest.supervisor import Progress, run_rounds
from schemas.settings import Settings
from stores.clock import SystemClock
from stores.topics import ensure_topics

log = logging.getLogger(__name__)

RUNNER = "FnApiRunner, one worker in this process"  # DirectRunner would try to download another one first


def run_index(
    settings: Settings, stop_event: threading.Event, connect: Connect[IndexParts] | None = None, beside: str = ""
) -> None:
    """INDEX until told to stop: documents topic -> vectors, heads, commit records.

    Args:
        stop_event: set it (from a handler of SIGTERM, say) to drain: the call returns when what was read is done and
            its offsets are committed.
        connect: gives the parts; without one they are made from the settings, and closed at the end.
        beside: the name of the generation, where this process feeds another one, too.

    Raises:
        StoreError: Kafka, the vector index or the object store kept failing.
        UnsupportedModelError: the tokenizer or the embedder cannot be used.
        SettingsError: a setting does not fit.
    """
    parts = connect or ConnectIndex(settings)

    def transform(progress: Handle[Progress]) -> beam.PTransform:
        return IndexDocuments(settings.ingest, parts, progress)

    _run("index", settings, settings.kafka.documents_topic, parts, transform, stop_event, beside)


def run_prefill(
    settings: Settings, stop_event: threading.Event, connect: Connect[PrefillParts] | None = None, beside: str = ""
) -> None:
    """PREFILL until told to stop: commits topic -> KV artifacts. As `run_index`; needs the LLM, not the embedder.

    Raises:
        UnsupportedModelError: also where the model cannot be served with reuse.
    """
    parts = connect or ConnectPrefill(settings)

    def transform(progress: Handle[Progress]) -> beam.PTransform:
        return PrefillDocuments(settings.ingest, parts, progress)

    _run("prefill", settings, settings.kafka.commits_topic, parts, transform, stop_event, beside)


def _run(
    name: str,
    settings: Settings,
    topic: str,
    connect: Connect[Any],
    transform: Callable[[Handle[Progress]], beam.PTransform],
    stop: threading.Event,
    beside: str,
) -> None:
    ingest, clock = settings.ingest, SystemClock()
    shown = f"{name} of generation {beside}" if beside else name
    with ExitStack() as stack:
        stack.enter_context(health.starting(shown))
        store_retry(lambda: ensure_topics(settings.kafka), "setting up topics", ingest, clock)
        stack.enter_context(connected(connect))
        group = connect().settings.kafka.group_of(name)  # each generation has groups of its own
        feed = Feed(settings.kafka, topic, group, stop, poll_s=ingest.poll_s)
        store_retry(lambda: stack.enter_context(feed), f"opening topic {topic}", ingest, clock)
        stack.enter_context(health.watched(shown, feed, gauges=not beside))
        progress = stack.enter_context(held(Progress()))
        log.info("%s: reading %s as group %s; runner: %s", shown, topic, group, RUNNER)

        def run() -> None:
            feed.start_round(ingest.round_bundles, ingest.round_s)
            run_pipeline(lambda p: p | "ReadMessages" >> ReadMessages(feed) | transform(progress))

        run_rounds(shown, run, progress(), ingest, stop)
    log.info("%s: drained", shown)


def run_pipeline(build: Callable[[beam.Pipeline], Any]) -> None:
    """Build a pipeline and run it here to its end. The options are empty on purpose: Beam would read `sys.argv`."""
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    build(pipeline)
    pipeline.run().wait_until_finish()
