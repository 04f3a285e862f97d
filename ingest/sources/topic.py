"""A topic, from its beginning to the end that it had when the backfill began. No group, no offsets committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ingest.formats import EventReader
from ingest.sources.rows import documents_of
from schemas.errors import TopicError
from schemas.ids import DocumentKey
from schemas.settings import KafkaSettings
from stores.clock import Clock, SystemClock
from stores.topics import Message, PartitionReader, read_all

ANSWER_WITHIN_MS = 30_000


@dataclass(frozen=True)
class TopicSpan:
    """All partitions of a topic up to `ends`. Events may be of every format that the documents topic takes.

    `n_rows` counts offsets: compaction and transactions leave gaps, so there may be fewer messages.
    """

    kafka: KafkaSettings
    topic: str
    ends: Mapping[int, int]
    n_rows: int

    def read(self) -> Iterator[Message]:
        """See `Piece`."""
        for message in read_all(self.kafka, self.topic):
            if message.offset < self.ends.get(message.partition, 0):  # what came since is the stream's
                yield message

    def documents(self, events: EventReader) -> Iterator[DocumentKey]:
        """See `Piece`."""
        return documents_of(self.read(), events)


def topic_span(kafka: KafkaSettings, topic: str, clock: Clock | None = None) -> TopicSpan:
    """The topic as it is now.

    Raises:
        TopicError: it does not exist, or the broker does not answer.
    """
    clock = clock or SystemClock()
    with PartitionReader(kafka, topic) as reader:
        starts, until_ms = reader.position(), clock.now_ms() + ANSWER_WITHIN_MS
        while None in (ends := reader.highwater()).values():  # the end is known with the first fetch
            if clock.now_ms() > until_ms:
                raise TopicError(f"topic {topic}: the broker did not tell its end within {ANSWER_WITHIN_MS // 1000} s")
            reader.poll(1, 0.5)
    known = {partition: end or 0 for partition, end in ends.items()}
    return TopicSpan(kafka, topic, known, sum(max(0, end - starts[partition]) for partition, end in known.items()))
