"""Starts ingest processes quickly: imports everything once, then forks on request. Run as `python -m`.

Importing torch, Beam and transformers takes longer than a life between two kills should. Each line on stdin is a
request, each line on stdout the answer: `start` -> pid of a process that runs both pipelines until SIGTERM, `wait PID`
-> its exit code (negative: the signal that ended it).
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def run(settings_file: str) -> int:
    """Both pipelines, as threads of one process, as `kvquilt up` has them."""
    from pathlib import Path

    from ingest import run_index, run_prefill
    from schemas.settings import load_settings

    settings = load_settings(file=Path(settings_file))
    stop, failures = threading.Event(), []
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def guarded(pipeline) -> None:
        try:
            pipeline(settings, stop)
        except BaseException as error:
            failures.append(error)
            stop.set()
            raise

    threads = [threading.Thread(target=guarded, args=(pipeline,)) for pipeline in (run_index, run_prefill)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if failures else 0


def main() -> None:
    """Serve requests until stdin ends."""
    import sentence_transformers

    import engine.embedder
    import engine.model
    import ingest.run
    import stores.vectors

    del sentence_transformers, engine, ingest, stores
    print("ready", flush=True)
    for request in sys.stdin:
        match request.split():
            case ["start"]:
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        code = run(sys.argv[1])
                    finally:
                        os._exit(code)
                print(pid, flush=True)
            case ["wait", pid]:
                print(os.waitstatus_to_exitcode(os.waitpid(int(pid), 0)[1]), flush=True)


if __name__ == "__main__":
    main()
