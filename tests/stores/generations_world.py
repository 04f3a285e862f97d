"""Two generations over stores in memory, a record of them and a clock that is moved."""

import itertools

from ingest.fakes import DIM, fake_generation
from schemas.head import DocumentState, Head
from schemas.settings import ChunkerSettings, QdrantSettings, Settings
from stores.blobs import open_blobs
from stores.clock import MovableClock
from stores.generations import GenerationStore
from stores.vectors import open_index

OLD, NEW = fake_generation(chunk_max_tokens=16), fake_generation(chunk_max_tokens=32)
LEASE_S = 60.0
_numbers = itertools.count()


def settings_of(generation):
    return Settings(chunker=ChunkerSettings(max_tokens=generation.chunk_max_tokens))


class Deployment:
    """One object store, one index, one record."""

    def __init__(self):
        self.name = f"generations-{next(_numbers)}"
        self.clock = MovableClock()
        self.blobs = open_blobs(f"memory://{self.name}")
        self.store = GenerationStore(self.blobs, self.clock, LEASE_S)
        self.indexes = {one.name: self.open(one) for one in (OLD, NEW)}
        for index in self.indexes.values():
            index.ensure()

    def open(self, generation):
        return open_index(QdrantSettings(), f":memory:{self.name}", generation.name, DIM)

    def open_entry(self, entry):
        return self.open(entry.generation)

    def first_use(self):
        """OLD becomes live."""
        self.store.claim(OLD, settings_of(OLD), "index").close()

    def add(self, generation=NEW):
        return self.store.change(lambda now: now.add(generation, settings_of(generation), self.clock.now_ms()))

    def promote(self, generation=NEW):
        return self.store.change(lambda now: now.promote(generation.name, self.clock.now_ms()))

    def states(self):
        short = {OLD.name: "old", NEW.name: "new"}
        return {short[one.name]: str(one.state) for one in self.store.read().known}

    def close(self):
        for index in self.indexes.values():
            index.close()


def head_of(document, version, generation=OLD, state=DocumentState.LIVE, n_chunks=1, digest=None):
    return Head(
        tenant=document.tenant,
        doc_id=document.doc_id,
        version=version,
        state=state,
        generation=generation.name,
        content_digest=digest or f"content {version}",
        n_chunks=n_chunks,
        event_ms=version,
        committed_ms=version,
    )
