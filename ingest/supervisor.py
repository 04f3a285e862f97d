"""Runs a streaming pipeline in rounds, until it is told to stop.

Beam's local runner keeps about 28 KB of every bundle until a run ends, and ends the run at the first error. So a run
is drained after a number of bundles or seconds (`Feed.start_round`) and started again (0.1 s), and what an error means
is decided here: infrastructure is tried again, anything else stops the process.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from ingest.retry import backoff_s
from schemas.errors import StoreError
from schemas.settings import IngestSettings

log = logging.getLogger(__name__)


class Progress:
    """How much a pipeline got done; its last step reports here."""

    def __init__(self) -> None:
        self.elements = 0

    def add(self, n_elements: int) -> None:
        """So many elements went through all steps of a bundle."""
        self.elements += n_elements


def run_rounds(
    name: str,
    run: Callable[[], None],
    progress: Progress,
    settings: IngestSettings,
    stop: threading.Event,
    rng: random.Random | None = None,
) -> None:
    """Call `run` again and again until `stop` is set and the last round has drained.

    Args:
        name: of the pipeline, for the log and for errors.
        run: builds the pipeline, runs it and returns when it has drained.
        progress: what counts as getting somewhere between two failures.

    Raises:
        StoreError: infrastructure failed `settings.max_attempts` rounds in a row, none of which got anything done.
        Exception: whatever else came out of the pipeline, at once.
    """
    rng = rng or random.Random()
    failures = 0
    while not stop.is_set():
        before = progress.elements
        try:
            run()
            failures = 0
            continue
        except Exception as error:
            cause = store_error(error)
            if cause is None:
                log.error("%s stops: %r", name, error)
                raise
            failures = 1 if progress.elements > before else failures + 1
            if failures >= settings.max_attempts:
                raise type(cause)(f"{name} stops after {failures} failed rounds: {cause}") from error
        pause_s = backoff_s(failures, settings.backoff_s, rng)
        log.warning("%s: round failed (%d in a row), next in %.1f s: %s", name, failures, pause_s, cause)
        stop.wait(pause_s)


def store_error(error: BaseException) -> StoreError | None:
    """The infrastructure fault behind `error`, if there is one: Beam wraps what its workers raise."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StoreError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
