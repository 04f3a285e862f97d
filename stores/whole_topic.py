"""Questions about a topic as a whole: how far a group is behind, and everything that is in it."""

from __future__ import annotations

from collections.abc import Iterator

from schemas.errors import TopicError
from schemas.settings import KafkaSettings
from stores.clock import SystemClock
from stores.kafka_client import Message
from stores.partition_reader import PartitionReader

STALLED_AFTER_MS = 30_000


def lag(kafka: KafkaSettings, group: str, topic: str) -> int:
    """How far the group's committed offsets are behind the end of the topic, in offsets (compaction gaps count)."""
    with PartitionReader(kafka, topic, group) as reader:
        committed = reader.position()
        ends = end_offsets(reader)
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


def end_offsets(reader: PartitionReader) -> dict[int, int]:
    """The end of each partition, as a fetch reports it; the reader has moved on afterwards."""
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
