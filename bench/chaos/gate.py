"""The way of one process to one store, over HTTP: every call can fail, lie, dawdle, tear, or be the process's last.

Each process has a gate of its own to each store, so a fault is of one process, as a broken network is.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ERROR, NO_REPLY, HANG, SLOW, TORN, KILL, KILL_AFTER = (
    "error",  # refused: 503, no effect
    "no reply",  # the effect happens, the connection breaks
    "hang",  # the effect happens, the answer comes after the client's patience
    "slow",  # the call waits, then goes on
    "torn",  # half of the request reaches the store, or half of the answer the process
    "kill",  # kill -9 of the process, before the effect
    "kill after",  # and after it
)


@dataclass(frozen=True)
class Request:
    """What came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """What goes back."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Fault:
    """One fault that waits for its call.

    Attributes:
        call: the name of a call, as `name` gives it; "" is any.
        after: how many calls of that name pass first.
        times: how many it is for.
    """

    kind: str
    call: str
    after: int = 0
    times: int = 1
    seconds: float = 0.0


@dataclass
class Gate:
    """Listens on a port of its own and passes on what no fault is due for.

    Args:
        handle: the store.
        name: of a call.
        broken: sends half of a request on and breaks off.
    """

    handle: Callable[[Request], Reply]
    name: Callable[[Request], str]
    broken: Callable[[Request], None]
    pid: int | None = None  # of the process that is behind it now
    done: Counter[str] = field(default_factory=Counter)
    on_kill: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        gate = self

        class Handler(_Handler):
            pass

        Handler.gate = gate
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    @property
    def url(self) -> str:
        """Where the process finds its store."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, fault: Fault) -> None:
        """Have it wait for its call."""
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """From here on everything works."""
        with self._lock:
            self._faults.clear()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def due(self, request: Request) -> Fault | None:
        """The fault of this call, used up."""
        call = self.name(request)
        with self._lock:
            for fault in self._faults:
                if fault.call not in ("", call):
                    continue
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                if fault.times == 0:
                    self._faults.remove(fault)
                self.done[fault.kind] += 1
                return fault
        return None

    def kill(self) -> None:
        """End the process behind it as nothing can prevent."""
        if self.pid is not None:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            self.on_kill()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed breaks its connection off: that is what the gate is for."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    gate: Gate
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def _any(self) -> None:
        try:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            self._serve(Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        except OSError:  # the process is gone, or gave up
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _any  # noqa: N815

    def _serve(self, request: Request) -> None:
        gate, fault = self.gate, self.gate.due(request)
        kind = fault.kind if fault is not None else ""
        if kind == ERROR:
            self._reply(Reply(503, {"content-type": "text/plain"}, b"out of order, on purpose"))
            return
        if kind == KILL:
            gate.kill()
            self._break()
            return
        if kind == TORN and request.body:
            gate.broken(request)
            self._break()
            return
        if kind == SLOW and fault is not None:
            time.sleep(fault.seconds)
        reply = gate.handle(request)
        if kind == KILL_AFTER:
            gate.kill()
        if kind == HANG and fault is not None:
            time.sleep(fault.seconds)
        if kind in (NO_REPLY, HANG, KILL_AFTER):
            self._break()
        elif kind == TORN:
            self._reply(reply, len(reply.body) // 2)
            self._break()
        else:
            self._reply(reply)

    def _reply(self, reply: Reply, nbytes: int | None = None) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if "content-length" not in reply.headers:
            self.send_header("content-length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body if nbytes is None else reply.body[:nbytes])
        self.wfile.flush()

    def _break(self) -> None:
        self.close_connection = True
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
