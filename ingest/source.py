"""The documents and commits topics as a Beam source, offsets committed after the effects.

Two halves, because Beam pickles sources, parks and rebuilds readers at will, and finalizes after it closed them:

- `ingest.feed.Feed` lives in the process that runs the pipeline: it holds the connection, the health and the drain.
- `KafkaSource` and its reader are what Beam handles: cheap shells that find the feed by name.

A bundle ends as soon as the topic has nothing more to give, after `max_records` or 0.3 s; the runner then finalizes it,
which commits the offsets of what its fused stage has done. A stage border between source and sink (Reshuffle,
GroupByKey, a window, a timer) would finalize before the effects and lose data: keep source to sink one fused stage.

Only where the run resumes is decided by offsets: a crash before the commit reads the same messages again.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.coders import Coder
from apache_beam.io.unbounded_source import CheckpointMark, ReadFromUnboundedSource, UnboundedReader, UnboundedSource
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP, Timestamp

from ingest.feed import Feed, FeedHealth
from ingest.offsets import Marks
from schemas.settings import KafkaSettings
from stores.topics import Message

__all__ = ["Feed", "FeedHealth", "KafkaSource", "OffsetMark", "OffsetMarkCoder", "ReadMessages"]

MAX_READ_TIME_S = 0.3  # Beam's default of 10 s would hold back the effects of a trickle for as long
MAX_TIMESTAMP_MS = 253_402_300_799_000  # the end of the year 9999; what is later is no timestamp


class OffsetMark(CheckpointMark):  # type: ignore[misc] # Beam has no types
    """How far a bundle came. The mark of one that just ended knows its feed, to tell it when it is done."""

    def __init__(self, marks: Marks, feed: Feed | None = None, number: int = 0) -> None:
        self.marks = dict(marks)
        self._feed, self._number = feed, number

    @property
    def positions(self) -> dict[int, int]:
        """Next offsets by partition."""
        return {partition: offset for partition, (offset, _) in self.marks.items()}

    def finalize_checkpoint(self) -> None:
        """The runner has the whole fused stage behind it: commit."""
        if self._feed is not None:
            self._feed.done(self.marks, self._number)


class OffsetMarkCoder(Coder):  # type: ignore[misc]
    """Canonical JSON: partition, next offset, tenure. A decoded mark resumes and commits nothing."""

    def encode(self, value: OffsetMark) -> bytes:
        """Partitions in order."""
        return json.dumps([[partition, *mark] for partition, mark in sorted(value.marks.items())]).encode()

    def decode(self, encoded: bytes) -> OffsetMark:
        """The inverse."""
        return OffsetMark({partition: (offset, tenure) for partition, offset, tenure in json.loads(encoded)})

    def is_deterministic(self) -> bool:
        """Equal marks, equal bytes: Beam finds its parked reader by them."""
        return True


@dataclass(frozen=True)
class KafkaSource(UnboundedSource):  # type: ignore[misc]
    """The source as Beam pickles it. Where its feed does not live (another worker), it makes one of its own."""

    kafka: KafkaSettings
    topic: str
    group: str
    feed: str
    poll_s: float
    max_records: int

    @classmethod
    def of(cls, feed: Feed) -> KafkaSource:
        """What Beam reads to read the feed; `ReadMessages` wraps it."""
        return cls(feed.kafka, feed.topic, feed.group, feed.name, feed.poll_s, feed.max_records)

    def split(self, desired_num_splits: int, options: Any = None) -> list[UnboundedSource]:
        """One reader for all partitions: the local runner would read several one after the other, each waiting."""
        return [self]

    def create_reader(self, options: Any, checkpoint_mark: OffsetMark | None) -> UnboundedReader:
        """A reader behind the mark, or from where the group is."""
        feed = Feed.named(self.feed) or self._own_feed()
        return _Reader(feed, checkpoint_mark.marks if checkpoint_mark is not None else None)

    def get_checkpoint_mark_coder(self) -> Coder:
        """Marks as JSON."""
        return OffsetMarkCoder()

    def _own_feed(self) -> Feed:
        never = threading.Event()
        feed = Feed(self.kafka, self.topic, self.group, never, poll_s=self.poll_s, max_records=self.max_records)
        feed.name = self.feed
        return feed.__enter__()


class _Reader(UnboundedReader):  # type: ignore[misc]
    """Hands out one message at a time. Holds no connection, so Beam may drop it and make another."""

    def __init__(self, feed: Feed, marks: Marks | None) -> None:
        self._feed = feed
        self._marks = marks
        self._current: Message | None = None
        self._in_bundle = 0
        self._ended = False

    def start(self) -> bool:
        """Go to the first message."""
        self._feed.resume(self._marks)
        return self.advance()

    def advance(self) -> bool:
        """Take the next message; waits for one only while the bundle is empty, so that effects are never held back."""
        if self._feed.draining:
            self._ended = True
            return False
        message = self._feed.take(0.0 if self._in_bundle else self._feed.poll_s)
        if message is None:
            return False
        self._current = message
        self._in_bundle += 1
        return True

    def get_current(self) -> Message:
        """The message that was taken last."""
        assert self._current is not None
        return self._current

    def get_current_timestamp(self) -> Timestamp:
        """The message's time; the epoch where it has none."""
        assert self._current is not None
        return Timestamp(micros=min(max(0, self._current.timestamp_ms), MAX_TIMESTAMP_MS) * 1000)

    def get_watermark(self) -> Timestamp:
        """Nothing is windowed, so nothing is promised, until the drain ends the source."""
        return MAX_TIMESTAMP if self._ended else MIN_TIMESTAMP

    def get_checkpoint_mark(self) -> OffsetMark:
        """Beam calls this at the end of every bundle, and only then."""
        self._in_bundle = 0
        marks, number = self._feed.mark()
        return OffsetMark(marks, self._feed, number)

    def close(self) -> None:
        """Nothing to let go of: the feed holds the connection."""


class ReadMessages(beam.PTransform):  # type: ignore[misc]
    """Messages of a feed, until it drains. What follows must stay one fused stage: see the module's docstring."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._source = KafkaSource.of(feed)

    def expand(self, pbegin: Any) -> Any:
        """Read the feed's source in short bundles."""
        return pbegin | "Kafka" >> ReadFromUnboundedSource(
            self._source,
            poll_interval=0,
            max_records_per_bundle=self._source.max_records,
            max_read_time_seconds=MAX_READ_TIME_S,
        )
