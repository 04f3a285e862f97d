"""Reading a topic: all its partitions, from the offsets that a group committed, without joining the group.

Positions are decided here, never by kafka-python: no committed offset means the beginning, and so does an offset
that is out of range, with a warning. `earliest` and `latest` would jump without a word. Partitions are assigned, so
none is ever taken away; the price is that one group has one reader at a time. Readers that share a group are in
`stores.group_reader`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kafka import KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka.errors import OffsetOutOfRangeError, RetriableError

from schemas.errors import TopicError
from schemas.settings import KafkaSettings
from stores.clock import Clock, SystemClock
from stores.kafka_client import Message, connection, kafka_errors

log = logging.getLogger(__name__)

COMMIT_TIMEOUT_MS = 5_000  # kafka-python's own default would block a pipeline for 30 s
ASK_TIMEOUT_MS = 10_000
# A poll that returns nothing looks the same with and without a broker; so, after this long, we ask.
PROBE_AFTER_MS = 2_000
PROBE_TIMEOUT_MS = 1_000


@dataclass(frozen=True)
class Tenure:
    """A time for which a reader has a partition: `number` tells it from earlier ones, `start` is its first offset."""

    number: int
    start: int


class PartitionReader:
    """Reads every partition of one topic for one group. Thread-safe; commits may come from another thread than polls.

    `held`, `position`, `highwater`, `lag` and `last_contact_ms` never wait, not even for a poll in another thread.

    `alone` says that no other process may read for this group.

    Raises `TopicError` on opening where the broker does not answer or the topic is missing (kafka-python says
    nothing of a missing topic). While open, a broker that goes away is no error: `poll` returns nothing and
    `last_contact_ms` stops moving.
    """

    alone = True

    def __init__(self, kafka: KafkaSettings, topic: str, group: str | None = None, clock: Clock | None = None) -> None:
        self.topic, self.group = topic, group
        self._kafka = kafka
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._held: dict[int, Tenure] = {}
        self._at: dict[int, int] = {}
        self._ends: dict[int, int | None] = {}
        self._last_contact_ms = self._clock.now_ms()
        with kafka_errors(kafka, f"opening topic {topic}"):
            self._consumer: Any = KafkaConsumer(
                **connection(kafka),
                group_id=group,
                enable_auto_commit=False,
                auto_offset_reset="none",
                isolation_level="read_committed",  # what a transaction took back was never said
                allow_auto_create_topics=False,
                **self._membership(),
            )
        try:
            self._start(self._find_partitions())
        except BaseException:
            self._consumer.close()
            raise
        self._last_contact_ms = self._clock.now_ms()

    def _membership(self) -> dict[str, Any]:
        """Further arguments for the consumer."""
        return {}

    def _start(self, partitions: tuple[int, ...]) -> None:
        """Take the partitions that are to be read, out of all of the topic's."""
        self._consumer.assign([self._tp(partition) for partition in partitions])
        self._ends = dict.fromkeys(partitions)
        self._at = dict.fromkeys(partitions, 0)
        self.seek(self.committed())
        self._held = {partition: Tenure(0, offset) for partition, offset in self._at.items()}

    @property
    def joined(self) -> bool:
        """Whether it is known which partitions this reader has; it may be none."""
        return True

    @property
    def held(self) -> dict[int, Tenure]:
        """The partitions that this reader has now. Here: those of the topic when it was opened, for good."""
        return self._held

    @property
    def leaving(self) -> dict[int, Tenure]:
        """Partitions that go to another reader and of which offsets may still be committed. Here: none."""
        return {}

    @property
    def partitions(self) -> tuple[int, ...]:
        """The numbers of the partitions held."""
        return tuple(sorted(self._at))

    def release(self) -> None:
        """Nothing more will be committed of partitions that are leaving."""

    @contextmanager
    def steady(self) -> Iterator[None]:
        """No partition comes or goes while the block runs."""
        with self._lock:
            yield

    @property
    def last_contact_ms(self) -> int:
        """When the broker last answered, ms since the epoch."""
        return self._last_contact_ms

    def seek(self, positions: Mapping[int, int]) -> None:
        """Go to an offset in each partition held; one that is not named starts at its beginning."""
        with self._lock, self._errors("seeking in"):
            start = self._beginnings([p for p in self._at if p not in positions])
            for partition in list(self._at):
                self._go(partition, positions.get(partition, start.get(partition, 0)))

    def poll(self, limit: int, timeout_s: float) -> list[Message]:
        """Up to `limit` messages, in order within a partition; waits for the first one, no longer than `timeout_s`."""
        polled: dict[Any, list[Any]] = {}
        with self._lock, self._errors("reading"):
            try:
                polled = self._poll(limit, int(timeout_s * 1000))
                self._note()
            except RetriableError as error:  # a broker that is away
                log.debug("reading topic %s: %r", self.topic, error)
            return [
                _message(record) for tp, records in polled.items() if tp.partition in self._at for record in records
            ]

    def position(self) -> dict[int, int]:
        """The next offset to read, by partition, after the last poll or seek. It passes gaps that compaction leaves."""
        return dict(self._at)

    def highwater(self) -> dict[int, int | None]:
        """The end of each partition as the last fetch reported it; None before the first fetch.

        Preferred to asking for end offsets, which the embedded broker answers wrongly after batches.
        """
        return dict(self._ends)

    def lag(self) -> int | None:
        """How many offsets are left to read; None before every partition was fetched once. Gaps count."""
        ends, at = self._ends, self._at
        if any(end is None for end in ends.values()):
            return None
        return sum(max(0, (end or 0) - at[partition]) for partition, end in ends.items() if partition in at)

    def committed(self) -> dict[int, int]:
        """What the group committed; partitions without a commit are absent."""
        if self.group is None:
            return {}
        with self._lock, self._errors("reading the committed offsets of"):
            return self._committed(self._at)

    def commit(self, positions: Mapping[int, int]) -> None:
        """Commit next offsets for the group; raises `TopicError` if the broker does not confirm within 5 s."""
        if not positions:
            return
        with self._lock, self._errors("committing offsets of"):
            offsets = {self._tp(p): OffsetAndMetadata(offset, "", -1) for p, offset in positions.items()}
            self._consumer.commit(offsets, timeout_ms=COMMIT_TIMEOUT_MS)
            self._last_contact_ms = self._clock.now_ms()

    def close(self) -> None:
        """Let go of the connections; commits nothing. Twice is harmless."""
        with self._lock:
            self._consumer.close(autocommit=False, timeout_ms=1_000)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _go(self, partition: int, offset: int) -> None:
        self._consumer.seek(self._tp(partition), offset)
        self._at = self._at | {partition: offset}

    def _note(self) -> None:
        """Keep position and ends where they can be read while a poll waits: whole new dicts, never changed ones."""
        tps = [self._tp(partition) for partition in self._at]
        at = {tp.partition: self._consumer.position(tp, timeout_ms=PROBE_TIMEOUT_MS) for tp in tps}
        # no position while the client checks one after a change of leader
        self._at = self._at | {partition: offset for partition, offset in at.items() if offset is not None}
        ends = {tp.partition: self._consumer.highwater(tp) for tp in tps}
        self._ends = {p: self._ends.get(p) if end is None else end for p, end in ends.items()}

    def _tp(self, partition: int) -> Any:
        return TopicPartition(self.topic, partition)

    def _errors(self, doing: str) -> AbstractContextManager[None]:
        return kafka_errors(self._kafka, f"{doing} topic {self.topic}")

    def _find_partitions(self) -> tuple[int, ...]:
        with self._errors("looking for"):
            found = self._consumer.partitions_for_topic(self.topic)
        if not found:
            raise TopicError(
                f"topic {self.topic} does not exist on {self._kafka.bootstrap}, or may not be read; "
                "create it, or let kvquilt do so at start"
            )
        return tuple(sorted(found))

    def _committed(self, partitions: Iterable[int]) -> dict[int, int]:
        offsets = {p: self._consumer.committed(self._tp(p), timeout_ms=ASK_TIMEOUT_MS) for p in partitions}
        return {partition: offset for partition, offset in offsets.items() if offset is not None}

    def _beginnings(self, partitions: list[int]) -> dict[int, int]:
        if not partitions:
            return {}
        asked = [self._tp(partition) for partition in partitions]
        found = self._consumer.beginning_offsets(asked, timeout_ms=ASK_TIMEOUT_MS)
        return {tp.partition: offset for tp, offset in found.items()}

    def _poll(self, limit: int, timeout_ms: int) -> dict[Any, list[Any]]:
        try:
            polled: dict[Any, list[Any]] = self._consumer.poll(timeout_ms=timeout_ms, max_records=limit)
        except OffsetOutOfRangeError as error:
            self._settle()
            self._to_beginning([tp.partition for tp in error.args[0] if tp.partition in self._at])
            return {}
        self._settle()
        if polled:
            self._last_contact_ms = self._clock.now_ms()
        elif self._clock.now_ms() - self._last_contact_ms >= PROBE_AFTER_MS:
            self._probe()
        return polled

    def _settle(self) -> None:
        """Take over what the poll brought beside records: partitions that come or go."""

    def _probe(self) -> None:
        """Ask the broker something, so that silence can be told from an empty topic; look for lost positions too."""
        asked = [self._tp(p) for p in self._at] or [self._tp(0)]  # one may have none, and still ask
        self._consumer.beginning_offsets(asked, timeout_ms=PROBE_TIMEOUT_MS)
        self._last_contact_ms = self._clock.now_ms()
        # the embedded broker never says that an offset is out of range
        self._note()
        self._to_beginning(
            [p for p, at in self._at.items() if at > (at if self._ends[p] is None else self._ends[p] or 0)]
        )

    def _to_beginning(self, partitions: list[int]) -> None:
        """The topic lost what we stood at (retention, or it was made anew): read what there is.

        Reading twice is harmless, the effects are idempotent; skipping is not.
        """
        for partition, start in self._beginnings(partitions).items():
            log.warning(
                "topic %s partition %d: offset %d is out of range; reading from its beginning, offset %d",
                self.topic,
                partition,
                self._at[partition],
                start,
            )
            self._go(partition, start)


def _message(record: Any) -> Message:
    return Message(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        record.key,
        record.value,
        tuple(record.headers),
    )
