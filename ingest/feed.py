"""One topic as one pipeline of this process reads it: the connection, what is done of it, the health and the drain.

Beam parks, drops and rebuilds readers at will (`ingest.source`); so what has to last is here.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ingest.offsets import Marks, Offsets
from schemas.errors import TopicError
from schemas.settings import KafkaSettings
from stores.clock import Clock, SystemClock
from stores.topics import Message, PartitionReader, open_reader

log = logging.getLogger(__name__)

COMMIT_RETRY_MS = 1_000

OpenReader = Callable[[KafkaSettings, str, str, Clock], PartitionReader]

_feeds: dict[str, Feed] = {}
_feed_numbers = itertools.count(1)


@dataclass(frozen=True)
class FeedHealth:
    """What a feed knows of itself; ages in seconds, None where it never happened. All of it of its own partitions.

    `partitions` is None while the group has not answered; 0 where there are more processes than partitions.
    `uncommitted` counts offsets whose effects are done and whose commit the broker has not confirmed; it and
    `contact_age_s` grow while the broker is away, which reading itself never reports. `lag` is in offsets.
    `caught_up` says that everything which was in the partitions when they came is done and committed; once true it
    stays true.
    """

    topic: str
    group: str
    partitions: int | None
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
    where the broker does not answer or the topic is missing. After that a broker that is away is waited for. Leaving
    commits what is done and gives the partitions to the others of the group.

    Args:
        kafka: the broker.
        topic: what to read: the partitions that the group gives us.
        group: whose offsets to start from and to commit.
        stop: set it (from a SIGTERM handler, say) and the source ends, the runner finishes what it has.
        poll_s: how long an idle read waits for a message.
        max_records: messages per bundle at most.
        reader: opens the topic.
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
        reader: OpenReader = open_reader,
    ) -> None:
        self.kafka, self.topic, self.group, self.stop = kafka, topic, group, stop
        self.poll_s, self.max_records = poll_s, max_records
        self.name = f"{topic}/{group}/{next(_feed_numbers)}"
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._open_reader = reader
        self._reader: PartitionReader | None = None
        self._fresh = False  # nothing was read through this connection yet
        self._offsets = Offsets()
        self._taken: deque[Message] = deque()  # fetched, and not handed to the pipeline
        self._marks = itertools.count(1)
        self._caught_up = False
        self._last_try_ms = 0
        self._last_record_ms: int | None = None
        self._last_commit_ms: int | None = None
        self._messages = self._bundles = 0
        self._round_end: tuple[float, float] = (float("inf"), float("inf"))  # bundles, ms

    def __enter__(self) -> Self:
        with self._lock:
            self._reader = self._open_reader(self.kafka, self.topic, self.group, self._clock)
            self._fresh = True
            self._settle()
            _feeds[self.name] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            _feeds.pop(self.name, None)
            self._commit()
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    @staticmethod
    def named(name: str) -> Feed | None:
        """The feed of this process with that name, while it is open."""
        return _feeds.get(name)

    def start_round(self, max_bundles: int, max_s: float) -> None:
        """Let the source also end after so many bundles or seconds from now: the local runner leaks by the bundle."""
        self._round_end = (self._bundles + max_bundles, self._clock.now_ms() + max_s * 1000)

    @property
    def draining(self) -> bool:
        """Whether the source is to end: the stop event, or the end of the round."""
        bundles, at_ms = self._round_end
        return self.stop.is_set() or self._bundles >= bundles or self._clock.now_ms() >= at_ms

    def resume(self, marks: Marks | None) -> None:
        """Go where a mark says; without one (a new run) to where effects are done.

        A reader that is alone then gets a new connection, which sees partitions that were added to the topic (a group
        sees them by itself). If the broker is away the old one stays.
        """
        with self._lock:
            if marks is None and not self._fresh and self._open.alone:
                self._renew()
            self._fresh = False
            with self._open.steady():
                self._settle()
                self._taken.clear()
                self._open.seek(self._offsets.go_back(marks))

    def take(self, timeout_s: float) -> Message | None:
        """The next message, or none after `timeout_s`; never raises for a broker that is away."""
        with self._lock:
            self._settle()
            if not self._taken:
                self._fetch(timeout_s)
            if not self._taken:
                return None
            message = self._taken.popleft()
            self._offsets.read(message)
            return message

    def mark(self) -> tuple[Marks, int]:
        """The end of a bundle: where the pipeline stands, and the number of the bundle."""
        with self._lock, self._open.steady():
            self._settle()
            self._bundles += 1
            at = self._open.position()
            for message in reversed(self._taken):
                at[message.partition] = message.offset
            return self._offsets.mark(at), next(self._marks)

    def done(self, marks: Marks, number: int) -> None:
        """The effects of everything below `marks` are durable: commit. A failed commit is tried again later."""
        with self._lock:
            self._settle()
            self._offsets.done(marks, number)
            self._commit()

    def health(self) -> FeedHealth:
        """A snapshot for metrics and readiness; never waits for the broker."""
        reader, now_ms = self._reader, self._clock.now_ms()
        held = len(reader.held) if reader is not None and reader.joined else None
        caught_up = held is not None and self._offsets.caught_up
        self._caught_up = self._caught_up or (caught_up and held != 0)
        return FeedHealth(
            topic=self.topic,
            group=self.group,
            partitions=held,
            contact_age_s=(now_ms - reader.last_contact_ms) / 1000 if reader else float("inf"),
            record_age_s=_age_s(now_ms, self._last_record_ms),
            commit_age_s=_age_s(now_ms, self._last_commit_ms),
            uncommitted=self._offsets.uncommitted,
            lag=reader.lag() if reader else None,
            messages=self._messages,
            bundles=self._bundles,
            caught_up=self._caught_up or caught_up,
        )

    @property
    def _open(self) -> PartitionReader:
        if self._reader is None:
            raise TopicError(f"the feed of topic {self.topic} is closed; enter it before running the pipeline")
        return self._reader

    def _renew(self) -> None:
        try:
            renewed = self._open_reader(self.kafka, self.topic, self.group, self._clock)
        except TopicError as error:
            log.warning("%s; going on with the old connection", error)
        else:
            self._open.close()
            self._reader = renewed

    def _fetch(self, timeout_s: float) -> None:
        if self._clock.now_ms() - self._last_try_ms >= COMMIT_RETRY_MS:
            self._commit()
        with self._open.steady():
            if not self._offsets.busy(self._open.leaving):
                self._open.release()
            messages = self._open.poll(self.max_records, timeout_s)
            self._settle()
            self._taken.extend(messages)
            self._offsets.see_ends(self._open.highwater())
        if messages:
            self._last_record_ms = self._clock.now_ms()
            self._messages += len(messages)

    def _settle(self) -> None:
        """Partitions that went take along what was fetched of them: their next reader fetches it again."""
        if self._reader is None:
            return
        with self._reader.steady():
            leaving = self._reader.leaving
            gone = self._offsets.settle(leaving | self._reader.held) | leaving.keys()
            if gone:
                self._taken = deque(message for message in self._taken if message.partition not in gone)

    def _commit(self) -> None:
        if self._reader is None:
            return
        with self._reader.steady():
            self._settle()
            changed = self._offsets.to_commit()
            if not changed:
                return
            self._last_try_ms = self._clock.now_ms()
            try:
                self._reader.commit(changed)
            except TopicError as error:
                log.warning("offsets are not committed yet: %s", error)
                return
            self._offsets.confirm(changed)
            self._last_commit_ms = self._clock.now_ms()


def _age_s(now_ms: int, then_ms: int | None) -> float | None:
    return None if then_ms is None else (now_ms - then_ms) / 1000
