"""Backfill that is killed, and backfill beside a stream that goes on: nothing is lost, nothing older wins."""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ingest.handles import held
from ingest.sources import survey
from tests.ingest.backfilling import backfill, jsonl

ROOT = Path(__file__).parents[2]
ROWS = 60


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["flip:20", "put:20"])
def test_ing_09_a_run_of_three_workers_that_is_killed_is_finished_by_one_which_does_only_the_rest(tmp_path, dies):
    """Bugs: fewer workers on the second run lost what the others had had; a second run began from the start."""
    rows = jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"a{n}", "content": f"line {n}"} for n in range(ROWS)])

    def life(threads, dies=""):
        arguments = [sys.executable, "-m", "tests.ingest.backfill_child", tmp_path, rows, str(threads), dies]
        return subprocess.run(
            arguments, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )

    assert life(3, dies).returncode == -signal.SIGKILL
    finished = life(1)
    assert finished.returncode == 0, finished.stderr
    told = json.loads(finished.stdout)
    before, done = told["before"], told["done"]
    assert 0 < before["heads"] <= ROWS
    assert before["artifacts"] < ROWS, "it died in the middle"
    assert told["cost"] == {"embedded": ROWS - before["heads"], "puts": ROWS - before["artifacts"]}
    assert (done["committed"], done["repeated"]) == (ROWS - before["heads"], before["heads"])
    assert done["prefilled"] == ROWS


@dataclass(frozen=True)
class Interrupted:
    """A piece that does something before each of its rows."""

    piece: Any
    before: Any  # a handle

    @property
    def n_rows(self):
        return self.piece.n_rows

    def read(self):
        for number, message in enumerate(self.piece.read()):
            self.before()(number)
            yield message


def test_live_changes_at_any_moment_of_a_backfill_win(world, tmp_path):
    """Long before a row is read, right before, in its batch, behind it, between the two pipelines, during PREFILL.

    Bugs: a row that was planned before the live event and flipped after it; KV put late for a version that is gone.
    """
    rows = 48
    when = [-20, -2, -1, 0, 1, 7, 8, 20, "indexed", "prefilling"]
    due, expected = defaultdict(list), {f"d{n}": f"row {n}" for n in range(rows)}
    for n in range(rows):
        moment, text = when[n % len(when)], (f"live {n}", None)[n // len(when) % 2]
        if moment in ("indexed", "prefilling"):
            due[moment].append((f"d{n}", text))
        elif 0 <= n + moment < rows:
            due[n + moment].append((f"d{n}", text))
        else:
            continue
        expected[f"d{n}"] = text

    def act(moment):
        for doc_id, text in due.pop(moment, ()):
            world.change(text, doc_id=doc_id)
            world.index()
            world.prefill()

    def follow(progress):
        if progress.indexed == rows:
            act("indexed")
        if progress.prefilled:
            act("prefilling")

    file = jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"d{n}", "content": f"row {n}"} for n in range(rows)])
    source = survey([file])
    with held(act) as handle:
        source = type(source)(tuple(Interrupted(piece, handle) for piece in source.pieces), (), (), source.as_of_ms)
        backfill(world, source=source, progress=follow)
    assert not due, "everything happened"
    world.prefill()
    assert {doc_id: world.texts(doc_id) for doc_id in expected} == expected
    assert sum(text is None for text in expected.values()) > 10
    assert world.dead_letters() == []
    world.assert_clean()


def test_lines_are_read_a_piece_at_a_time_and_not_all_before_the_first_is_ingested(world, tmp_path):
    """Bug: a shuffle of rows held the whole corpus in memory before the first document was embedded."""
    committed_at = {}

    def act(number):
        committed_at[number] = sum(head.live for head in world.qdrant.documents())

    file = jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"d{n}", "content": f"row {n}"} for n in range(40)])
    source = survey([file])
    with held(act) as handle:
        source = type(source)(tuple(Interrupted(piece, handle) for piece in source.pieces), (), (), source.as_of_ms)
        backfill(world, source=source)
    assert committed_at[0] == 0
    assert committed_at[39] >= 24
