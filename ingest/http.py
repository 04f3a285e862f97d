"""`/healthz`, `/readyz` and `/metrics` of a process that serves nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ingest.health import not_ready, remarks
from schemas.errors import SettingsError

_TEXT = "text/plain; charset=utf-8"


class HealthServer:
    """Listens while its block runs, in threads of its own.

    Args:
        port: 0 takes a free one.
        reason: why the process is not ready; None where it is.

    Raises:
        SettingsError: on entering; the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, reason: Callable[[], str | None] = not_ready) -> None:
        self._address, self._reason = (host, port), reason
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self.url = ""

    def __enter__(self) -> Self:
        reason = self._reason

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body, kind = _answer(self.path.partition("?")[0], reason)
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes come every few seconds: nothing is logged."""

        host, port = self._address
        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise SettingsError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; set ingest.http_host and ingest.http_port"
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


def _answer(path: str, reason: Callable[[], str | None]) -> tuple[int, bytes, str]:
    if path == "/healthz":
        return 200, b"ok\n", _TEXT
    if path == "/metrics":
        return 200, generate_latest(), CONTENT_TYPE_LATEST
    if path != "/readyz":
        return 404, b"there are /healthz, /readyz and /metrics\n", _TEXT
    why = reason()
    if why is not None:
        return 503, f"{why}\n".encode(), _TEXT
    return 200, "; ".join(["ready", *remarks()]).encode() + b"\n", _TEXT
