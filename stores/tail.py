"""Reading the commits topic from its end on, beside everybody else: without a group, and nothing is committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from schemas.settings import KafkaSettings
from stores.kafka_client import Message
from stores.partition_reader import PartitionReader
from stores.whole_topic import end_offsets


class Tail(Protocol):
    """What follows a topic. A broker that is away is no error: `last_contact_ms` stops moving."""

    @property
    def last_contact_ms(self) -> int:
        """When the broker last answered, ms since the epoch."""
        ...

    def poll(self, limit: int, timeout_s: float) -> list[Message]:
        """Up to `limit` messages; waits for the first one, no longer than `timeout_s`."""
        ...

    def position(self) -> dict[int, int]:
        """The next offset to read, by partition."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


OpenTail = Callable[[Mapping[int, int] | None], Tail]


def open_tail(kafka: KafkaSettings, topic: str, positions: Mapping[int, int] | None = None) -> PartitionReader:
    """Follow a topic from `positions` on, a partition that is new since from its beginning; None: from the end.

    Opened again now and then, it sees partitions that were added.

    Raises:
        TopicError: the broker does not answer, or there is no such topic.
    """
    reader = PartitionReader(kafka, topic)
    try:
        reader.seek(end_offsets(reader) if positions is None else positions)
    except BaseException:
        reader.close()
        raise
    return reader
