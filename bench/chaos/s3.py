"""The object store: moto's S3 server in a child process, and requests passed on to it."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from bench.chaos.gate import Reply, Request

BUCKET = "chaos"
KEYS = {"region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}
_HOP = ("connection", "transfer-encoding", "keep-alive", "host")


class S3:
    """The server; ends with `close`."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        with (folder / "moto.log").open("wb") as log:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._local = threading.local()
        self._wait()
        self.handle(Request("PUT", f"/{BUCKET}", {}, b""))

    @property
    def url(self) -> str:
        """The endpoint itself, without a gate."""
        return f"http://127.0.0.1:{self.port}"

    def handle(self, request: Request) -> Reply:
        """Pass a request on; one connection per thread."""
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        for last in (False, True):
            connection = getattr(self._local, "connection", None)
            if connection is None or last:
                connection = self._local.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            try:
                connection.request(request.method, request.path, request.body or None, headers)
                answer = connection.getresponse()
                body = answer.read()
                break
            except (http.client.HTTPException, OSError):
                if last:
                    raise
        kept = {name.lower(): value for name, value in answer.getheaders() if name.lower() not in _HOP}
        if request.method != "HEAD":
            kept.pop("content-length", None)
        return Reply(answer.status, kept, body)

    def broken(self, request: Request) -> None:
        """Send the head and half of the body, then break the connection off."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as raw:
            headers = "".join(f"{k}: {v}\r\n" for k, v in request.headers.items() if k not in _HOP)
            raw.sendall(f"{request.method} {request.path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}\r\n".encode())
            raw.sendall(request.body[: len(request.body) // 2])

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _wait(self) -> None:
        end = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError("moto's S3 server did not start; is it installed?")


def call_name(request: Request) -> str:
    """`put`, `get`, `head`, `list` or `delete`."""
    asked = urlsplit(request.path)
    if request.method == "GET" and ("list-type" in parse_qs(asked.query) or asked.path.count("/") < 2):
        return "list"
    if request.method == "POST":
        return "delete"
    return request.method.lower()
