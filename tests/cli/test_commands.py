"""The program as a person meets it: help, one sentence for what is wrong, and an exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def kvquilt(*arguments, **environment):
    bare = {name: value for name, value in os.environ.items() if not name.startswith("KVQUILT_")}
    return subprocess.run(
        [sys.executable, "-m", "kvquilt", *arguments], capture_output=True, text=True, cwd=ROOT, env=bare | environment
    )


def test_help_lists_the_commands():
    result = kvquilt("--help")
    assert result.returncode == 0
    for name in ("up", "publish", "ask", "ingest", "backfill", "serve", "doc", "kv", "doctor"):
        assert f" {name} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ask", "why?", "--url", "http://127.0.0.1:9"), "no service at http://127.0.0.1:9"),
        (("ask", "why?", "--mode", "fast"), "--mode fast is not one of exact, blend, reuse"),
        (("publish", "absent.md", "--bootstrap", "127.0.0.1:9"), "absent.md does not exist"),
        (("doc", "status", "x", "--config", "absent.yaml"), "settings file absent.yaml cannot be read"),
        (("doc", "receipt", "x", "--wait", "--timeout", "inf"), "timeout: expected a finite number (got inf)"),
        (("eval", "ruler", "--budget", "0.1", "--budget", "nan"), "budgets: expected a finite number (got nan)"),
        (("ask", "why?", "--set", "client.timeout_s=inf"), "client.timeout_s: Input should be a finite number"),
        (("ask", b"bad \xff"), "argument 'bad \\udcff' is not UTF-8 at character 4"),
        (("doc", "status", b"\xff"), "argument '\\udcff' is not UTF-8"),
        (("doc", "delete", "--filter", b"a=\xff"), "argument 'a=\\udcff' is not UTF-8"),
        (("publish", b"\xff.md"), "argument '\\udcff.md' is not UTF-8"),
        (("ask", "why?", b"--\xff"), "argument '--\\udcff' is not UTF-8"),
        (("up", "--set", "model.dtype=int3"), "model.dtype: Input should be 'auto'"),
        (("serve", "--port", "70000"), "serve.port: Input should be less than or equal to 65535"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_status_1(arguments, said, tmp_path):
    """Bug: a traceback of forty lines told people that a port was taken."""
    result = kvquilt(*arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("kvquilt: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_wrong_variable_of_the_environment_stops_the_start():
    result = kvquilt("doc", "status", "x", KVQUILT_SERVR__PORT="1")
    assert result.returncode == 1
    assert "KVQUILT_SERVR__PORT names no setting" in result.stderr


def test_publishing_without_a_broker_says_what_to_do(tmp_path):
    (tmp_path / "a.md").write_text("text")
    result = kvquilt("publish", str(tmp_path / "a.md"), "--data-dir", str(tmp_path))
    assert result.returncode == 1
    assert "no `kvquilt up` runs with data_dir" in result.stderr


def test_an_unknown_option_is_exit_status_2():
    assert kvquilt("up", "--prot", "1").returncode == 2


@pytest.mark.slow
def test_doctor_says_what_is_off_without_a_running_system(tmp_path):
    result = kvquilt("doctor", "--data-dir", str(tmp_path), "--format", "json", "-q")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["torch"]["state"] == "ok"
    assert checks["broker"] == {"name": "broker", "state": "off", "says": "embedded; it runs with `kvquilt up`"}
    assert checks["service"]["state"] == "off"
