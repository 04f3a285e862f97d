"""One bad element never fails its batch: halve until it stands alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from schemas.errors import StoreError

T = TypeVar("T")

log = logging.getLogger(__name__)


def isolate(
    items: Sequence[T],
    run: Callable[[Sequence[T]], None],
    give_up: Callable[[T, Exception, int], None],
    probe: Callable[[], object],
    attempts: int = 1,
) -> None:
    """Run a model over `items`; where that fails, over the halves, down to single items.

    Halving serves both causes: an item that the model cannot take ends up alone, and a batch that does not fit into
    memory becomes smaller.

    Args:
        run: must do nothing lasting for items that it fails on, or nothing that a second run would double.
        give_up: told of each item that fails alone, with its error and the number of attempts.
        probe: runs the model over something that is known to be good. If that fails too, the model is broken and
            not the item, and the topic must not drain into the dead letters: the probe's error is raised.

    Raises:
        StoreError: at once, from `run`; that is not the item's fault.
    """
    if not items:
        return
    try:
        run(items)
        return
    except StoreError:
        raise
    except Exception as error:
        # Without its traceback: the frames would keep the failed batch's tensors alive while its halves are tried.
        failure = error.with_traceback(None)
    if len(items) == 1:
        probe()
        give_up(items[0], failure, attempts)
        return
    log.warning("a batch of %d failed, trying its halves: %r", len(items), failure)
    half = len(items) // 2
    isolate(items[:half], run, give_up, probe, attempts + 1)
    isolate(items[half:], run, give_up, probe, attempts + 1)
