"""The same job on other runners of Beam: threads, processes, a job service, Prism, Flink; and where it cannot work."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ingest.backfill import backfill as run
from ingest.runners import Runner
from ingest.sources import survey
from schemas.errors import InputError, SettingsError, StoreError
from schemas.settings import BlobSettings, QdrantSettings, Settings
from tests.ingest.backfilling import backfill, jsonl
from tests.ingest.remote import ConnectRemote, shared
from tests.ingest.world import World

ROWS = 40
THREADS = Runner("local", ("--direct_num_workers=3", "--direct_running_mode=multi_threading"))
PROCESSES = Runner("local", ("--direct_num_workers=2", "--direct_running_mode=multi_processing"))


def job_service():
    """Beam's own in this process: what FlinkRunner does in Python, and no Flink behind it."""
    return Runner("FlinkRunner", ("--job_endpoint=embed",))


def prism():
    found = os.environ.get("KVQUILT_TEST_PRISM") or shutil.which("prism") or Path("~/go/bin/prism").expanduser()
    if not Path(found).is_file():
        pytest.skip(
            "no Prism: go install github.com/apache/beam/sdks/v2/go/cmd/prism@v2.77.0, "
            "or name the binary in KVQUILT_TEST_PRISM"
        )
    return Runner("PrismRunner", (f"--prism_location={found}", "--prism_log_level=warn"))


def flink():
    jar = os.environ.get("KVQUILT_TEST_FLINK_JAR")
    if not jar or shutil.which("java") is None:
        pytest.skip(
            "no Flink: name a jar of Beam's job server for it, such as beam-runners-flink-2.2-job-server-2.77.0.jar, "
            "in KVQUILT_TEST_FLINK_JAR, and have `java` on the path"
        )
    return Runner("FlinkRunner", ("--flink_master=[local]", f"--flink_job_server_jar={jar}"))


@pytest.fixture(
    params=[
        job_service,
        pytest.param(prism, marks=pytest.mark.service),
        pytest.param(flink, marks=[pytest.mark.service, pytest.mark.slow]),
    ]
)
def portable(request):
    """A runner that is given the graph as bytes, through Beam's job service."""
    return request.param()


@pytest.fixture
def rows(tmp_path):
    return jsonl(tmp_path / "a.jsonl", *[{"doc_id": f"a{n}", "content": f"line {n}"} for n in range(ROWS)], b"{no\n")


def tried(runner, job):
    """Prism fails one job in about ten, and then says so; what the first run did, the second one skips."""
    try:
        return job()
    except StoreError:
        if runner.name != "PrismRunner":
            raise
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


def test_a_portable_runner_does_with_the_parts_of_this_process_what_the_local_one_does(world, rows, portable):
    told, locally = [], World()
    assert portable.is_here
    done = tried(portable, lambda: backfill(world, rows, runner=portable, progress=told.append))
    assert told[-1].prefilled == ROWS
    assert_whole(world, done)
    backfill(locally, rows)
    assert world.state() == locally.state()
    locally.close()
    again = tried(portable, lambda: backfill(world, rows, runner=portable))
    assert (again.committed, again.repeated) == (0, ROWS)
    assert len(world.embedder.embedded) == ROWS


@pytest.mark.slow
@pytest.mark.filterwarnings("default::ResourceWarning")
def test_a_portable_runner_runs_the_job_in_a_process_of_its_own(world, rows, portable, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # Beam starts `python`
    runner = replace(portable, options=(*portable.options, "--experiments=use_loopback_process_worker"))
    assert not runner.is_here
    done, pids = tried(runner, lambda: in_processes(world, rows, runner))
    assert_whole(world, done)
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("name", "options", "here"),
    [
        ("PrismRunner", (), True),
        ("FlinkRunner", (), True),
        ("FlinkRunner", ("--flink_master=[local]",), True),
        ("FlinkRunner", ("--flink_master=host:8081",), False),
        ("FlinkRunner", ("--flink_master=host:8081", "--environment_type=LOOPBACK"), True),
        ("FlinkRunner", ("--environment_type=EXTERNAL",), False),
        ("SparkRunner", (), True),
        ("PortableRunner", ("--job_endpoint=host:8099",), False),
    ],
)
def test_workers_are_where_beam_puts_them(name, options, here):
    """Bug: workers here were taken for others with Flink: no progress, and Qdrant's local mode refused."""
    assert Runner(name, options).is_here is here


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
