"""Fakes that are shipped: faults at a named call, topics in memory, artifacts without a model.

They behave like the real parts where it matters to a caller (order, offsets, create-only, compare-and-set), so that
crash-and-resume is a test of a few lines and needs no broker and no model.
"""

from __future__ import annotations

import os
import signal
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

import numpy as np

from schemas.errors import TopicError
from schemas.fingerprint import Fingerprint
from schemas.ids import DocumentKey, artifact_key, token_digest
from schemas.kv_artifact import DTYPE_NBYTES, FORMAT_VERSION, ArtifactHeader, KvArtifact, payload_sha256
from stores.clock import Clock, SystemClock
from stores.kafka_client import Headers, Message
from stores.publisher import Item, Publisher

T = TypeVar("T")


class SimulatedCrash(BaseException):
    """The process is gone, as far as the code under test can tell: no `except Exception` may catch it."""


def kill() -> None:
    """End this process as `kill -9` does: no handler, no `finally`, no flush."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class CrashPoint:
    """Something goes wrong at a call.

    Attributes:
        call: name of the method, such as `put_new`.
        at: at which call of that name, from 1.
        fault: an error to raise, or a function to run, such as `kill`.
        after: the call has its effect first, and the caller is not told.
        times: how many calls in a row it goes wrong for.
    """

    call: str
    at: int = 1
    fault: BaseException | Callable[[], None] = field(default_factory=SimulatedCrash)
    after: bool = False
    times: int = 1


def with_faults(target: T, *points: CrashPoint) -> T:
    """`target`, going wrong at `points`; everything else is passed on. Its `calls` counts calls by name."""
    return cast("T", _Faulty(target, points))


class _Faulty:
    def __init__(self, target: object, points: Sequence[CrashPoint]) -> None:
        for point in points:
            if not callable(getattr(target, point.call, None)):
                raise ValueError(f"{type(target).__name__} has no method {point.call!r} to crash in")
        self._target, self._points = target, points
        self._lock = threading.Lock()
        self.calls: dict[str, int] = defaultdict(int)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls[name] += 1
                count = self.calls[name]
            due = [point for point in self._points if point.call == name and 0 <= count - point.at < point.times]
            _go_wrong(point for point in due if not point.after)
            result = found(*args, **kwargs)
            _go_wrong(point for point in due if point.after)
            return result

        return call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._target.close()  # type: ignore[attr-defined]


def _go_wrong(points: Iterable[CrashPoint]) -> None:
    for point in points:
        if isinstance(point.fault, BaseException):
            raise point.fault
        point.fault()


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
            return [record for p, log in enumerate(logs) for record in log[positions.get(p, 0) :]][:limit]

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

    def publish_many(self, topic: str, items: Iterable[Item], progress: Callable[[int], None] | None = None) -> None:
        """Write records in order."""
        for count, (key, value, headers) in enumerate(items, start=1):
            self.publish(topic, key, value, headers)
            if progress:
                progress(count)

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


def fake_fingerprint(**changes: Any) -> Fingerprint:
    """A small complete fingerprint: 2 layers, 3 kv heads of 4 numbers, float32; `changes` replace fields."""
    fields: dict[str, Any] = {
        "model": "fake",
        "weights_sha256": "0" * 64,
        "tokenizer_sha256": "1" * 64,
        "rope": {"full_attention": "2" * 64},
        "n_layers": 2,
        "n_kv_heads": 3,
        "head_dim": 4,
        "rotary_dim": 4,
        "rope_layout": "half_split",
        "dtype": "float32",
        "k_state": "pre_rope",
        "layout": "LHTD",
    }
    return Fingerprint(**(fields | changes))


def fake_artifact(
    document: DocumentKey,
    token_ids: Sequence[int],
    *,
    version: int = 1,
    ordinal: int = 0,
    generation: str = "fake",
    fingerprint: Fingerprint | None = None,
    prefix_sha256: str = "3" * 64,
) -> tuple[str, KvArtifact]:
    """Key and artifact of a chunk; the rows are small finite numbers that depend on nothing but the token ids."""
    fingerprint = fingerprint or fake_fingerprint()
    ids = np.asarray(token_ids, np.int32)
    n_bytes = fingerprint.n_layers * fingerprint.n_kv_heads * len(ids) * fingerprint.head_dim
    n_bytes *= DTYPE_NBYTES[fingerprint.dtype]
    rng = np.random.default_rng(int(token_digest(token_ids)[:16], 16))
    # bytes below 0x40: every two or four of them are a small finite number in each of the dtypes
    k, v = (rng.integers(0, 0x40, n_bytes, np.uint8).tobytes() for _ in range(2))
    header = ArtifactHeader(
        format_version=FORMAT_VERSION,
        generation=generation,
        fingerprint=fingerprint,
        prefix_sha256=prefix_sha256,
        tenant=document.tenant,
        doc_id=document.doc_id,
        version=version,
        ordinal=ordinal,
        token_sha256=token_digest(token_ids),
        payload_sha256=payload_sha256(k, v, ids),
    )
    return artifact_key(fingerprint.digest, prefix_sha256, token_ids), KvArtifact(header, k, v, ids)
