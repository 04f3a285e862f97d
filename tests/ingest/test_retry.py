"""Infrastructure is tried again, with growing random pauses, and not for ever."""

import random
import threading

import pytest

from ingest.retry import MAX_BACKOFF_S, backoff_s, store_retry
from ingest.supervisor import Progress, run_rounds
from schemas.errors import BlobError, EventError, TopicError, VectorIndexError
from schemas.settings import IngestSettings
from stores.clock import MovableClock

INGEST = IngestSettings(max_attempts=4, backoff_s=0.001)


def test_pauses_double_up_to_a_limit_and_the_upper_half_is_random():
    """Workers that failed together must not come back together."""
    for attempt in range(1, 12):
        full = min(MAX_BACKOFF_S, 0.5 * 2 ** (attempt - 1))
        pauses = {backoff_s(attempt, 0.5, random.Random(seed)) for seed in range(50)}
        assert all(full / 2 <= pause <= full for pause in pauses)
        assert len(pauses) == 50


def test_the_pause_after_a_night_of_failures_is_the_longest_one():
    """Bug: at failure 1,025 the power of two was too large for a float, and the pipeline ended with that."""
    assert backoff_s(1025, 0.5, random.Random(1)) == backoff_s(20, 0.5, random.Random(1)) >= MAX_BACKOFF_S / 2


class Flaky:
    def __init__(self, *errors):
        self.errors = list(errors)

    def __call__(self):
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_a_store_error_is_tried_again():
    clock = MovableClock()
    assert store_retry(Flaky(BlobError("503"), TopicError("gone")), "putting", INGEST, clock) == "done"
    assert len(clock.slept_s) == 2


def test_after_the_last_attempt_the_error_says_what_and_how_often():
    action = Flaky(*[VectorIndexError("connection refused")] * 9)
    with pytest.raises(VectorIndexError, match="reading heads failed 4 times, giving up: connection refused"):
        store_retry(action, "reading heads", INGEST, MovableClock())
    assert len(action.errors) == 5


@pytest.mark.parametrize("error", [EventError("bad"), ValueError("bug")])
def test_other_errors_pass_at_once(error):
    clock = MovableClock()
    with pytest.raises(type(error)):
        store_retry(Flaky(error), "parsing", INGEST, clock)
    assert clock.slept_s == []


def rounds(run, progress=None, stop=None):
    run_rounds("index", run, progress or Progress(), INGEST, stop or threading.Event())


def test_rounds_go_on_until_stopped():
    stop, count = threading.Event(), []

    def run():
        count.append(1)
        if len(count) == 3:
            stop.set()

    rounds(run, stop=stop)
    assert len(count) == 3


def test_rounds_that_get_nothing_done_stop_with_the_cause():
    action = Flaky(*[TopicError("broker is away")] * 99)
    with pytest.raises(TopicError, match="index stops after 4 failed rounds: broker is away"):
        rounds(action)
    assert len(action.errors) == 95


def test_rounds_that_get_something_done_between_faults_go_on():
    """A counter that never goes down ends a pipeline that had one hiccup a day for a week."""
    progress, stop, count = Progress(), threading.Event(), []

    def run():
        count.append(1)
        if len(count) == 20:
            stop.set()
            return
        progress.add(1)
        raise TopicError("hiccup")

    rounds(run, progress, stop)
    assert len(count) == 20


def test_a_store_error_that_beam_wrapped_is_recognised():
    def run():
        try:
            raise VectorIndexError("down")
        except VectorIndexError as error:
            raise RuntimeError("bundle failed") from error

    with pytest.raises(VectorIndexError, match="down"):
        rounds(run)


def test_a_bug_stops_the_pipeline_at_once():
    action = Flaky(KeyError("bug"), KeyError("bug"))
    with pytest.raises(KeyError):
        rounds(action)
    assert len(action.errors) == 1
