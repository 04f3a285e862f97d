"""One process for one data folder, and the others find it."""

import os
import signal
import subprocess
import sys

import pytest

from cli.running import DEFAULT_URL, DataFolder, service_url, with_broker
from schemas.errors import InputError, SettingsError
from schemas.settings import load_settings

HOLD = """
import sys, time
from pathlib import Path
from cli.running import DataFolder
with DataFolder(Path(sys.argv[1])).hold() as folder:
    folder.announce("http://127.0.0.1:9", "127.0.0.1:10")
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def settings(tmp_path, **more):
    return load_settings({"data_dir": str(tmp_path), **more})


def test_a_folder_in_use_is_refused_with_the_process_that_uses_it(tmp_path, holder):
    with (
        pytest.raises(InputError, match=f"is in use by process {holder.pid}; stop it, or name another"),
        DataFolder(tmp_path).hold(),
    ):
        pytest.fail("two processes would have written the same index")


def test_other_commands_find_service_and_broker(tmp_path, holder):
    assert service_url(settings(tmp_path)) == "http://127.0.0.1:9"
    assert with_broker(settings(tmp_path)).kafka.bootstrap == "127.0.0.1:10"


def test_what_is_named_explicitly_wins(tmp_path, holder):
    named = settings(tmp_path, client={"url": "http://elsewhere/"}, kafka={"bootstrap": "kafka:9092"})
    assert service_url(named) == "http://elsewhere"
    assert with_broker(named).kafka.bootstrap == "kafka:9092"


def test_a_killed_process_leaves_nothing_that_others_would_believe(tmp_path, holder):
    """Bug: a stale file sent every later command to a port on which something else may listen."""
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "running.json").exists()
    assert service_url(settings(tmp_path)) == DEFAULT_URL
    with pytest.raises(SettingsError, match="no `kvquilt up` runs with data_dir"):
        with_broker(settings(tmp_path))
    with DataFolder(tmp_path).hold():
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be used: "), DataFolder(tmp_path / "file" / "data").hold():
        pytest.fail("there is no such folder")
