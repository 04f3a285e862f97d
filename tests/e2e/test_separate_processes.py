"""The commands that run apart: `backfill`, `ingest index`, `ingest prefill`, `serve`; each ends well on SIGTERM."""

import json
import re
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.service import Service
from schemas.errors import KvquiltError
from schemas.settings import KafkaSettings
from stores import EmbeddedBroker, Publisher, ensure_topics, lag
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.slow


def command(*arguments, data, model, bootstrap=None):
    options = ["--data-dir", str(data), "--set", f"model.name={model}", "--set", "model.dtype=float32"]
    if bootstrap is not None:
        options += ["--set", f"kafka.bootstrap={bootstrap}"]
    return [sys.executable, "-m", "kvquilt", *arguments, *options]


class Running:
    """A command as a child process, its log in a file."""

    def __init__(self, log, arguments):
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=ROOT)

    def until(self, condition, timeout_s=180):
        deadline = time.monotonic() + timeout_s
        while not (reached := condition()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)
        return reached

    def terminate(self):
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(60)


@pytest.fixture
def broker():
    broker = EmbeddedBroker()
    yield broker.start()
    broker.stop()


def test_backfill_takes_lines_and_parquet_and_a_second_run_does_nothing(tmp_path, tiny_model):
    lines, table = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    rows = [{"doc_id": f"l{n}", "version": 1, "content": f"Lamp {n} is green."} for n in range(2)]
    lines.write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.table({"doc_id": ["p0"], "version": [1], "content": ["The door is blue."]}), table)
    backfill = command("backfill", str(lines), str(table), "--format", "json", "-q", data=tmp_path, model=tiny_model)
    outcomes, objects = [], []
    for _ in range(2):
        done = subprocess.run(backfill, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        outcomes.append(json.loads(done.stdout))
        objects.append({file: file.stat().st_mtime_ns for file in (tmp_path / "blobs").rglob("*.safetensors")})
    first, second = outcomes
    assert (first["total"], first["committed"], first["prefilled"], first["dead"]) == (3, 3, 3, 0)
    assert (second["committed"], second["repeated"], second["dead"]) == (0, 3, 0)
    assert len(objects[0]) == 3
    assert objects[1] == objects[0], "nothing was written again"


def test_pipelines_and_service_in_processes_of_their_own_end_with_0_on_sigterm(tmp_path, tiny_model, broker):
    """One after the other: the local index belongs to one process at a time."""
    kafka = KafkaSettings(bootstrap=broker)
    ensure_topics(kafka)
    with Publisher(kafka) as publisher:
        publisher.publish(kafka.documents_topic, b"d", b'{"content": "The lamp in the hall is green."}')
    options = {"data": tmp_path, "model": tiny_model, "bootstrap": broker}
    for name, topic in (("index", kafka.documents_topic), ("prefill", kafka.commits_topic)):
        running = Running(tmp_path / f"{name}.log", command("ingest", name, **options))
        group = f"{kafka.group}.{name}"
        running.until(lambda group=group, topic=topic: lag(kafka, group, topic) == 0)
        assert running.terminate() == 0, running.log.read_text()

    running = Running(tmp_path / "serve.log", command("serve", "--port", "0", **options))
    url = running.until(lambda: re.search(r"listening on (http://\S+)", running.log.read_text()))[1]
    with Service(url, timeout_s=30) as service:
        running.until(lambda: _ready(service))
        answer = service.post("/v1/answer", {"question": "What colour is the lamp?", "max_tokens": 2})
    assert [(cited["doc_id"], cited["source"]) for cited in answer["citations"]] == [("d", "cached")]
    assert running.terminate() == 0, running.log.read_text()


def _ready(service):
    try:
        service.check_ready()
    except KvquiltError:
        return False
    return True
