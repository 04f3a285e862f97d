"""What a schedule runs against: a broker, stores behind gates, and three kvquilt processes that are kept alive."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from bench.chaos import qdrant, s3
from bench.chaos.gate import Gate
from bench.chaos.qdrant import SPACE, QdrantStandIn
from bench.chaos.s3 import BUCKET, KEYS, S3
from bench.chaos.truth import HeadLog
from ingest.parts import Stores
from schemas.errors import StoreError
from schemas.settings import KafkaSettings, QdrantSettings, Settings, load_settings
from stores.blobs import open_blobs
from stores.broker import EmbeddedBroker
from stores.kv_store import KvStore
from stores.topics import Publisher, ensure_topics, lag
from stores.vectors import open_index
from tests.ingest.tiny import make_tiny_model
from tests.services.kafka import ApacheKafka, ServiceAbsentError, free_ports

PROCESSES = ("index", "prefill", "serve")
STORES = ("qdrant", "s3")
PATIENCE_S = 300  # a run takes seconds; a machine that is busy with other things, minutes
_TIMEOUT_S = 1.0  # of a call of Qdrant and of the object store

log = logging.getLogger(__name__)


class Broker(Protocol):
    """What the tests' two brokers have in common; `start` may follow the end of either kind."""

    @property
    def bootstrap(self) -> str: ...  # noqa: D102
    def start(self) -> str: ...  # noqa: D102
    def stop(self) -> None: ...  # noqa: D102


class Rig:
    """Everything a schedule needs, kept from run to run. A context manager.

    Attributes:
        stores: the stores themselves, beside all gates, for the audit.
        counts: kills, restarts of processes, restarts of the broker.
    """

    def __init__(self, folder: Path, broker: str, tenants: Sequence[str], model: str, neighbours: int) -> None:
        self.folder, self.log, self.counts = folder, HeadLog(), Counter[str]()
        folder.mkdir(parents=True, exist_ok=True)
        self._ending = False
        self.broker = _broker(broker, folder / "broker")
        self.broker.start()
        self.qdrant, self.s3 = QdrantStandIn(self.log), S3(folder)
        self.gates: dict[tuple[str, str], Gate] = {}
        for process in PROCESSES:
            self.gates[process, "qdrant"] = Gate(self.qdrant.handle, qdrant.call_name, lambda request: None)
            self.gates[process, "s3"] = Gate(self.s3.handle, s3.call_name, self.s3.broken)
        for gate in self.gates.values():
            gate.on_kill = lambda: self.counts.update(["kills"])
        name = str(make_tiny_model(folder / "model")) if model == "tiny" else model
        (self._port,) = free_ports(1)
        self._values: dict[str, Any] = {
            "data_dir": str(folder / "data"),
            "cache_dir": str(folder / "cache"),
            "kafka": {"bootstrap": self.broker.bootstrap, "partitions": 3},
            "model": {"name": name, "dtype": "float32", "device": "cpu", "threads": 1},
            "chunker": {"max_tokens": 32},
            "ingest": {"backoff_s": 0.05, "poll_s": 0.05},
            "serve": {
                "port": self._port,
                "api_keys": {f"key-{tenant}": tenant for tenant in tenants},
                "tier_check_s": 1.0,
            },
        }
        if neighbours:
            self._values["prefill"] = {"variant": "fused", "neighbours": neighbours, "max_changes_per_day": 32}
        for process in PROCESSES:
            self._write_settings(process)
        self.settings = self._settings()
        self.kafka: KafkaSettings = self.settings.kafka
        ensure_topics(self.kafka)
        self.publisher = Publisher(self.kafka)
        self.stores = self._stores()
        self._pids: dict[str, int] = {}
        self._changed = threading.Condition()
        self._zygote = self._start_zygote()
        for process in PROCESSES:
            self._request(process)
        self.until(self._ready, "the service is not ready")

    @property
    def url(self) -> str:
        """Of the service."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        for pid in self._pids.values():
            _kill(pid)
        self._zygote.wait(30)
        self.publisher.close()
        self.stores.index.close()
        self.qdrant.connection.close()
        self.broker.stop()
        self.s3.close()
        for gate in self.gates.values():
            gate.close()

    def kill(self, process: str) -> None:
        """Kill -9; the supervisor starts it again."""
        with self._changed:
            pid = self._pids.get(process)
        if pid is not None:
            self.counts["kills"] += 1
            _kill(pid)

    def restart_broker(self) -> None:
        """Kill -9 of the broker, and a new start over the same data."""
        self.counts["broker_restarts"] += 1
        if isinstance(self.broker, ApacheKafka):
            self.broker.kill()
        else:
            _kill(self.broker.pid)  # type: ignore[attr-defined]
            self.broker.wait()  # type: ignore[attr-defined]
        self.broker.start()

    def clear(self) -> None:
        """No more faults."""
        for gate in self.gates.values():
            gate.clear()

    def lag(self, pipeline: str) -> int:
        """Offsets that a pipeline has not committed."""
        topic = self.kafka.documents_topic if pipeline == "index" else self.kafka.commits_topic
        return lag(self.kafka, self.kafka.group_of(pipeline), topic)

    def drained(self) -> bool:
        """Whether both pipelines have committed everything there is; index again, since prefill's end comes last."""
        try:
            return not (self.lag("index") or self.lag("prefill"))
        except StoreError:
            return False

    def drain(self) -> None:
        """Wait for that.

        Raises:
            RuntimeError: it does not come.
        """
        self.until(self.drained, "the pipelines are behind")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"after {PATIENCE_S} s still: {what}; the logs are in {self.folder}")
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def _settings(self) -> Settings:
        stores = {"blobs": self._blobs(self.s3.url), "qdrant": {}}
        return load_settings(self._values | stores)

    def _blobs(self, endpoint: str) -> dict[str, Any]:
        options = KEYS | {"endpoint": endpoint, "timeout": f"{_TIMEOUT_S:.0f} seconds"}
        return {"url": f"s3://{BUCKET}/chaos", "options": options}

    def _write_settings(self, process: str) -> None:
        values = self._values | {
            "qdrant": {"url": self.gates[process, "qdrant"].url, "timeout_s": _TIMEOUT_S},
            "blobs": self._blobs(self.gates[process, "s3"].url),
        }
        values["kafka"] = values["kafka"] | {"group_instance_id": process}
        (self.folder / f"{process}.yaml").write_text(yaml.safe_dump(values))

    def _stores(self) -> Stores:
        from engine import resolve_generation

        generation = resolve_generation(self.settings).generation
        blobs = open_blobs(self.settings.blobs_url, self.settings.blobs.options)
        index = open_index(QdrantSettings(), SPACE, generation.name, generation.embedding_dim)
        return Stores(self.settings, generation, index, KvStore(blobs, generation.name), self.publisher)

    def _start_zygote(self) -> subprocess.Popen[str]:
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVQUILT_")} | threads
        with (self.folder / "zygote.log").open("w") as errors:
            zygote = subprocess.Popen(
                [sys.executable, "-m", "bench.chaos.zygote", str(self.folder / "index.yaml")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                bufsize=1,
            )
        assert zygote.stdout is not None
        if zygote.stdout.readline() != "ready\n":
            raise RuntimeError(f"the zygote did not start: {(self.folder / 'zygote.log').read_text()[-1000:]}")
        threading.Thread(target=self._supervise, args=(zygote,), daemon=True).start()
        return zygote

    def _request(self, process: str) -> None:
        command = "serve" if process == "serve" else f"ingest {process}"
        assert self._zygote.stdin is not None
        settings, out = self.folder / f"{process}.yaml", self.folder / f"{process}.log"
        self._zygote.stdin.write(f"{process} {settings} {out} {command}\n")
        self._zygote.stdin.flush()

    def _supervise(self, zygote: subprocess.Popen[str]) -> None:
        """Start again what ended, as an init system does."""
        assert zygote.stdout is not None
        for line in zygote.stdout:
            what, process, *numbers = line.split()
            with self._changed:
                if what == "started":
                    self._pids[process] = pid = int(numbers[0])
                    for store in STORES:
                        self.gates[process, store].pid = pid
                    continue
                self._pids.pop(process, None)
            if self._ending:
                continue
            self.counts["restarts"] += 1
            log.info("%s ended with %s", process, numbers[1])
            self._request(process)


def _broker(kind: str, folder: Path) -> Broker:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "embedded":
        return EmbeddedBroker(folder)
    try:
        return ApacheKafka(folder)
    except ServiceAbsentError as absent:
        if kind == "apache":
            raise
        print(f"{absent}; the embedded broker takes its place", file=sys.stderr)
        return EmbeddedBroker(folder)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
