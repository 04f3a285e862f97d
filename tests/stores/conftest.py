"""Stores to test against: the same tests run on every kind that is present."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from schemas.chunk import Chunk, IndexedChunk
from schemas.head import DocumentState, Head
from schemas.ids import DocumentKey
from schemas.settings import QdrantSettings

DIM = 8
SERVER_VARIABLE = "KVQUILT_TEST_QDRANT_URL"


@pytest.fixture(params=["memory", "folder", pytest.param("server", marks=pytest.mark.service)])
def place(request, tmp_path) -> Iterator[tuple[QdrantSettings, str]]:
    """Settings and location of an empty Qdrant, with a prefix that no other test uses."""
    prefix = "test_" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    settings = QdrantSettings(prefix=prefix, timeout_s=20)
    if request.param == "memory":
        yield settings, f":memory:{prefix}"
    elif request.param == "folder":
        yield settings, str(tmp_path / "qdrant")
    else:
        url = os.environ.get(SERVER_VARIABLE)
        if not url:
            pytest.skip(f"{SERVER_VARIABLE} names no Qdrant server")
        remove_collections(url, prefix)
        yield settings, url
        remove_collections(url, prefix)


def remove_collections(url: str, prefix: str) -> None:
    from qdrant_client import QdrantClient

    client = QdrantClient(url=url)
    for collection in client.get_collections().collections:
        if collection.name.startswith(prefix):
            client.delete_collection(collection.name)
    client.close()


@pytest.fixture
def index(place):
    """An index with its collections made."""
    from stores.vectors import open_index

    settings, location = place
    with open_index(settings, location, "gen", DIM) as opened:
        opened.ensure()
        yield opened


@pytest.fixture
def make_chunks() -> Callable[..., list[IndexedChunk]]:
    """Chunks of one version of a document; their vectors are random but always the same."""

    def make(
        document: DocumentKey, version: int = 1, n: int = 3, *, vectors: Sequence[np.ndarray] | None = None
    ) -> list[IndexedChunk]:
        rng = np.random.default_rng(7)
        vectors = vectors if vectors is not None else [rng.normal(size=(2, DIM)).astype(np.float32) for _ in range(n)]
        return [
            IndexedChunk(
                chunk=Chunk(
                    document, version, ordinal, f"text {ordinal}", 10 * ordinal, 10 * ordinal + 9, (ordinal, 5)
                ),
                kv_key=f"{ordinal:064x}",
                vectors=rows,
            )
            for ordinal, rows in enumerate(vectors)
        ]

    return make


@pytest.fixture
def make_head() -> Callable[..., Head]:
    """A head of a document at a version."""

    def make(document: DocumentKey, version: int = 1, *, digest: str = "d", live: bool = True, n: int = 3) -> Head:
        return Head(
            tenant=document.tenant,
            doc_id=document.doc_id,
            version=version,
            state=DocumentState.LIVE if live else DocumentState.DELETED,
            generation="gen",
            content_digest=digest,
            n_chunks=n,
            event_ms=1_000,
            committed_ms=2_000,
            title="Title",
            metadata={"nested": {"list": [1, 2.5, None, "ü"]}},
        )

    return make


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[str]:
    """Endpoint of an S3 server (moto) in a child process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("moto") / "log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for_port(port, server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def wait_for_port(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    while server.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
    pytest.fail(f"the S3 server did not start: {log.read_text()[-500:]}")


@pytest.fixture
def s3_bucket(s3_server, request) -> tuple[str, dict[str, str]]:
    """URL and options of an empty bucket."""
    import boto3

    bucket = "b" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]
    secrets = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=s3_server, **secrets)
    client.create_bucket(Bucket=bucket)
    client.close()
    options = {"endpoint": s3_server, "region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}
    return f"s3://{bucket}/prefix", options


@pytest.fixture(params=["memory", "folder", pytest.param("s3", marks=pytest.mark.service)])
def blobs(request, tmp_path):
    """An empty object store of each kind."""
    from stores.blobs import open_blobs

    if request.param == "memory":
        return open_blobs(f"memory://{hashlib.sha256(request.node.nodeid.encode()).hexdigest()}")
    if request.param == "folder":
        return open_blobs((tmp_path / "a folder").as_uri())
    url, options = request.getfixturevalue("s3_bucket")
    return open_blobs(url, options)
