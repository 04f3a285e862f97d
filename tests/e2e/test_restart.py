"""Stopping and starting again."""

import os
import signal

import pytest

from stores import lag

pytestmark = pytest.mark.slow


def test_sigterm_drains_and_exits_0_and_a_restart_serves_the_same_without_reading_again(tmp_path, start_tiny):
    """Bug (beam#26884): the last offsets were not committed on drain, and everything was done twice."""
    first = start_tiny(tmp_path / "data")
    for number in range(2):
        first.publish(f"d{number}.txt", f"Fact number {number} is about the colour of lamp {number}.")
    before = [first.service.status(f"d{number}.txt") for number in range(2)]
    assert first.up.stop() == 0, first.up.log_end()
    assert "stopped" in first.up.log_end()

    again = start_tiny(tmp_path / "data")
    assert [again.service.status(f"d{number}.txt") for number in range(2)] == before
    assert lag(again.settings.kafka, "kvquilt.index", "documents") == 0
    answer = again.ask("What is fact number 1?", max_tokens=2)
    assert {citation["source"] for citation in answer["citations"]} == {"cached"}


def test_kill_9_leaves_nothing_that_stops_a_restart(tmp_path, start_tiny):
    first = start_tiny(tmp_path / "data")
    first.publish("d.txt", "The lamp in the hall is green.")
    os.kill(first.up.pid, signal.SIGKILL)
    assert first.up.stop() == -signal.SIGKILL

    again = start_tiny(tmp_path / "data")
    assert again.ask("What colour is the lamp?", max_tokens=2)["citations"][0]["doc_id"] == "d.txt"
    again.publish("e.txt", "The lamp in the attic is red.")
