"""A `World` that worker processes share: its stores stay in the test's process, and are called there by proxies."""

import os
import sys
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.managers import BaseManager

from ingest.chunking import Chunker
from ingest.fakes import FakeEmbedder, FakePrefiller, WordTokenizer
from ingest.parts import IndexParts, PrefillParts
from schemas.fingerprint import Generation
from schemas.settings import Settings

STORES = ("index", "kv", "publisher")


class _Shared(BaseManager):
    """The caller's side."""


for _name in (*STORES, "pids"):
    _Shared.register(_name)


@contextmanager
def shared(world):
    """Serve a world's stores; gives the address, and a function that tells which processes made parts."""

    class Serving(BaseManager):
        pass

    pids = deque()
    for name in STORES:
        Serving.register(name, callable=lambda name=name: getattr(world.index_parts, name))
    Serving.register("pids", callable=lambda: pids)
    server = Serving(("127.0.0.1", 0), authkey=b"test").get_server()
    thread = threading.Thread(target=_serve, args=(server, sys.stdout, sys.stderr), daemon=True)
    thread.start()
    try:
        yield server.address, lambda: set(pids)
    finally:
        server.stop_event.set()
        thread.join()


def _serve(server, stdout, stderr):
    with suppress(SystemExit):  # which is how it ends; it also puts back what it takes for the real streams
        server.serve_forever()
    sys.stdout, sys.stderr = stdout, stderr


@dataclass(frozen=True)
class ConnectRemote:
    """Parts of a worker process, over the stores at `address` and models of its own; picklable, as the real ones."""

    address: tuple[str, int]
    kind: str
    settings: Settings
    generation: Generation

    def __call__(self):
        remote = _Shared(self.address, authkey=b"test")
        remote.connect()
        remote.pids().append(os.getpid())
        parts = {"settings": self.settings, "generation": self.generation}
        parts |= {name: getattr(remote, name)() for name in STORES}
        if self.kind == "index":
            chunker = Chunker(WordTokenizer(), self.generation.chunk_max_tokens)
            return IndexParts(**parts, embedder=FakeEmbedder(), chunker=chunker)
        return PrefillParts(**parts, model=FakePrefiller(), prefix_ids=(1, 2, 3), read_rows=_as_it_is)


def _as_it_is(artifact):
    return artifact
