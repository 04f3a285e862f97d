"""A real Apache Kafka for tests, without Docker: jars from Maven, one node in KRaft mode on free loopback ports."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from stores.broker import kill_when_we_end

POM = Path(__file__).with_name("pom.xml")
CACHE = Path("~/.cache/kvquilt/test-services").expanduser()
READY_TIMEOUT_S = 90
JVM = ["-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]  # start quickly on two busy cores
QUIET = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"

PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={logs}
offsets.topic.num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
auto.create.topics.enable=false
log.cleaner.backoff.ms=500
"""


class ServiceAbsentError(Exception):
    """The service cannot run here; the message is the reason to skip."""


class ApacheKafka:
    """One broker in a folder. `start` may follow `stop` or `kill`: same port, same data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._controller = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._classpath = f"{jars()}/*"

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> str:
        if self._process is not None and self._process.poll() is None:
            return self.bootstrap
        config = self.folder / "kraft.properties"
        if not config.exists():
            logs = self.folder / "logs"
            config.write_text(PROPERTIES.format(port=self.port, controller=self._controller, logs=logs))
            cluster = self._tool("random-uuid").strip().splitlines()[-1]
            self._tool("format", "--standalone", "-t", cluster, "-c", str(config))
        log = self.folder / "kafka.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["java", *JVM, QUIET, "-cp", self._classpath, "kafka.Kafka", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._watcher = kill_when_we_end(self._process.pid)
        self._wait_ready(log)
        return self.bootstrap

    def stop(self) -> None:
        """An orderly shutdown."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process, watcher, self._process, self._watcher = self._process, self._watcher, None, None
        if watcher is not None:
            watcher.kill()
            watcher.wait()
            if watcher.stdin:
                watcher.stdin.close()
        if process is not None:
            process.send_signal(number)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _tool(self, *arguments: str) -> str:
        command = ["java", *JVM, QUIET, "-cp", self._classpath, "kafka.tools.StorageTool", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=READY_TIMEOUT_S).stdout

    def _wait_ready(self, log: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        said = log.read_text(errors="replace")[-2000:]
        self.kill()
        raise RuntimeError(f"Apache Kafka did not start on {self.bootstrap}: {said}")


def jars() -> Path:
    """The folder of Kafka's jars; fetched by Maven once per pom, below the user's cache folder."""
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            raise ServiceAbsentError(f"Apache Kafka needs Java 17+ and Maven; there is no `{tool}` on the PATH")
    folder = CACHE / f"kafka-{hashlib.sha256(POM.read_bytes()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=CACHE) as temporary:
        shutil.copy(POM, temporary)
        libs = Path(temporary) / "libs"
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={libs}"]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, timeout=280, check=False)
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            raise ServiceAbsentError(f"Maven could not fetch Apache Kafka: {said[0][:300]}")
        try:
            os.replace(libs, folder)
        except OSError:  # another run was quicker
            if not folder.is_dir():
                raise
    return folder


def free_ports(n: int) -> list[int]:
    """Distinct ports that nothing listens on now."""
    probes = [socket.socket() for _ in range(n)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
