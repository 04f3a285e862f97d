"""A figure that is measured again and again."""

from __future__ import annotations

import threading

_WEIGHT = 0.3  # of the newest measurement


class Smoothed:
    """The exponentially weighted mean of what was noted. Thread-safe.

    Attributes:
        value: None before the first measurement.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._lock = threading.Lock()

    def note(self, measured: float) -> None:
        """One measurement more."""
        with self._lock:
            before = measured if self.value is None else self.value
            self.value = before + _WEIGHT * (measured - before)
