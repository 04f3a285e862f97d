"""Thousands of schedules of changes, crashes, faults and questions over stores in memory, each followed by an audit.

What they cannot show, because everything is one thread and the stores are models of the real ones, `python -m
bench.chaos` shows over real processes.
"""

import logging
from collections import Counter

import pytest

from tests.ingest.schedules_faults import CALLS, CRASH, CRASH_AFTER, ERROR, MEANWHILE, NO_REPLY
from tests.ingest.schedules_make import judged

SCHEDULES = 2_000
PART = 250

# Few schedules get there, or none: chunks announced to be fused anew, old points that PREFILL finds, repairs.
RARE = {
    "index": (),
    "prefill": ("publish_many", "chunks.delete", "chunks.query_points", "view"),
    "question": (),
    "reconcile": ("delete", "chunks.delete", "put_new", "get"),
}
_done: Counter[tuple[str, str, str]] = Counter()
_ran: list[int] = []


@pytest.fixture(autouse=True)
def quiet():
    """Thousands of injected faults are thousands of warnings."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("start", range(0, SCHEDULES, PART))
def test_no_schedule_loses_doubles_resurrects_or_leaves_anything_and_no_answer_is_stale(start):
    """Beside the orders of test_orders.py: calls that fail after their effect, the other pipeline in the middle of any
    call, questions between any two, chunks that are fused with neighbours that change, receipts, reconcile."""
    for seed in range(start, start + PART):
        faults, done = judged(seed)
        assert not faults, f"schedule {seed}: " + "; ".join(map(str, faults))
        _done.update(done)
        _ran.append(seed)


def test_the_schedules_went_wrong_at_every_call_that_matters():
    """Two thousand schedules that never crash in the flip are two thousand times nothing."""
    if not _ran:
        pytest.skip("the schedules did not run in this session")
    print(f"{len(_ran)} schedules, {sum(_done.values())} deeds at store calls")
    assert len(_ran) >= SCHEDULES
    for actor, calls in CALLS.items():
        for kinds in ((CRASH, CRASH_AFTER), (ERROR, NO_REPLY), (MEANWHILE,)):
            wanted = set(calls) - set(RARE[actor])
            untouched = {call for call in wanted if not any(_done[actor, call, kind] for kind in kinds)}
            assert not untouched, f"{actor}: no schedule had {' or '.join(kinds)} at {sorted(untouched)}"
