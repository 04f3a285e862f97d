"""Clocks: the one that tests move."""

import pytest

from stores.clock import MovableClock, SystemClock


def test_a_movable_clock_moves_when_it_is_told_and_when_somebody_sleeps():
    """Back-off is tested by how far the clock moved, not by waiting."""
    clock = MovableClock(1_000)
    clock.advance(1.5)
    clock.sleep(0.25)
    clock.sleep(-1)
    assert clock.now_ms() == 2_750
    assert clock.slept_s == [0.25, -1]
    with pytest.raises(ValueError, match="time does not run backwards"):
        clock.advance(-1)


def test_the_system_clock_gives_milliseconds_since_the_epoch():
    """Seconds for milliseconds would make every version older than any that exists."""
    clock = SystemClock()
    before = clock.now_ms()
    clock.sleep(-1)
    clock.sleep(0)
    assert 1_600_000_000_000 < before <= clock.now_ms()
