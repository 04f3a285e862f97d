"""Admission: so many answers at a time, so many waiting, the rest is told to come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from serve.errors import BusyError
from serve.telemetry import Telemetry

_WEIGHT = 0.2  # of the newest answer in the running mean


class Admission:
    """Slots handed out in the order of arrival; a waiter that is cancelled leaves the queue at once.

    Args:
        max_concurrent: slots.
        max_queue: how many may wait when all slots are taken.
    """

    def __init__(self, max_concurrent: int, max_queue: int, telemetry: Telemetry) -> None:
        self._slots = asyncio.Semaphore(max_concurrent)
        self._max_concurrent, self._max_queue = max_concurrent, max_queue
        self._telemetry = telemetry
        self._mean_s = 1.0  # of the time a slot is held; only Retry-After depends on it
        self.waiting = 0

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None, None]:
        """Hold a slot, waiting for one if need be.

        Raises:
            BusyError: the queue is full.
        """
        if self._slots.locked() and self.waiting >= self._max_queue:
            self._telemetry.rejected()
            raise BusyError(
                f"{self._max_concurrent} requests are being answered and {self.waiting} wait; try again later",
                retry_after_s=self._mean_s * (self.waiting + 1) / self._max_concurrent,
            )
        arrived_s = time.perf_counter()
        self.waiting += 1
        try:
            with self._telemetry.waiting.track_inprogress():
                await self._slots.acquire()
        finally:
            self.waiting -= 1
        started_s = time.perf_counter()
        self._telemetry.queued(started_s - arrived_s)
        try:
            with self._telemetry.active.track_inprogress():
                yield
        finally:
            self._mean_s += _WEIGHT * (time.perf_counter() - started_s - self._mean_s)
            self._slots.release()
