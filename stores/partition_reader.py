"""Reading a topic: all its partitions, from the offsets that a group committed, without joining the group.

Positions are decided here, never by kafka-python: no committed offset means the beginning, and so does an offset
that is out of range, with a warning. `earliest` and `latest` would jump without a word. Partitions are assigned, so
no rebalance can take them away from a slow handler; the price is that one group has one reader at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
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
STALLED_AFTER_MS = 30_000


class PartitionReader:
    """Reads every partition of one topic for one group. Thread-safe; commits may come from another thread than polls.

    `position`, `highwater`, `lag` and `last_contact_ms` never wait, not even for a poll in another thread.

    Raises `TopicError` on opening where the broker does not answer or the topic is missing (kafka-python says
    nothing of a missing topic). While open, a broker that goes away is no error: `poll` returns nothing and
    `last_contact_ms` stops moving.
    """

    def __init__(self, kafka: KafkaSettings, topic: str, group: str | None = None, clock: Clock | None = None) -> None:
        self.topic, self.group = topic, group
        self._kafka = kafka
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._at: dict[int, int] = {}
        self._ends: dict[int, int | None] = {}
        with kafka_errors(kafka, f"opening topic {topic}"):
            self._consumer: Any = KafkaConsumer(
                **connection(kafka),
                group_id=group,
                enable_auto_commit=False,
                auto_offset_reset="none",
                isolation_level="read_committed",  # what a transaction took back was never said
                allow_auto_create_topics=False,
            )
        try:
            self._partitions = self._find_partitions()
            self._consumer.assign([TopicPartition(topic, partition) for partition in self._partitions])
            self._ends = dict.fromkeys(self._partitions)
            self.seek(self.committed())
        except BaseException:
            self._consumer.close()
            raise
        self._last_contact_ms = self._clock.now_ms()

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions of the topic when it was opened."""
        return self._partitions

    @property
    def last_contact_ms(self) -> int:
        """When the broker last answered, ms since the epoch."""
        return self._last_contact_ms

    def seek(self, positions: Mapping[int, int]) -> None:
        """Go to an offset in each partition; a partition that is not named starts at its beginning."""
        with self._lock, self._errors("seeking in"):
            start = self._beginnings([p for p in self._partitions if p not in positions])
            for partition in self._partitions:
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
            return [_message(record) for records in polled.values() for record in records]

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
        return sum(max(0, (end or 0) - at[partition]) for partition, end in ends.items())

    def committed(self) -> dict[int, int]:
        """What the group committed; partitions without a commit are absent."""
        if self.group is None:
            return {}
        with self._lock, self._errors("reading the committed offsets of"):
            offsets = {p: self._consumer.committed(self._tp(p), timeout_ms=ASK_TIMEOUT_MS) for p in self._partitions}
        return {partition: offset for partition, offset in offsets.items() if offset is not None}

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
        tps = [self._tp(partition) for partition in self._partitions]
        at = {tp.partition: self._consumer.position(tp, timeout_ms=PROBE_TIMEOUT_MS) for tp in tps}
        # no position while the client checks one after a change of leader
        self._at = self._at | {partition: offset for partition, offset in at.items() if offset is not None}
        self._ends = {tp.partition: self._consumer.highwater(tp) for tp in tps}

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
            self._to_beginning([tp.partition for tp in error.args[0]])
            return {}
        if polled:
            self._last_contact_ms = self._clock.now_ms()
        elif self._clock.now_ms() - self._last_contact_ms >= PROBE_AFTER_MS:
            self._probe()
        return polled

    def _probe(self) -> None:
        """Ask the broker something, so that silence can be told from an empty topic; look for lost positions too."""
        self._consumer.beginning_offsets([self._tp(p) for p in self._partitions], timeout_ms=PROBE_TIMEOUT_MS)
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


def lag(kafka: KafkaSettings, group: str, topic: str) -> int:
    """How far the group's committed offsets are behind the end of the topic, in offsets (compaction gaps count)."""
    with PartitionReader(kafka, topic, group) as reader:
        committed = reader.position()
        ends = _ends(reader)
    return sum(max(0, ends[partition] - committed[partition]) for partition in committed)


def read_all(kafka: KafkaSettings, topic: str) -> Iterator[Message]:
    """Every message of the topic from its beginning to the end that it had when reading began."""
    with PartitionReader(kafka, topic) as reader:
        ends: dict[int, int] = {}
        quiet_since = reader.last_contact_ms
        while True:
            messages = reader.poll(500, 0.5)
            for partition, end in reader.highwater().items():
                if end is not None:
                    ends.setdefault(partition, end)
            yield from (message for message in messages if message.offset < ends[message.partition])
            if len(ends) == len(reader.partitions) and all(at >= ends[p] for p, at in reader.position().items()):
                return
            quiet_since = _still_moving(reader, bool(messages), quiet_since)


def _ends(reader: PartitionReader) -> dict[int, int]:
    quiet_since = reader.last_contact_ms
    while True:
        messages = reader.poll(1, 0.5)
        ends = {partition: end for partition, end in reader.highwater().items() if end is not None}
        if len(ends) == len(reader.partitions):
            return ends
        quiet_since = _still_moving(reader, bool(messages), quiet_since)


def _still_moving(reader: PartitionReader, moved: bool, quiet_since_ms: int) -> int:
    now_ms = SystemClock().now_ms()
    if moved:
        return now_ms
    if now_ms - quiet_since_ms > STALLED_AFTER_MS:
        raise TopicError(
            f"reading topic {reader.topic}: nothing came for {STALLED_AFTER_MS // 1000} s; is the broker up?"
        )
    return quiet_since_ms


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
