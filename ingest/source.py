"""The documents and commits topics as a Beam source, offsets committed after the effects.

Two halves, because Beam pickles sources, parks and rebuilds readers at will, and finalizes after it closed them:

- `Feed` lives in the process that runs the pipeline: it holds the connection, the health and the drain.
- `KafkaSource` and its reader are what Beam handles: cheap shells that find the feed by name.

A bundle ends as soon as the topic has nothing more to give, after `max_records` or 0.3 s; the runner then finalizes it,
which commits the offsets of what its fused stage has done. A stage border between source and sink (Reshuffle,
GroupByKey, a window, a timer) would finalize before the effects and lose data: keep source to sink one fused stage.

Only where the run resumes is decided by offsets: a crash before the commit reads the same messages again.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import apache_beam as beam
from apache_beam.coders import Coder
from apache_beam.io.unbounded_source import CheckpointMark, ReadFromUnboundedSource, UnboundedReader, UnboundedSource
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP, Timestamp

from schemas.errors import TopicError
from schemas.settings import KafkaSettings
from stores.clock import Clock, SystemClock
from stores.topics import Message, PartitionReader

log = logging.getLogger(__name__)

MAX_READ_TIME_S = 0.3  # Beam's default of 10 s would hold back the effects of a trickle for as long
COMMIT_RETRY_MS = 1_000
MAX_TIMESTAMP_MS = 253_402_300_799_000  # the end of the year 9999; what is later is no timestamp

_feeds: dict[str, Feed] = {}
_feed_numbers = itertools.count(1)


@dataclass(frozen=True)
class FeedHealth:
    """What a feed knows of itself; ages in seconds, None where it never happened.

    `uncommitted` counts offsets whose effects are done and whose commit the broker has not confirmed; it and
    `contact_age_s` grow while the broker is away, which reading itself never reports. `lag` is in offsets.
    `caught_up` says that everything which was in the topic when it was opened is done and committed; once true it
    stays true.
    """

    topic: str
    group: str
    contact_age_s: float
    record_age_s: float | None
    commit_age_s: float | None
    uncommitted: int
    lag: int | None
    messages: int
    bundles: int
    caught_up: bool


class Feed:
    """One topic read for one group, in this process, by one pipeline at a time.

    Use it as a context manager around all runs of the pipeline; entering opens the topic and raises `TopicError`
    where the broker does not answer or the topic is missing. After that a broker that is away is waited for.

    Args:
        kafka: the broker.
        topic: what to read, all partitions.
        group: whose offsets to start from and to commit; no subscribed consumer may use it.
        stop: set it (from a SIGTERM handler, say) and the source ends, the runner finishes what it has.
        poll_s: how long an idle read waits for a message.
        max_records: messages per bundle at most.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        topic: str,
        group: str,
        stop: threading.Event,
        *,
        poll_s: float = 0.25,
        max_records: int = 500,
        clock: Clock | None = None,
    ) -> None:
        self.kafka, self.topic, self.group, self.stop = kafka, topic, group, stop
        self.poll_s, self.max_records = poll_s, max_records
        self.name = f"{topic}/{group}/{next(_feed_numbers)}"
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._reader: PartitionReader | None = None
        self._fresh = False  # nothing was read through this connection yet
        self._durable: dict[int, int] = {}  # effects are done below these offsets
        self._committed: dict[int, int] = {}  # the broker confirmed these
        self._marks = itertools.count(1)
        self._last_mark = 0
        self._ends_at_start: dict[int, int] = {}
        self._caught_up = False
        self._last_try_ms = 0
        self._last_record_ms: int | None = None
        self._last_commit_ms: int | None = None
        self._messages = self._bundles = 0
        self._round_end: tuple[float, float] = (float("inf"), float("inf"))  # bundles, ms

    def __enter__(self) -> Self:
        with self._lock:
            self._reader = PartitionReader(self.kafka, self.topic, self.group, self._clock)
            self._committed = self._reader.position()
            self._durable = dict(self._committed)
            self._fresh = True
            _feeds[self.name] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            _feeds.pop(self.name, None)
            self._commit()
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def source(self) -> KafkaSource:
        """What Beam reads; `ReadMessages` wraps it."""
        return KafkaSource(self.kafka, self.topic, self.group, self.name, self.poll_s, self.max_records)

    def start_round(self, max_bundles: int, max_s: float) -> None:
        """Let the source also end after so many bundles or seconds from now: the local runner leaks by the bundle."""
        self._round_end = (self._bundles + max_bundles, self._clock.now_ms() + max_s * 1000)

    @property
    def draining(self) -> bool:
        """Whether the source is to end: the stop event, or the end of the round."""
        bundles, at_ms = self._round_end
        return self.stop.is_set() or self._bundles >= bundles or self._clock.now_ms() >= at_ms

    def resume(self, positions: Mapping[int, int] | None) -> None:
        """Go where a mark says; without one (a new run) to where effects are done, on a new connection.

        The new connection sees partitions that were added to the topic. If the broker is away the old one stays.
        """
        with self._lock:
            if positions is None and not self._fresh:
                try:
                    renewed = PartitionReader(self.kafka, self.topic, self.group, self._clock)
                except TopicError as error:
                    log.warning("%s; going on with the old connection", error)
                else:
                    self._open.close()
                    self._reader = renewed
            self._fresh = False
            start = self._open.position() | self._durable if positions is None else dict(positions)
            self._open.seek(start)

    def take(self, timeout_s: float) -> list[Message]:
        """The next messages, or none after `timeout_s`; never raises for a broker that is away."""
        with self._lock:
            if self._clock.now_ms() - self._last_try_ms >= COMMIT_RETRY_MS:
                self._commit()
            messages = self._open.poll(self.max_records, timeout_s)
            for partition, end in self._open.highwater().items():
                if end is not None:
                    self._ends_at_start.setdefault(partition, end)
            if messages:
                self._last_record_ms = self._clock.now_ms()
                self._messages += len(messages)
            return messages

    def mark(self, held_back: Mapping[int, int]) -> OffsetMark:
        """The end of a bundle: the position, less what the reader took and did not emit (first offset by partition)."""
        with self._lock:
            self._bundles += 1
            return OffsetMark(self._open.position() | dict(held_back), self, next(self._marks))

    def done(self, positions: Mapping[int, int], number: int) -> None:
        """The effects of everything below `positions` are durable: commit. A failed commit is tried again later."""
        with self._lock:
            if number <= self._last_mark:
                return
            self._last_mark = number
            self._durable = dict(positions)
            self._commit()

    def health(self) -> FeedHealth:
        """A snapshot for metrics and readiness; never waits for the broker."""
        reader, now_ms = self._reader, self._clock.now_ms()
        durable, committed = dict(self._durable), dict(self._committed)
        ends = dict(self._ends_at_start)
        if reader is not None and len(ends) == len(reader.partitions):
            self._caught_up = self._caught_up or all(committed.get(p, 0) >= end for p, end in ends.items())
        return FeedHealth(
            topic=self.topic,
            group=self.group,
            contact_age_s=(now_ms - reader.last_contact_ms) / 1000 if reader else float("inf"),
            record_age_s=_age_s(now_ms, self._last_record_ms),
            commit_age_s=_age_s(now_ms, self._last_commit_ms),
            uncommitted=sum(max(0, offset - committed.get(p, 0)) for p, offset in durable.items()),
            lag=reader.lag() if reader else None,
            messages=self._messages,
            bundles=self._bundles,
            caught_up=self._caught_up,
        )

    @property
    def _open(self) -> PartitionReader:
        if self._reader is None:
            raise TopicError(f"the feed of topic {self.topic} is closed; enter it before running the pipeline")
        return self._reader

    def _commit(self) -> None:
        changed = {p: offset for p, offset in self._durable.items() if self._committed.get(p) != offset}
        if not changed or self._reader is None:
            return
        self._last_try_ms = self._clock.now_ms()
        try:
            self._reader.commit(changed)
        except TopicError as error:
            log.warning("offsets are not committed yet: %s", error)
            return
        self._committed |= changed
        self._last_commit_ms = self._clock.now_ms()


class OffsetMark(CheckpointMark):  # type: ignore[misc] # Beam has no types
    """Next offsets by partition. The mark of a bundle that just ended knows its feed, to tell it when it is done."""

    def __init__(self, positions: Mapping[int, int], feed: Feed | None = None, number: int = 0) -> None:
        self.positions = dict(positions)
        self._feed, self._number = feed, number

    def finalize_checkpoint(self) -> None:
        """The runner has the whole fused stage behind it: commit."""
        if self._feed is not None:
            self._feed.done(self.positions, self._number)


class OffsetMarkCoder(Coder):  # type: ignore[misc]
    """Canonical JSON of the positions; a decoded mark resumes and commits nothing."""

    def encode(self, value: OffsetMark) -> bytes:
        """Partitions in order."""
        return json.dumps(sorted(value.positions.items())).encode()

    def decode(self, encoded: bytes) -> OffsetMark:
        """The inverse."""
        return OffsetMark(dict(json.loads(encoded)))

    def is_deterministic(self) -> bool:
        """Equal positions, equal bytes: Beam finds its parked reader by them."""
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

    def split(self, desired_num_splits: int, options: Any = None) -> list[UnboundedSource]:
        """One reader for all partitions: the local runner would read several one after the other, each waiting."""
        return [self]

    def create_reader(self, options: Any, checkpoint_mark: OffsetMark | None) -> UnboundedReader:
        """A reader behind the mark, or from where the group is."""
        feed = _feeds.get(self.feed) or self._own_feed()
        return _Reader(feed, checkpoint_mark.positions if checkpoint_mark is not None else None)

    def get_checkpoint_mark_coder(self) -> Coder:
        """Positions as JSON."""
        return OffsetMarkCoder()

    def _own_feed(self) -> Feed:
        never = threading.Event()
        feed = Feed(self.kafka, self.topic, self.group, never, poll_s=self.poll_s, max_records=self.max_records)
        feed.name = self.feed
        return feed.__enter__()


class _Reader(UnboundedReader):  # type: ignore[misc]
    """Hands out one message at a time. Holds no connection, so Beam may drop it and make another."""

    def __init__(self, feed: Feed, positions: Mapping[int, int] | None) -> None:
        self._feed = feed
        self._positions = positions
        self._taken: deque[Message] = deque()
        self._current: Message | None = None
        self._in_bundle = 0
        self._ended = False

    def start(self) -> bool:
        """Go to the first message."""
        self._feed.resume(self._positions)
        return self.advance()

    def advance(self) -> bool:
        """Take the next message; waits for one only while the bundle is empty, so that effects are never held back."""
        if self._feed.draining:
            self._ended = True
            return False
        if not self._taken:
            self._taken.extend(self._feed.take(0.0 if self._in_bundle else self._feed.poll_s))
        if not self._taken:
            return False
        self._current = self._taken.popleft()
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
        held_back: dict[int, int] = {}
        for message in self._taken:
            held_back.setdefault(message.partition, message.offset)
        return self._feed.mark(held_back)

    def close(self) -> None:
        """Nothing to let go of: the feed holds the connection."""


class ReadMessages(beam.PTransform):  # type: ignore[misc]
    """Messages of a feed, until it drains. What follows must stay one fused stage: see the module's docstring."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._source = feed.source()

    def expand(self, pbegin: Any) -> Any:
        """Read the feed's source in short bundles."""
        return pbegin | "Kafka" >> ReadFromUnboundedSource(
            self._source,
            poll_interval=0,
            max_records_per_bundle=self._source.max_records,
            max_read_time_seconds=MAX_READ_TIME_S,
        )


def _age_s(now_ms: int, then_ms: int | None) -> float | None:
    return None if then_ms is None else (now_ms - then_ms) / 1000
