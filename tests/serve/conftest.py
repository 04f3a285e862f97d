"""Services over in-memory stores: in this process (`client`) and behind a socket (`live`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.variants import VARIANTS
from schemas.chunk import Fusion, Neighbour
from schemas.ids import DocumentKey
from schemas.kv_artifact import NeighbourName
from schemas.settings import Settings, load_settings
from serve import BackgroundServer
from serve.errors import NotReadyError
from tests.serve.fakes import Bench, make_bench, until


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
            with suppress(NotReadyError):  # the first question waits for this, too, but not for long
                until(lambda: client.kvquilt.service.tiers._told.is_set(), "the replica's first word")
            return client

        yield _start


@pytest.fixture
def client(start: Callable[..., httpx.Client]) -> httpx.Client:
    return start()


@pytest.fixture
def fused(bench: Bench) -> Bench:
    """A document of three chunks, each fused with the one chunk of `near`, which no question finds."""
    document = DocumentKey("default", "near")
    object.__setattr__(bench.parts, "variant", VARIANTS["fused"])
    (near,) = bench.corpus.put("near", "Unlike anything else.")
    chunks = bench.corpus.put("lake", "The lake is deep.", "The lake is deep and cold.", "The lake is deep and blue.")
    for chunk in chunks:
        key = "fused" + chunk.kv_key[5:]
        plain = bench.corpus.artifact(chunk.chunk)
        names = (NeighbourName(tenant="default", doc_id="near", kv_key=near.kv_key),)
        header = plain.header.model_copy(update={"neighbours": names})
        bench.parts.kv.put(chunk.chunk.document, key, replace(plain, header=header))
        fusion = Fusion(key, (Neighbour(document, 1, near.kv_key),), ready=True)
        bench.parts.index.mark_fusion(chunk.chunk.id, fusion)
    bench.blobs.reads.clear()
    return bench
