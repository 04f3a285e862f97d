"""The same job on other runners of Beam: threads, processes, Prism; and what is said where it cannot work."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from ingest.backfill import backfill as run
from ingest.runners import Runner
from ingest.sources import survey
from schemas.errors import InputError, SettingsError, StoreError
from schemas.settings import BlobSettings, QdrantSettings, Settings
from tests.ingest.backfilling import backfill, jsonl
from tests.ingest.remote import ConnectRemote, shared

ROWS = 40
THREADS = Runner("local", ("--direct_num_workers=3", "--direct_running_mode=multi_threading"))
PROCESSES = Runner("local", ("--direct_num_workers=2", "--direct_running_mode=multi_processing"))


@pytest.fixture(scope="module")
def prism():
    """Options that say where the Prism binary is."""
    found = os.environ.get("KVQUILT_TEST_PRISM") or shutil.which("prism") or Path("~/go/bin/prism").expanduser()
    if not Path(found).is_file():
        pytest.skip(
            "no Prism: go install github.com/apache/beam/sdks/v2/go/cmd/prism@v2.77.0, "
            "or name the binary in KVQUILT_TEST_PRISM"
        )
    return (f"--prism_location={found}", "--prism_log_level=warn")


@pytest.fixture
def rows(tmp_path):
    return jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"a{n}", "content": f"line {n}"} for n in range(ROWS)], b"{no\n")


def twice(job):
    """Prism fails one job in about ten, and then says so; what the first run did, the second one skips."""
    try:
        return job()
    except StoreError:
        return job()


def assert_whole(world, done):
    assert (done.total, done.prefilled, done.dead) == (ROWS + 1, ROWS, 1)
    assert [world.texts(f"a{n}") for n in range(ROWS)] == [f"line {n}" for n in range(ROWS)]
    assert len(world.dead_letters()) == 1
    world.assert_clean()


def test_threads_share_the_models_and_tell_how_far_they_are(world, rows):
    told = []
    done = backfill(world, rows, runner=THREADS, progress=told.append)
    assert (told[-1].indexed, told[-1].prefilled) == (ROWS + 1, ROWS)
    assert_whole(world, done)
    assert len(world.embedder.embedded) == ROWS
    assert backfill(world, rows, runner=THREADS).repeated == ROWS


def in_processes(world, rows, runner):
    """Run with parts that every worker makes for itself; gives also the ids of the processes that did."""
    told = []
    with shared(world) as (address, pids):
        parts = world.settings, world.index_parts.generation
        index, prefill = (ConnectRemote(address, kind, *parts) for kind in ("index", "prefill"))
        done = run(world.settings.ingest, survey([rows]).pieces, index, prefill, told.append, runner)
        assert told == [], "nobody here is told by workers elsewhere"
        return done, pids()


@pytest.mark.slow
@pytest.mark.filterwarnings("default::ResourceWarning")  # Beam leaves pipes of its worker processes open
def test_processes_make_parts_of_their_own_and_the_counts_come_back(world, rows):
    """Bug: a handle to something of this process travelled in the graph, and meant nothing on a cluster."""
    done, pids = in_processes(world, rows, PROCESSES)
    assert_whole(world, done)
    assert os.getpid() not in pids
    assert len(pids) == 2


@pytest.mark.service
def test_prism_runs_the_job_with_the_parts_of_this_process(world, rows, prism):
    runner, told = Runner("PrismRunner", prism), []
    assert runner.is_here
    done = twice(lambda: backfill(world, rows, runner=runner, progress=told.append))
    assert told[-1].prefilled == ROWS
    assert_whole(world, done)
    again = twice(lambda: backfill(world, rows, runner=runner))
    assert (again.committed, again.repeated) == (0, ROWS)


@pytest.mark.service
@pytest.mark.filterwarnings("default::ResourceWarning")
def test_prism_runs_the_job_in_a_process_of_its_own(world, rows, prism, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # Beam starts `python`
    runner = Runner("PrismRunner", (*prism, "--experiments=use_loopback_process_worker"))
    assert not runner.is_here
    done, pids = twice(lambda: in_processes(world, rows, runner))
    assert_whole(world, done)
    assert os.getpid() not in pids


def test_ing_04_the_runner_is_the_one_that_was_named(tmp_path):
    """Bug: another runner than the named one was chosen without a word."""
    assert str(Runner()) == "FnApiRunner, workers in this process"
    assert str(PROCESSES).startswith("FnApiRunner, workers in processes of its own (--direct_num_workers=2")
    flink = Runner("FlinkRunner", ("--flink_master=host:8081",))
    assert str(flink) == "FlinkRunner, workers in processes of its own (--flink_master=host:8081)"
    with pytest.raises(InputError, match="DirectRunner is Beam's choice among others, one of which it downloads"):
        Runner("DirectRunner")
    with pytest.raises(InputError, match="runner FastRunner: Unexpected pipeline runner"):
        Runner("FastRunner").run(lambda pipeline: None)


def test_ing_04_a_runner_whose_workers_cannot_reach_the_stores_is_refused():
    """Bug: every worker had an index of its own, and none of them was the one that is served."""
    server = QdrantSettings(url="http://qdrant:6333")
    with pytest.raises(SettingsError, match=r"local mode belongs to one process; name a server in qdrant\.url"):
        PROCESSES.check(Settings())
    with pytest.raises(SettingsError, match="is in the memory of one process"):
        PROCESSES.check(Settings(qdrant=server, blobs=BlobSettings(url="memory://x")))
    PROCESSES.check(Settings(qdrant=server))
    THREADS.check(Settings())


def test_options_that_beam_cannot_read_are_said(capsys):
    with pytest.raises(InputError, match="Beam does not take the options --direct_num_workers=many"):
        str(Runner("local", ("--direct_num_workers=many",)))
    assert "invalid int value" in capsys.readouterr().err
