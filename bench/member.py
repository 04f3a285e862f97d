"""Processes of one pipeline, over fake models, a real broker and an index that another process serves.

Each is as `kvquilt ingest index|prefill`, and all of them share a group: `Members` starts them from one process that
has imported everything, and they are its forks. SIGTERM drains one; the end of our stdin ends all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from schemas.settings import KafkaSettings, Settings
from stores.index_server import Address, RemoteIndex


class Members:
    """`n` processes of one pipeline while the block runs; entering waits until all of them read.

    Args:
        model_s: how long the fake model takes for each call.
        ingest: settings of `IngestSettings`.
    """

    def __init__(
        self,
        pipeline: str,
        n: int,
        kafka: KafkaSettings,
        data_dir: Path,
        index: Address,
        model_s: float = 0.0,
        **ingest: Any,
    ) -> None:
        self._told: dict[str, Any] = {"pipeline": pipeline, "n": n, "kafka": kafka.model_dump(), "index": index}
        self._told |= {"data_dir": str(data_dir), "model_s": model_s, "ingest": {"poll_s": 0.1} | ingest}
        self.pids: list[int] = []

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "bench.member", json.dumps(self._told)]
        self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(self._told["n"]):
            self.pids.append(int(self._said("reading")))
        return self

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to one of them."""
        os.kill(pid, number)

    def ended(self) -> tuple[int, int]:
        """Wait for the next one that ends: its process id and its exit code, negative for a signal."""
        pid, code = self._said("ended").split()
        return int(pid), int(code)

    def __exit__(self, *_: object) -> None:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.stdout.read()
        self._parent.stdout.close()
        self._parent.wait()

    def _said(self, word: str) -> str:
        assert self._parent.stdout is not None
        line = self._parent.stdout.readline()
        if not line.startswith(word):
            raise RuntimeError(f"a member said {line!r} instead of {word!r}")
        return line.removeprefix(word)


def main(told: dict[str, Any]) -> None:
    """Fork the members, tell how they end, and kill what is left at the end of stdin."""
    import ingest.fake_parts
    import ingest.run  # noqa: F401 # before the forks, so that it is done once

    pids = []
    for _ in range(told["n"]):
        pid = os.fork()
        if pid == 0:
            os._exit(_forked(told))
        pids.append(pid)
    threading.Thread(target=_kill_at_the_end, args=(pids,), daemon=True).start()
    for _ in pids:
        pid, status = os.wait()
        _say(f"ended {pid} {os.waitstatus_to_exitcode(status)}")


def _kill_at_the_end(pids: list[int]) -> None:
    sys.stdin.read()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _forked(told: dict[str, Any]) -> int:
    try:
        _run(told)
    except BaseException as error:
        _say(f"failed {os.getpid()} {error!r}")
        return 1
    return 0


def _run(told: dict[str, Any]) -> None:
    from ingest import run_index, run_prefill
    from ingest.fake_parts import fake_index_parts, fake_prefill_parts
    from ingest.fakes import FakeEmbedder, FakePrefiller
    from ingest.handles import held

    settings = Settings(kafka=KafkaSettings(**told["kafka"]), data_dir=Path(told["data_dir"]), ingest=told["ingest"])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=_say_when_reading, daemon=True).start()
    index, model_s = RemoteIndex(tuple(told["index"])), told["model_s"]

    def work(_: Any) -> None:
        time.sleep(model_s)

    if told["pipeline"] == "index":
        with held(fake_index_parts(settings, index, FakeEmbedder(fails=work))) as parts:
            run_index(settings, stop, parts)
    else:
        with held(fake_prefill_parts(settings, index, FakePrefiller(fails=work))) as prefill:
            run_prefill(settings, stop, prefill)


def _say_when_reading() -> None:
    from ingest import health

    while (why := health.not_ready()) is not None and "catching up" not in why:
        time.sleep(0.05)
    _say(f"reading {os.getpid()}")


def _say(line: str) -> None:
    """One write for the whole line: several processes have this pipe."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
