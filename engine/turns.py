"""Who may run a forward pass: one at a time, answers before ingest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_S = 2.0  # so long a background pass lets answers go first, then it takes one turn


class Turns:
    """A lock with two kinds of holders.

    An answer holds `answering` from its first pass to its last and takes a `turn` for every pass; a background pass
    (ingest prefill, one batch per turn) waits while answers are under way, but not for ever.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._condition = threading.Condition()
        self._busy, self._answering, self._patience_s = False, 0, patience_s

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While open, background passes wait."""
        with self._condition:
            self._answering += 1
        try:
            yield
        finally:
            with self._condition:
                self._answering -= 1
                self._condition.notify_all()

    @contextmanager
    def turn(self, *, background: bool = False) -> Iterator[None]:
        """Run one forward pass."""
        with self._condition:
            if background:
                self._condition.wait_for(lambda: not self._answering, self._patience_s)
            self._condition.wait_for(lambda: not self._busy)
            self._busy = True
        try:
            yield
        finally:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
