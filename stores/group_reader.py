"""Reading a topic together with other processes: each has some of its partitions, by membership in a consumer group.

What kafka-python does not do by itself, and this does:

- A member must poll, or the whole group waits for it at the next rebalance. Effects take longer than that, so a thread
  polls with everything paused while nobody else does (`_keep`).
- A join that the broker answers while nobody polls is thrown away and begun anew (kafka-python 3.0.12,
  `join_group_async`): a reader that polls for a moment and then works for a while never joins, and no one else in its
  group does. So a poll does not end within a join.
- Partitions that are to go to another member leave in two steps (cooperative rebalancing). The second step is held
  back for `HAND_OVER_MS`, until the effects of what was read of them are done and committed (`leaving`, `release`):
  so nothing is done twice where that is enough. A poll of kafka-python can run through both steps; only an exception
  of the listener ends it between them (`HandOver`).
- A member that was thrown out still tells the group that it has its partitions (the assignor remembers them): it must
  forget them, or it is given back what others read by then.

A member that was thrown out and does not know it yet has its commits refused by the broker, which knows its generation.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from kafka import KafkaAdminClient
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.errors import (
    CommitFailedError,
    FencedInstanceIdError,
    IllegalGenerationError,
    InvalidSessionTimeoutError,
    KafkaError,
    NoOffsetForPartitionError,
    RetriableError,
    UnknownMemberIdError,
)
from kafka.structs import MemberState

from schemas.errors import KvquiltError, SettingsError, TopicError
from schemas.settings import KafkaSettings
from stores.broker import EMBEDDED_CLUSTER
from stores.clock import Clock
from stores.group_moves import HandOver, Moves, MovesListener
from stores.kafka_client import connection, kafka_errors
from stores.partition_reader import ASK_TIMEOUT_MS, PartitionReader, Tenure

log = logging.getLogger(__name__)

HAND_OVER_MS = 5_000  # how long the effects of what is leaving may take, before it goes to its new reader anyway
MAX_POLL_INTERVAL_MS = 60_000  # how long a rebalance waits for a member that is alive and does not answer
METADATA_MAX_AGE_MS = 10_000  # partitions that are added to a topic are seen after so long
IDLE_S = 10.0  # a member without partitions for so long says so
KEEP_S = 0.5  # a member that was not polled for so long is polled by its own thread
SLICE_MS = 50  # of a poll: it ends soon after partitions have come
JOIN_SLICE_MS = 500  # of one while a join is under way: the fewer, the less likely is the answer to come in between
JOIN_S = 2.0  # how long a poll goes on at most because a join is under way

_THROWN_OUT = (CommitFailedError, UnknownMemberIdError, IllegalGenerationError)


def open_reader(kafka: KafkaSettings, topic: str, group: str, clock: Clock | None = None) -> PartitionReader:
    """A member of the group; on the embedded broker, where groups do not work, a reader of all partitions.

    Raises:
        TopicError: the broker does not answer, or the topic is missing.
    """
    if _embedded(kafka):
        log.info("topic %s: the embedded broker divides nothing; this process reads all of it: run no other", topic)
        return PartitionReader(kafka, topic, group, clock)
    return GroupReader(kafka, topic, group, clock)


def _embedded(kafka: KafkaSettings) -> bool:
    with kafka_errors(kafka, "asking for the cluster"):
        admin = KafkaAdminClient(**connection(kafka))
        try:
            return bool(admin.describe_cluster()["cluster_id"] == EMBEDDED_CLUSTER)
        finally:
            admin.close()


class GroupReader(PartitionReader):
    """A member of a consumer group: reads the partitions that the group gives it, which come and go.

    They come and go only within a poll, this reader's own between other calls included; hold `steady` where that
    matters. A partition starts at the group's committed offset, or at its beginning. Every stay of a partition is
    another `Tenure`: what was read in an earlier one must not be committed, the offset is another reader's by then.

    Raises `SettingsError` from `poll` where the broker refuses the session time-out, or where another process has
    taken the same `kafka.group_instance_id`.
    """

    alone = False

    def __init__(self, kafka: KafkaSettings, topic: str, group: str, clock: Clock | None = None) -> None:
        self._assignor = CooperativeStickyAssignor()
        self._moves: Moves = deque()  # written by kafka-python's thread
        self._coming: set[int] = set()  # assigned, paused, and not told where to start
        self._leaving: dict[int, Tenure] = {}
        self._leave_at = 0.0
        self._numbers = itertools.count(1)
        self._joined = False
        self._fatal: SettingsError | None = None
        self._idle_at: float | None = time.monotonic() + IDLE_S  # None: it was said, or there is nothing to say
        self._polled_at = time.monotonic()
        self._closing = threading.Event()
        super().__init__(kafka, topic, group, clock)
        self._keeper = threading.Thread(target=self._keep, name=f"member of {group}", daemon=True)
        self._keeper.start()

    def _membership(self) -> dict[str, Any]:
        session_ms = int(self._kafka.session_timeout_s * 1000)
        return {
            "session_timeout_ms": session_ms,
            "heartbeat_interval_ms": min(3_000, session_ms // 3),
            "max_poll_interval_ms": MAX_POLL_INTERVAL_MS,
            "metadata_max_age_ms": METADATA_MAX_AGE_MS,
            "group_instance_id": self._kafka.group_instance_id or None,
            "partition_assignment_strategy": [self._assignor],
        }

    def _start(self, partitions: tuple[int, ...]) -> None:
        listener = MovesListener(self._consumer, self._assignor, self._moves, self._closing)
        self._consumer.subscribe([self.topic], listener=listener)

    @property
    def joined(self) -> bool:
        """Whether the group has answered; it may have no partition left for this member."""
        return self._joined

    @property
    def leaving(self) -> dict[int, Tenure]:
        """Partitions that wait to be given to another member until `release`, or for `HAND_OVER_MS`."""
        return self._leaving

    def release(self) -> None:
        """Let go of what is leaving."""
        self._leaving = {}

    def commit(self, positions: Mapping[int, int]) -> None:
        """As `PartitionReader.commit`; raises `TopicError` too where the group goes on without this member."""
        try:
            super().commit(positions)
        except TopicError as error:
            if isinstance(error.__cause__, FencedInstanceIdError):
                self._fatal = self._instance_taken()
            if isinstance(error.__cause__, _THROWN_OUT):
                raise TopicError(
                    f"group {self.group} goes on without this process, which was silent for longer than "
                    f"kafka.session_timeout_s ({self._kafka.session_timeout_s:g} s): it may not commit offsets of "
                    f"topic {self.topic}; what it has not committed is done again by whoever has its partitions"
                ) from error
            raise

    def close(self) -> None:
        """Leave the group, which gives the partitions to others; commits nothing. Twice is harmless."""
        self._closing.set()
        self._keeper.join()
        super().close()

    def _poll(self, limit: int, timeout_ms: int) -> dict[Any, list[Any]]:
        due = time.monotonic() + timeout_ms / 1000
        end, slice_ms, joining_since = due, SLICE_MS, None
        while True:
            left_ms = int((end - time.monotonic()) * 1000)
            polled, moved = self._poll_slice(limit, max(0, min(slice_ms, left_ms)))
            now = time.monotonic()
            if self._state() is MemberState.REBALANCING and not self._closing.is_set():
                joining_since = joining_since or now
                end, slice_ms = max(due, joining_since + JOIN_S), JOIN_SLICE_MS
            else:
                end, slice_ms, joining_since = due, SLICE_MS, None
            if polled or moved or now >= end:
                return polled

    def _state(self) -> Any:
        return self._consumer.group_metadata().state

    def _poll_slice(self, limit: int, timeout_ms: int) -> tuple[dict[Any, list[Any]], bool]:
        """What was read, and whether partitions came or went."""
        if self._fatal is not None:
            raise self._fatal
        self._polled_at = time.monotonic()
        if self._leaving and self._polled_at < self._leave_at:
            self._closing.wait(timeout_ms / 1000)
            return {}, False
        self._leaving = {}
        before = self._held, self._leaving
        polled: dict[Any, list[Any]] = {}
        try:
            polled = super()._poll(limit, timeout_ms)
        except NoOffsetForPartitionError:  # of a partition that is coming
            pass
        except FencedInstanceIdError as error:
            raise self._instance_taken() from error
        except InvalidSessionTimeoutError as error:
            raise SettingsError(
                f"kafka.session_timeout_s: {self._kafka.session_timeout_s:g} is outside of what the broker allows "
                "(group.min.session.timeout.ms, group.max.session.timeout.ms)"
            ) from error
        except KafkaError as error:
            if not isinstance(error.__cause__, HandOver):
                raise
        finally:
            self._settle()
        self._joined = self._joined or self._state() is MemberState.STABLE
        self._say_idle()
        return polled, self._held is not before[0] or self._leaving is not before[1]

    def _say_idle(self) -> None:
        if self._held:
            self._idle_at = time.monotonic() + IDLE_S
        elif self._joined and self._idle_at is not None and time.monotonic() >= self._idle_at:
            self._idle_at = None
            log.info(
                "group %s has no partition of topic %s left for this process: it waits for one", self.group, self.topic
            )

    def _settle(self) -> None:
        """Take over what the listener heard of, in order."""
        while self._moves:
            kind, partitions = self._moves.popleft()
            if kind == "coming":
                self._coming |= partitions
            else:
                self._drop(kind, partitions)
        if self._coming:
            try:
                self._begin()
            except RetriableError as error:  # the next poll tries again, and what this one has read is not lost
                log.debug("group %s: partitions %s cannot begin yet: %r", self.group, sorted(self._coming), error)

    def _drop(self, kind: str, partitions: Collection[int]) -> None:
        gone = {p: self._held[p] for p in partitions if p in self._held}
        self._coming -= set(partitions)
        for name in ("_held", "_at", "_ends"):
            setattr(self, name, {p: value for p, value in getattr(self, name).items() if p not in partitions})
        if kind == "leaving":
            self._leaving = self._leaving | gone
            self._leave_at = time.monotonic() + HAND_OVER_MS / 1000
            log.info("group %s: partitions %s go to another process", self.group, sorted(partitions))
        else:
            self._leaving = {}
            log.warning(
                "group %s: partitions %s were given to others: this process was silent for longer than "
                "kafka.session_timeout_s (%g s)",
                self.group,
                sorted(partitions),
                self._kafka.session_timeout_s,
            )

    def _begin(self) -> None:
        """Start reading what is coming, where the group is or at the beginning; tried again if the broker is away."""
        coming = sorted(self._coming)
        start = self._committed(coming)
        start |= self._beginnings([p for p in coming if p not in start])
        for partition in coming:
            self._go(partition, start.get(partition, 0))
        # asked for: of a partition that comes back without news, a fetch session says nothing
        ends = self._consumer.end_offsets([self._tp(p) for p in coming], timeout_ms=ASK_TIMEOUT_MS)
        self._ends = self._ends | {tp.partition: end for tp, end in ends.items()}
        self._held = self._held | {p: Tenure(next(self._numbers), self._at[p]) for p in coming}
        self._coming = set()
        self._consumer.resume(*(self._tp(partition) for partition in coming))
        log.info("group %s: this process reads partitions %s of %s", self.group, sorted(self._held), self.topic)

    def _keep(self) -> None:
        """Answer the group while nobody polls, because effects take their time."""
        while not self._closing.wait(KEEP_S / 2):
            if time.monotonic() - self._polled_at < KEEP_S or not self._lock.acquire(blocking=False):
                continue
            try:
                self._consumer.pause(*(self._tp(partition) for partition in self._held))
                self._poll(1, SLICE_MS)
                self._note()
            except (KafkaError, KvquiltError) as error:  # said by the next poll, if it lasts
                log.debug("keeping the place in group %s: %r", self.group, error)
            except Exception:  # without this thread the whole group would wait for us at its next rebalance
                log.exception("keeping the place in group %s", self.group)
            finally:
                self._consumer.resume(*(self._tp(partition) for partition in self._held))
                self._lock.release()

    def _instance_taken(self) -> SettingsError:
        return SettingsError(
            f"kafka.group_instance_id: another process of group {self.group} is called "
            f"{self._kafka.group_instance_id!r}, too; give each a name of its own"
        )
