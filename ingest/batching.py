"""How steps run in Beam: batches that live within one bundle, and one DoFn that applies one step to a batch.

A streaming pipeline must be one fused stage from source to sink (a shuffle, a grouping, a timer would hold elements
back whose offsets are committed already). So batches are not made by Beam: a DoFn collects elements and lets them
go when there are enough, and at the end of its bundle whatever there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP
from apache_beam.utils.windowed_value import WindowedValue

from ingest import telemetry
from ingest.handles import Handle
from ingest.parts import Connect
from ingest.supervisor import Progress
from ingest.work import Batch, IndexWork, PrefillWork, StepFunction
from schemas.ids import DocumentKey
from stores.topics import Message

P = TypeVar("P")
DocumentWork = IndexWork | PrefillWork


class Waves:
    """Collects work into waves, so that a step may treat a whole wave at once and documents keep their order.

    Within a wave each document occurs at most once; of two events of one document the earlier is in the earlier wave.
    """

    def __init__(self) -> None:
        self._waves: list[list[DocumentWork]] = []
        self._next: dict[DocumentKey, int] = {}
        self.n_elements = 0

    def add(self, work: DocumentWork) -> None:
        """Put `work` into the first wave behind the last one that has its document."""
        document = work.document
        wave = 0 if document is None else self._next.get(document, 0)
        if document is not None:
            self._next[document] = wave + 1
        if wave == len(self._waves):
            self._waves.append([])
        self._waves[wave].append(work)
        self.n_elements += 1

    def drain(self) -> list[Batch[DocumentWork]]:
        """Take all waves out, in order."""
        waves = [tuple(wave) for wave in self._waves]
        self._waves, self._next, self.n_elements = [], {}, 0
        return waves


class BatchInBundle(beam.DoFn):  # type: ignore[misc] # Beam has no types
    """Work -> waves of work, within one bundle."""

    def __init__(self, max_elements: int) -> None:
        self._max_elements = max_elements

    def start_bundle(self) -> None:
        """Begin with nothing: a bundle that failed left its elements to be read again."""
        self._waves = Waves()

    def process(self, work: DocumentWork) -> Iterator[Batch[DocumentWork]]:
        """Collect; let go of the waves when there are enough elements."""
        self._waves.add(work)
        if self._waves.n_elements >= self._max_elements:
            yield from self._waves.drain()

    def finish_bundle(self) -> Iterator[WindowedValue]:
        """Let go of the rest."""
        for wave in self._waves.drain():
            yield WindowedValue(wave, MIN_TIMESTAMP, [GlobalWindow()])


class Parse(beam.DoFn, Generic[P]):  # type: ignore[misc]
    """Message -> work, with the parts of this process."""

    def __init__(self, parse: Callable[[P, Message], DocumentWork], connect: Connect[P]) -> None:
        self._parse, self._connect = parse, connect

    def setup(self) -> None:
        """Take the parts."""
        self._parts = self._connect()

    def process(self, message: Message) -> Iterator[DocumentWork]:
        """One message, one piece of work."""
        with telemetry.stage_seconds("parse"):
            done = self._parse(self._parts, message)
        yield done


class _StepDoFn(beam.DoFn, Generic[P]):  # type: ignore[misc]
    def __init__(self, step: StepFunction[P], connect: Connect[P]) -> None:
        self._step, self._connect = step, connect

    def setup(self) -> None:
        self._parts = self._connect()

    def process(self, batch: Batch[Any]) -> Iterator[Batch[Any]]:
        with telemetry.stage_seconds(self._step.__name__):  # type: ignore[attr-defined]
            done = self._step(self._parts, batch)
        yield done  # outside: the steps behind this one run while we wait here


class Step(beam.PTransform, Generic[P]):  # type: ignore[misc]
    """One step function over batches, as a transform that is named after it."""

    def __init__(self, step: StepFunction[P], connect: Connect[P]) -> None:
        super().__init__(step.__name__)  # type: ignore[attr-defined]
        self._step, self._connect = step, connect

    def expand(self, batches: beam.PCollection) -> beam.PCollection:
        """Apply the step to each batch."""
        return batches | beam.ParDo(_StepDoFn(self._step, self._connect))


class Count(beam.DoFn):  # type: ignore[misc]
    """The last step: counts outcomes; reports the elements of each bundle that ended to the supervisor."""

    def __init__(self, pipeline: str, progress: Handle[Progress] | None = None) -> None:
        self._pipeline, self._progress = pipeline, progress

    def start_bundle(self) -> None:
        """Begin at zero."""
        self._elements = 0

    def process(self, batch: Batch[Any]) -> Iterator[Batch[Any]]:
        """Count and pass on."""
        self._elements += len(batch)
        for work in batch:
            telemetry.EVENTS.labels(self._pipeline, work.outcome.value).inc()
        yield batch

    def finish_bundle(self) -> None:
        """A bundle ended, with elements or without."""
        telemetry.LAST_BUNDLE.labels(self._pipeline).set_to_current_time()
        if self._progress is not None:
            self._progress().add(self._elements)
