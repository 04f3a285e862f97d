"""`kvquilt backfill`: what it reads, what it asks before it deletes, and what it refuses before it does anything."""

import sys
from io import StringIO
from pathlib import Path

import pytest

from cli.backfill import Pruning, _agreed, backfill, parted
from cli.context import Context
from ingest import Prune, Runner
from schemas.errors import InputError
from schemas.head import DocumentState, Head
from schemas.settings import Settings
from tests.cli.test_commands import kvquilt


def head(doc_id):
    fields = {"tenant": "default", "doc_id": doc_id, "version": 1, "state": DocumentState.LIVE, "generation": "g"}
    return Head(**fields, content_digest="0", n_chunks=1, event_ms=0, committed_ms=0)


def prune(count, owned, newer=0):
    return Prune(tuple(head(f"d{n}") for n in range(count)), owned, newer)


def agreed(plan, *, yes=False, force=False):
    return _agreed(Context(Settings()), plan, Pruning((), yes, force))


class Terminal(StringIO):
    def isatty(self):
        return True


def test_what_comes_behind_two_dashes_is_for_beam():
    words = ["a.jsonl", "folder", "--flink_master=host:1", "--parallelism", "4"]
    assert parted(words) == ([Path("a.jsonl"), Path("folder")], ("--flink_master=host:1", "--parallelism", "4"))
    assert parted(["a"]) == ([Path("a")], ())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": None, "tenant": "default"}, "nothing to read: name files, folders, or a topic with --topic"),
        ({"topic": "documents", "tenant": "acme"}, "the events of a topic name their tenants themselves"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_started(options, said):
    with pytest.raises(InputError, match=said):
        backfill(Context(Settings()), [], root=Path(), runner=Runner(), pruning=None, **options)


def test_how_to_prune_without_pruning_is_refused(tmp_path):
    """Bug: a command that was to delete with --yes did not delete, and said nothing."""
    result = kvquilt("backfill", "a.jsonl", "--yes", "--data-dir", str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "kvquilt: --owns, --yes and --force say how to prune; add --prune\n"


@pytest.mark.slow
def test_ing_04_a_runner_that_cannot_work_is_one_sentence_and_exit_status_1(tmp_path):
    """Bug: a combination that cannot work ran, and did something else."""
    beam = ("--", "--direct_running_mode=multi_processing")
    result = kvquilt("backfill", "-q", "--data-dir", str(tmp_path), "README.md", *beam)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("kvquilt: runner FnApiRunner, workers in processes of its own")
    assert last.endswith("Qdrant's local mode belongs to one process; name a server in qdrant.url")


def test_pruning_shows_what_goes_and_asks(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    plan = prune(25, 100, newer=3)
    assert agreed(plan) is plan
    said = capsys.readouterr().err
    assert "no longer has 25 of the 100 documents that it owns; 3 more changed since it was written, and stay" in said
    assert "to be deleted: d19\n  and 5 more" in said
    assert "Delete 25 documents when everything else is done?" in said
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    with pytest.raises(InputError, match="nothing was done"):
        agreed(plan)


def test_without_a_terminal_pruning_needs_a_yes(monkeypatch):
    """Bug: a nightly job waited for an answer, or deleted without one."""
    monkeypatch.setattr(sys, "stdin", StringIO())
    with pytest.raises(InputError, match="would delete 1 documents, and there is nobody to ask; add --yes"):
        agreed(prune(1, 100))
    assert len(agreed(prune(1, 100), yes=True).heads) == 1
    assert agreed(prune(0, 100)).heads == ()


def test_a_source_that_lost_most_of_what_it_owns_needs_force_even_with_yes(monkeypatch):
    """Bug: the share was not mounted; the folder was empty, and --yes was in the script."""
    monkeypatch.setattr(sys, "stdin", StringIO())
    for plan in (prune(100, 100), prune(51, 100)):
        with pytest.raises(InputError, match=r"more than half; nothing was done\. If the source is whole, add --force"):
            agreed(plan, yes=True)
        assert agreed(plan, yes=True, force=True) is plan
    assert agreed(prune(50, 100), yes=True)
