"""The app behind a socket: in the main thread until a signal comes, or in a thread of a larger process."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from schemas.errors import KvquiltError, SettingsError
from schemas.settings import Settings
from serve.app import create_app
from serve.parts import Parts
from serve.service import State

DRAIN_S = 10.0  # how long open answers may go on after the signal; half of that again to say that they were cut off


def run(
    settings: Settings,
    parts: Parts | Callable[[], Parts] | None = None,
    *,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; returns after open answers were drained.

    Args:
        parts: as in `create_app`.
        on_listening: gets the address once the socket listens.

    Raises:
        SettingsError: the address cannot be listened on.
        KvquiltError: the parts cannot be built.
    """
    listener = _listen(settings)
    server: _Server

    def fail() -> None:
        server.should_exit = True

    app = create_app(settings, parts, on_failure=fail)
    server = _Server(app)
    if on_listening is not None:
        on_listening(_address(settings, listener))
    server.run(sockets=[listener])
    state: State = app.state.kvquilt
    if state.readiness.failure is not None:
        raise state.readiness.failure


class BackgroundServer:
    """The service in a thread, as in `kvquilt up`. A context manager; `stop` may be called twice.

    Args:
        parts, registry: as in `create_app`.
        drain_s: how long open answers may go on after `stop`.

    Attributes:
        url: where it listens, once started.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Parts | Callable[[], Parts] | None = None,
        *,
        registry: CollectorRegistry | None = None,
        drain_s: float = DRAIN_S,
    ) -> None:
        self.app = create_app(settings, parts, registry=registry)
        self._settings = settings
        self._server = _Server(self.app, drain_s)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._listener: socket.socket | None = None
        self.url = ""

    def start(self) -> str:
        """Listen, and return the address; the model may still be loading (`/readyz` tells).

        Raises:
            SettingsError: the address cannot be listened on.
        """
        self._listener = _listen(self._settings)
        self.url = _address(self._settings, self._listener)
        self._thread.start()
        self._server.startup_ended.wait()
        if not self._server.started:
            raise KvquiltError("the HTTP service ended while it started; its log says why")
        return self.url

    def stop(self) -> None:
        """Drain open answers, then let go of the socket."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _serve(self) -> None:
        assert self._listener is not None
        self._server.run(sockets=[self._listener])


class _Server(uvicorn.Server):
    """Tells when it accepts connections, or has failed to, and open answers when their time is over."""

    def __init__(self, app: FastAPI, drain_s: float = DRAIN_S) -> None:
        last_s = math.ceil(1.5 * drain_s)  # then tasks are cancelled
        super().__init__(
            uvicorn.Config(app, lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=last_s)
        )
        self.startup_ended = threading.Event()
        self._state: State = app.state.kvquilt
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.startup_ended.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        over = asyncio.get_running_loop().call_later(self._drain_s, self._state.stopped.set)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()


def _listen(settings: Settings) -> socket.socket:
    host, port = settings.serve.host, settings.serve.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; set serve.host and serve.port"
        ) from error


def _address(settings: Settings, listener: socket.socket) -> str:
    host = settings.serve.host
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
