"""Topics in memory, with the writing and reading sides of the real ones, for tests that need no broker.

A topic is there once something was written to it. Nothing is compacted and nothing is kept after the process.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

from schemas.errors import TopicError
from stores.clock import Clock, SystemClock
from stores.kafka_client import Headers, Message
from stores.publisher import Item, Publisher


class MemoryTopics:
    """A broker in memory: partitioned topics, committed offsets by group. Keys of one document share a partition."""

    def __init__(self, partitions: int = 1, clock: Clock | None = None) -> None:
        self.partitions = partitions
        self.clock = clock or SystemClock()
        self._logs: dict[str, list[list[Message]]] = {}
        self._committed: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        self._changed = threading.Condition()

    def publisher(self) -> MemoryPublisher:
        """A producer; what it writes can be read at once."""
        return MemoryPublisher(self)

    def reader(self, topic: str, group: str | None = None) -> MemoryReader:
        """Reads from where `group` committed, or from the beginning."""
        return MemoryReader(self, topic, group)

    def messages(self, topic: str) -> list[Message]:
        """Everything in a topic, by partition and offset."""
        with self._changed:
            return [message for log in self._logs.get(topic, []) for message in log]

    def append(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> Message:
        """Write one record."""
        with self._changed:
            logs = self._logs.setdefault(topic, [[] for _ in range(self.partitions)])
            partition = zlib.crc32(key or b"") % self.partitions
            record = Message(topic, partition, len(logs[partition]), self.clock.now_ms(), key, value, headers)
            logs[partition].append(record)
            self._changed.notify_all()
            return record

    def fetch(self, topic: str, positions: Mapping[int, int], limit: int, timeout_s: float) -> list[Message]:
        """Records from `positions` on, in order within a partition; waits for the first of them."""

        def available() -> list[Message]:
            logs = self._logs.get(topic, [[] for _ in range(self.partitions)])
            return [record for p, at in sorted(positions.items()) for record in logs[p][at:]][:limit]

        with self._changed:
            if not available():
                self._changed.wait_for(available, timeout_s)
            return available()

    def commit(self, topic: str, group: str, positions: Mapping[int, int]) -> None:
        """Remember next offsets for a group."""
        with self._changed:
            self._committed[topic, group].update(positions)

    def committed(self, topic: str, group: str) -> dict[int, int]:
        """What a group committed."""
        with self._changed:
            return dict(self._committed[topic, group])


class MemoryPublisher(Publisher):
    """`Publisher` over `MemoryTopics`; dead letters and commit records are made by the code of the real one."""

    def __init__(self, topics: MemoryTopics) -> None:
        self._topics = topics
        self._closed = False

    def publish(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]] = (),
    ) -> Message:
        """Write one record."""
        if self._closed:
            raise TopicError(f"writing to topic {topic}: the publisher is closed")
        return self._topics.append(topic, key, value, tuple(headers))

    def publish_each(self, topic: str, items: Iterable[Item]) -> Iterator[Message]:
        """Write records in order; `publish_many` is made of it."""
        for key, value, headers in items:
            yield self.publish(topic, key, value, headers)

    def close(self) -> None:
        """Nothing is written afterwards."""
        self._closed = True


class MemoryReader:
    """`PartitionReader` over `MemoryTopics`."""

    def __init__(self, topics: MemoryTopics, topic: str, group: str | None) -> None:
        self.topic, self.group = topic, group
        self._topics = topics
        self._at = dict.fromkeys(range(topics.partitions), 0) | self.committed()

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions of the topic."""
        return tuple(self._at)

    @property
    def last_contact_ms(self) -> int:
        """Now: memory always answers."""
        return self._topics.clock.now_ms()

    def seek(self, positions: Mapping[int, int]) -> None:
        """Go to an offset in each partition; one that is not named starts at its beginning."""
        self._at = {partition: positions.get(partition, 0) for partition in self._at}

    def poll(self, limit: int, timeout_s: float) -> list[Message]:
        """Up to `limit` messages; waits for the first one, no longer than `timeout_s`."""
        messages = self._topics.fetch(self.topic, self._at, limit, timeout_s)
        for message in messages:
            self._at[message.partition] = message.offset + 1
        return messages

    def position(self) -> dict[int, int]:
        """The next offset to read, by partition."""
        return dict(self._at)

    def highwater(self) -> dict[int, int | None]:
        """The end of each partition."""
        ends: dict[int, int | None] = dict.fromkeys(self._at, 0)
        for message in self._topics.messages(self.topic):
            if message.partition in ends:
                ends[message.partition] = message.offset + 1
        return ends

    def lag(self) -> int | None:
        """How many messages are left to read."""
        return sum((end or 0) - self._at[partition] for partition, end in self.highwater().items())

    def committed(self) -> dict[int, int]:
        """What the group committed."""
        return {} if self.group is None else self._topics.committed(self.topic, self.group)

    def commit(self, positions: Mapping[int, int]) -> None:
        """Commit next offsets for the group."""
        if self.group is None:
            raise TopicError(f"committing offsets of topic {self.topic}: the reader has no group")
        self._topics.commit(self.topic, self.group, positions)

    def close(self) -> None:
        """Nothing to let go of."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
