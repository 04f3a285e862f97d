"""What kafka-python tells a member of its partitions: which come, which go to others, which were lost."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection
from typing import Any

from kafka.consumer.subscription_state import ConsumerRebalanceListener
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor

Moves = deque[tuple[str, frozenset[int]]]  # "coming", "leaving" or "lost", and the partitions


class HandOver(Exception):  # noqa: N818 # no error
    """Ends a poll between the two steps of a rebalance: raised by the listener, it is the cause of what poll raises."""


class MovesListener(ConsumerRebalanceListener):  # type: ignore[misc] # kafka-python has no types
    """Notes what comes and goes, on kafka-python's thread, where nothing may wait; the reader settles it later."""

    def __init__(
        self, consumer: Any, assignor: CooperativeStickyAssignor, moves: Moves, closing: threading.Event
    ) -> None:
        self._consumer, self._assignor, self._moves, self._closing = consumer, assignor, moves, closing
        logging.getLogger("kafka.coordinator.consumer").addFilter(_QUIET)  # the same one, which is added once

    def on_partitions_assigned(self, assigned: Collection[Any]) -> None:
        """Nothing is read before it is known where to start."""
        self._consumer.pause(*assigned)
        self._moves.append(("coming", _numbers(assigned)))

    def on_partitions_revoked(self, revoked: Collection[Any]) -> None:
        """The group has us until the next poll, so this one ends: offsets can still be committed."""
        self._moves.append(("leaving", _numbers(revoked)))
        if not self._closing.is_set():
            raise HandOver

    def on_partitions_lost(self, lost: Collection[Any]) -> None:
        """We were thrown out, and others have them."""
        self._assignor.member_assignment = None
        self._moves.append(("lost", _numbers(lost)))


class _Quiet(logging.Filter):
    """Takes the hand-over out of kafka-python's log, where it would stand as a failure of ours, with its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to keep the record."""
        return not (record.exc_info and isinstance(record.exc_info[1], HandOver))


_QUIET = _Quiet()


def _numbers(partitions: Collection[Any]) -> frozenset[int]:
    return frozenset(tp.partition for tp in partitions)
