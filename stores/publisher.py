"""Writing to topics: one idempotent producer that waits for the broker's answer; dead letters and commit records."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from kafka import KafkaProducer, Serializer
from kafka.errors import InvalidRecordError, KafkaError, MessageSizeTooLargeError, RetriableError

from schemas.errors import InputError
from schemas.head import CommitRecord
from schemas.settings import KafkaSettings
from stores.kafka_client import MAX_DEAD_LETTER_BYTES, Headers, Message, connection, kafka_errors

Item = tuple[bytes | None, bytes | None, Iterable[tuple[str, bytes | None]]]

DELIVERY_TIMEOUT_S = 30.0
# Bounds on what publish_many has on its way at once: enough to fill batches, little enough to keep memory flat.
MAX_IN_FLIGHT = 1_000
MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024

ERROR_HEADERS = "kvquilt.error."
MAX_ERROR_MESSAGE_BYTES = 4_096


_NOTHING = b"\x00kvquilt: a record with neither key nor value"


class _Values(Serializer):  # type: ignore[misc] # kafka-python has no types
    """Puts None back for `_NOTHING`.

    The protocol has records with neither key nor value, kafka-python's `send` refuses them, and a dead letter must
    carry one as it was.
    """

    def serialize(self, topic: str, headers: object, data: bytes | None) -> bytes | None:
        """The value as it goes to the broker."""
        return None if data is _NOTHING else data


class Publisher:
    """A producer with acks from all replicas, idempotent. Thread-safe; made on first use, closed by `close`.

    Raises `TopicError` where the broker cannot be reached or refuses (trying again may help), `InputError` for a
    record that is larger than the topic takes.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._config = connection(kafka)
        self._producer: Any = None
        self._lock = threading.Lock()

    def publish(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]] = (),
    ) -> Message:
        """Write one record and wait until the broker has it; the answer says where it is."""
        with self._errors(topic, [key]):
            kept = tuple(headers)
            return _answer(self._send(topic, key, value, kept), key, value, kept)

    def publish_each(self, topic: str, items: Iterable[Item]) -> Iterator[Message]:
        """Write records in order, many on their way at once; yields the broker's answers, in the same order.

        Values and keys are kept in the answers for as long as the caller keeps those.
        """
        waiting: deque[tuple[Any, bytes | None, bytes | None, Headers]] = deque()
        nbytes = 0
        keyless: list[None] = []
        with self._errors(topic, keyless):
            for key, value, headers in items:
                if key is None:
                    keyless.append(None)
                kept = tuple(headers)
                waiting.append((self._send(topic, key, value, kept), key, value, kept))
                nbytes += len(key or b"") + len(value or b"")
                while len(waiting) > MAX_IN_FLIGHT or (nbytes > MAX_IN_FLIGHT_BYTES and waiting):
                    message = _answer(*waiting.popleft())
                    nbytes -= len(message.key or b"") + len(message.value or b"")
                    yield message
            while waiting:
                yield _answer(*waiting.popleft())

    def publish_many(
        self, topic: str, items: Iterable[Item], progress: Callable[[int], None] | None = None
    ) -> list[tuple[int, int]]:
        """Write records in order and wait for all of them; `progress` is told how many the broker has so far.

        Returns:
            The partition and the offset of each.
        """
        places = []
        for message in self.publish_each(topic, items):
            places.append((message.partition, message.offset))
            if progress:
                progress(len(places))
        return places

    def dead_letter(
        self,
        kafka: KafkaSettings,
        message: Message,
        error: BaseException,
        stage: str,
        attempts: int,
        *,
        omitted_nbytes: int | None = None,
    ) -> Message:
        """Put a message that cannot be processed aside: original bytes and headers, the cause in headers of ours.

        Args:
            omitted_nbytes: the message had a value of so many bytes, which is left out here. It must not be taken for
                a null value, which deletes.
        """
        cause = {
            "class": type(error).__name__,
            "message": str(error).encode("utf-8", "replace")[:MAX_ERROR_MESSAGE_BYTES].decode("utf-8", "ignore"),
            "stage": stage,
            "attempts": str(attempts),
            "topic": message.topic,
            "partition": str(message.partition),
            "offset": str(message.offset),
            "timestamp": str(message.timestamp_ms),
        }
        if omitted_nbytes is not None:
            cause["omitted"] = str(omitted_nbytes)
        # a replayed message that fails again has one cause, the newest
        original = tuple(header for header in message.headers if not header[0].startswith(ERROR_HEADERS))
        headers = original + tuple((ERROR_HEADERS + name, text.encode()) for name, text in cause.items())
        return self.publish(kafka.dead_letter_topic, message.key, message.value, headers)

    def commit_record(self, kafka: KafkaSettings, record: CommitRecord) -> Message:
        """Tell the world that a head moved; the newest record of a document is what compaction keeps."""
        return self.publish(kafka.commits_topic, record.key, record.to_bytes())

    def close(self) -> None:
        """Wait for what is on its way, then let go of the connections. Twice is harmless."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.close(timeout=5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> Any:
        nothing = key is None and value is None
        # kafka-python cannot write a header without a value; an empty one is the nearest
        filled = [(name, header or b"") for name, header in headers]
        return self._open().send(topic, key=key, value=_NOTHING if nothing else value, headers=filled)

    def _open(self) -> Any:
        with self._lock:
            if self._producer is None:
                self._producer = KafkaProducer(
                    **self._config,
                    acks="all",
                    enable_idempotence=True,
                    delivery_timeout_ms=int(DELIVERY_TIMEOUT_S * 1000),
                    max_block_ms=10_000,
                    max_request_size=MAX_DEAD_LETTER_BYTES + 64 * 1024,
                    allow_auto_create_topics=False,
                    value_serializer=_Values(),
                )
            return self._producer

    @contextmanager
    def _errors(self, topic: str, keys: Collection[bytes | None]) -> Iterator[None]:
        with kafka_errors(self._kafka, f"writing to topic {topic}"):
            try:
                yield
            except MessageSizeTooLargeError as error:
                raise InputError(
                    f"the record is larger than topic {topic} or its broker takes; split the document (kvquilt sends "
                    f"at most {MAX_DEAD_LETTER_BYTES:,} bytes; the topic's max.message.bytes may be less)"
                ) from error
            except KafkaError as error:
                if not isinstance(error, RetriableError):
                    self._discard()
                # the broker's refusal of one record fails all that are on their way: blame the one without a key
                if isinstance(error, InvalidRecordError) and None in keys:
                    raise InputError(
                        f"topic {topic} refuses a record without a key; a compacted topic needs one: {error}"
                    ) from error
                raise

    def _discard(self) -> None:
        """Forget a producer whose state the broker no longer accepts; the next record gets a fresh one."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.close(timeout=0)


def _answer(future: Any, key: bytes | None, value: bytes | None, headers: Headers) -> Message:
    record = future.get(timeout=DELIVERY_TIMEOUT_S + 5)
    return Message(record.topic, record.partition, record.offset, record.timestamp, key, value, headers)
