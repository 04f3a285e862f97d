"""`kvquilt up` as a child process of the demo, as a newcomer would start it in another terminal."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from cli.running import DataFolder, Running
from cli.service import Service
from schemas.errors import KvquiltError

READY_TIMEOUT_S = 600.0  # the first run converts the packaged model and measures which dtype is fastest
STOP_TIMEOUT_S = 60.0


class Up:
    """A `kvquilt up` over a folder of its own, on free ports. A context manager; leaving it drains the child."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.log = folder / "up.log"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Up:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvquilt", "up", "--data-dir", str(self.folder), "--port", "0", *self._options]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the child."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(self) -> Running:
        """Return when `/readyz` says so.

        Raises:
            KvquiltError: the child ended, or took too long; with the end of its log.
        """
        assert self._process is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise KvquiltError(f"`kvquilt up` ended with code {self._process.returncode}:\n{self.log_end()}")
            running = DataFolder(self.folder).running()
            if running is not None and _ready(running.url):
                return running
            time.sleep(0.2)
        raise KvquiltError(f"`kvquilt up` is not ready after {READY_TIMEOUT_S:.0f} s:\n{self.log_end()}")

    def stop(self) -> int:
        """Ask it to drain and end; returns its exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode

    def log_end(self, lines: int = 15) -> str:
        """The last lines that it logged."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def peak_bytes(self) -> int | None:
        """Most memory that the child and its own children had, added up; None where there is no /proc."""
        pids = [self.pid, *_children(self.pid)]
        peaks = [_peak(pid) for pid in pids]
        return sum(peak for peak in peaks if peak) or None


def _ready(url: str) -> bool:
    try:
        with Service(url, timeout_s=5) as service:
            service.check_ready()
    except KvquiltError:
        return False
    return True


def _children(pid: int) -> list[int]:
    try:
        lists = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for text in lists for child in text.split()]


def _peak(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
