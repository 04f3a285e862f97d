"""Infrastructure faults: tried again in place, with waiting times that grow and are drawn at random."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TypeVar

from ingest import telemetry
from schemas.errors import StoreError
from schemas.settings import IngestSettings
from stores.clock import Clock

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0


def backoff_s(attempt: int, base_s: float, rng: random.Random) -> float:
    """How long to wait after failure number `attempt` (from 1), in seconds.

    Doubles per failure up to 30 s; the upper half is random, so that workers that failed together come back apart.
    """
    full = min(MAX_BACKOFF_S, base_s * 2.0 ** min(attempt - 1, 1000))  # a float ends at 2^1024
    return full * (0.5 + 0.5 * rng.random())


def store_retry(
    action: Callable[[], T],
    what: str,
    ingest: IngestSettings,
    clock: Clock,
    rng: random.Random | None = None,
) -> T:
    """Run `action` until it succeeds, at most `ingest.max_attempts` times.

    Only `StoreError` is tried again: `action` must be idempotent. Anything else passes through at once.

    Args:
        what: names the action in the log and in the error, such as `upserting points`.

    Raises:
        StoreError: the last one, of its own class, with the number of attempts in its message.
    """
    rng = rng or random.Random()
    attempt = 1
    while True:
        try:
            return action()
        except StoreError as error:
            if attempt >= ingest.max_attempts:
                raise type(error)(f"{what} failed {attempt} times, giving up: {error}") from error
            pause_s = backoff_s(attempt, ingest.backoff_s, rng)
            telemetry.RETRIES.labels(what).inc()
            log.warning("%s failed (attempt %d, next in %.1f s): %s", what, attempt, pause_s, error)
        clock.sleep(pause_s)
        attempt += 1
