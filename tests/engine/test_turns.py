"""Answers go before ingest, but ingest is not starved."""

from __future__ import annotations

import threading

from engine.turns import Turns


def background(turns: Turns, done: threading.Event) -> threading.Thread:
    def run() -> None:
        with turns.turn(background=True):
            done.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_background_pass_waits_while_an_answer_is_under_way() -> None:
    """Else one batch of ingest, seconds long, comes between two tokens of an answer."""
    turns, done = Turns(patience_s=60), threading.Event()
    with turns.answering():
        thread = background(turns, done)
        for _ in range(3):
            with turns.turn():
                assert not done.is_set()
        assert not done.wait(0.05)
    assert done.wait(10)
    thread.join()


def test_a_background_pass_gets_a_turn_when_answers_never_end() -> None:
    turns, done = Turns(patience_s=0.01), threading.Event()
    with turns.answering():
        thread = background(turns, done)
        assert done.wait(10)
    thread.join()


def test_one_pass_runs_at_a_time() -> None:
    turns, inside, most = Turns(), [], []

    def run() -> None:
        for _ in range(50):
            with turns.turn():
                inside.append(None)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) == 200
