"""Sinks for the tests of the source: in a module of their own, since Beam pickles DoFns by reference."""

from __future__ import annotations

import threading
from collections import defaultdict

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from ingest.source import Feed, ReadMessages
from stores.topics import Message


class Sink:
    """What the effects of a run are written to. `gate` closed makes the effects wait; `fail_on` makes one fail."""

    def __init__(self) -> None:
        self.written: list[Message] = []
        self.bundles: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.fail_on: bytes | None = None

    def write(self, messages: list[Message]) -> None:
        self.reached.set()
        self.gate.wait()
        if self.fail_on is not None and any(message.value == self.fail_on for message in messages):
            self.fail_on = None
            raise RuntimeError("the sink failed")
        self.written += messages
        self.bundles.append(len(messages))

    @property
    def values(self) -> list[bytes | None]:
        return [message.value for message in self.written]


SINKS: defaultdict[str, Sink] = defaultdict(Sink)


class Write(beam.DoFn):
    """Effects at the end of the bundle, as the pipelines have them."""

    def __init__(self, sink: str) -> None:
        self._sink = sink
        self._taken: list[Message] = []

    def process(self, message: Message) -> None:
        self._taken.append(message)

    def finish_bundle(self) -> None:
        taken, self._taken = self._taken, []
        if taken:
            SINKS[self._sink].write(taken)


def run(feed: Feed, sink: str) -> None:
    """One run of source -> sink, until the feed drains."""
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    _ = pipeline | ReadMessages(feed) | beam.ParDo(Write(sink))
    pipeline.run().wait_until_finish()


class Running:
    """A run in a thread. Leaving drains it and raises what it raised."""

    def __init__(self, feed: Feed, sink: str) -> None:
        self._feed = feed
        self._thread = threading.Thread(target=self._run, args=(sink,))
        self.error: BaseException | None = None

    def _run(self, sink: str) -> None:
        try:
            run(self._feed, sink)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def join(self) -> None:
        """Wait for the end of the run."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the run does not end"

    def __exit__(self, *_: object) -> None:
        self._feed.stop.set()
        self.join()
        if self.error is not None:
            raise self.error
