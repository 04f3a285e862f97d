"""How long a request waits for stored KV: not longer than computing the rows would take.

A store may be slower than the model: small chunks, a fast GPU, a link that many share. Then reading KV makes the first
token later, not sooner. So loads that are known to take longer than computing what they would bring are not waited for
at all; of the others none is waited for longer than that. Whoever waits as long as the other way would take, and then
takes it, pays at most twice the cheaper of the two, whatever the store does (the ski-rental bound: Karlin, Manasse,
Rudolph, Sleator, 1988).

A load that nobody waits for may go on, so that the next question finds the rows in memory, and that what loads take
stays known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from engine.smoothed import Smoothed

_SLACK_S = 0.02  # what threads take to start; computing that is sooner than this is not worth a thought


class Patience:
    """Weighs loading against computing. Thread-safe.

    Args:
        timeout_s: how long a request waits at most.
        pace_s: seconds that the model takes for a token of a fresh chunk, None while that is not known.
        side_by_side: how many loads run at a time.
    """

    def __init__(self, timeout_s: float, pace_s: Callable[[], float | None], side_by_side: int) -> None:
        self.timeout_s, self._pace_s, self._side_by_side = timeout_s, pace_s, side_by_side
        self._load_s = Smoothed()

    def loaded(self, seconds: float) -> None:
        """One artifact took so long to load."""
        self._load_s.note(seconds)

    def for_chunks(self, n_tokens: Sequence[int]) -> float:
        """How long to wait for the artifacts of chunks with so many tokens each, seconds; 0: compute them."""
        pace_s, load_s = self._pace_s(), self._load_s.value
        if pace_s is None or not n_tokens:
            return self.timeout_s
        compute_s = max(pace_s * sum(n_tokens), _SLACK_S)
        if load_s is not None and load_s * math.ceil(len(n_tokens) / self._side_by_side) > compute_s:
            return 0.0
        return min(compute_s, self.timeout_s)
