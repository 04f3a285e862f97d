"""Who gets the CPU where embedder, prefill and answers share it. Light: it is called before torch is loaded."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait, unless the environment says otherwise; before torch is loaded.

    By default they spin. One pass divided over two threads then takes many times as long as soon as the second core has
    something else to do, be it another pass of ours (docs/log.md has figures).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


class SteppedBack:
    """Runs calls one at a time in a thread whose priority is lower by `nice`, as is that of the threads it starts.

    Only on Linux has a thread a priority of its own; elsewhere, and with 0, calls run where they are made.
    """

    def __init__(self, nice: int) -> None:
        self._pool = None
        if nice and sys.platform == "linux":
            self._pool = ThreadPoolExecutor(1, "stepped-back", initializer=_lower, initargs=(nice,))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it and wait for it."""
        if self._pool is None:
            return function(*args, **kwargs)
        return self._pool.submit(function, *args, **kwargs).result()


def _lower(nice: int) -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + nice))
