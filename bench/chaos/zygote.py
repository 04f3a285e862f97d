"""Starts `kvquilt` commands quickly: imports and loads everything once, then forks.

Run as `python -m bench.chaos.zygote SETTINGS`. What is loaded before is what every command loads and no command
changes: the weights of both models, by the same memoised functions that the commands call.
Each line on stdin is a request, `NAME SETTINGS LOG ARGUMENT…`; lines on stdout tell what happened: `started NAME PID`,
`ended NAME PID CODE` (negative: the signal that ended it).
"""

from __future__ import annotations

import os
import select
import sys
import threading
from pathlib import Path


def _child(settings: str, log: str, arguments: list[str]) -> int:
    os.environ["KVQUILT_CONFIG_FILE"] = settings
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(out, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["kvquilt", *arguments]
    import kvquilt

    try:
        kvquilt.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def _watch_parent() -> None:
    """Children of a zygote that is gone must go too."""
    import time

    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(9)


def main() -> None:
    """Serve requests until stdin ends."""
    import cli.pipelines
    import cli.serve
    import ingest.run
    import kvquilt
    import serve.app
    import stores.vectors
    from engine import load_embedder, load_model, resolve_generation
    from schemas.settings import load_settings

    settings_of_all = load_settings(file=Path(sys.argv[1]))
    load_embedder(settings_of_all.embedder, settings_of_all.cache_folder)
    load_model(settings_of_all.model, settings_of_all.cache_folder)
    resolve_generation(settings_of_all)
    del cli, ingest, serve, stores, kvquilt
    print("ready", flush=True)
    children: dict[int, str] = {}
    requests = os.fdopen(0, "rb", buffering=0)  # select sees what is left to read
    while True:
        readable, _, _ = select.select([requests], [], [], 0.02)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            print(f"ended {children.pop(pid)} {pid} {os.waitstatus_to_exitcode(status)}", flush=True)
        if not readable:
            continue
        line = requests.readline().decode()
        if not line:
            return
        name, settings, log, *arguments = line.split()
        pid = os.fork()
        if pid == 0:
            threading.Thread(target=_watch_parent, daemon=True).start()
            code = 1
            try:
                code = _child(settings, log, arguments)
            finally:
                os._exit(code)
        children[pid] = name
        print(f"started {name} {pid}", flush=True)


if __name__ == "__main__":
    main()
