"""Time as a dependency: the code that waits or measures an age is handed a clock, so that tests can move it."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Wall-clock milliseconds, and waiting."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""

    def sleep(self, seconds: float) -> None:
        """Wait; 0 or less returns at once."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        if seconds > 0:
            time.sleep(seconds)


class MovableClock:
    """A clock that stands still until it is moved; `sleep` moves it and returns at once. Thread-safe."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self.slept_s: list[float] = []

    def now_ms(self) -> int:
        """Milliseconds since the epoch, as set."""
        with self._lock:
            return self._now_ms

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        if seconds < 0:
            raise ValueError(f"seconds must not be negative (got {seconds}); time does not run backwards")
        with self._lock:
            self._now_ms += round(seconds * 1000)

    def sleep(self, seconds: float) -> None:
        """Move the clock forward instead of waiting, and remember by how much in `slept_s`."""
        self.advance(max(0.0, seconds))
        with self._lock:
            self.slept_s.append(seconds)
