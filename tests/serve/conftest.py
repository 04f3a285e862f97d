"""Services over in-memory stores: in this process (`client`) and behind a socket (`live`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas.settings import Settings, load_settings
from serve import BackgroundServer
from tests.serve.fakes import Bench, make_bench


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(
        {"data_dir": tmp_path, "kafka": {"bootstrap": "nowhere:9092"}, "serve": {"port": 0, "max_tokens": 16}}
    )


@pytest.fixture
def bench(settings: Settings, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = make_bench(str(abs(hash(request.node.nodeid))), settings)
    yield made
    made.model.hold.set()
    made.blobs.gate.set()
    made.parts.close()


@pytest.fixture
def start(settings: Settings, bench: Bench) -> Iterator[Callable[..., httpx.Client]]:
    """Starts the service on a socket, with settings of `serve` changed, and gives a client of it."""
    with ExitStack() as stack:

        def _start(**serve: Any) -> httpx.Client:
            changed = settings.model_copy(update={"serve": settings.serve.model_copy(update=serve)})
            server = stack.enter_context(BackgroundServer(changed, bench.parts))
            stack.callback(lambda: (bench.model.hold.set(), bench.blobs.gate.set()))
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=30))
            client.kvquilt = server.app.state.kvquilt  # the state behind it
            return client

        yield _start


@pytest.fixture
def client(start: Callable[..., httpx.Client]) -> httpx.Client:
    return start()
