"""The real parts, from the settings. Made once per process and shared by every step; closed when the run ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from ingest import telemetry
from ingest.background import BackgroundPrefiller
from ingest.chunking import Chunker
from ingest.formats import EventReader
from ingest.parts import Connect, IndexParts, PrefillParts, Stores
from schemas.errors import SettingsError, UnsupportedModelError
from schemas.settings import Settings

_made: list[tuple[object, Stores]] = []
_lock = threading.RLock()


@dataclass(frozen=True)
class ConnectIndex:
    """Gives this process's `IndexParts` for `settings`; collections are created where they are missing.

    Raises:
        StoreError: the vector index or the object store cannot be used.
        UnsupportedModelError: the model or the embedder cannot be used.
        SettingsError: the settings make a generation that does not exist, and another one is live.
    """

    settings: Settings

    def __call__(self) -> IndexParts:
        """The parts; made by the first call."""
        return cast(IndexParts, _once(self, lambda: _index_parts(self.settings)))


@dataclass(frozen=True)
class ConnectPrefill:
    """Gives this process's `PrefillParts` for `settings`.

    Raises:
        StoreError: the vector index or the object store cannot be used.
        UnsupportedModelError: the model cannot be used, or not with reuse.
    """

    settings: Settings

    def __call__(self) -> PrefillParts:
        """The parts; made by the first call."""
        return cast(PrefillParts, _once(self, lambda: _prefill_parts(self.settings)))


@dataclass(frozen=True)
class ConnectStores:
    """Gives the stores alone, without a model: for what looks after the data.

    Raises:
        StoreError: the vector index or the object store cannot be used.
        UnsupportedModelError: the model's generation cannot be told.
    """

    settings: Settings

    def __call__(self) -> Stores:
        """The parts; made by the first call."""
        return _once(self, lambda: Stores(**_stores(self.settings, "look")[0]))


@contextmanager
def connected(*connects: Connect[Stores]) -> Iterator[None]:
    """Make the parts now, so that what is wrong with them is said before anything is read; close them at the end.

    Parts that `connects` did not make here, because somebody else did, stay open.
    """
    try:
        for connect in connects:
            connect()
        yield
    finally:
        for connect in connects:
            _close(connect)


def _once(connect: object, make: Callable[[], Stores]) -> Stores:
    with _lock:  # not a dictionary: settings hold dictionaries and secrets, they compare but do not hash
        for known, parts in _made:
            if known == connect:
                return parts
        parts = make()
        _made.append((connect, parts))
        return parts


def _close(connect: object) -> None:
    with _lock:
        closing = [parts for known, parts in _made if known == connect]
        _made[:] = [entry for entry in _made if entry[0] != connect]
    for parts in closing:
        parts.close()


def _stores(settings: Settings, role: str) -> tuple[dict[str, Any], Any]:
    from engine import resolve_generation
    from stores.blobs import open_blobs
    from stores.generations import GenerationStore
    from stores.kv_store import KvStore
    from stores.topics import Publisher
    from stores.vectors import open_index

    identity = resolve_generation(settings)
    generation = identity.generation
    blobs = open_blobs(settings.blobs_url, settings.blobs.options)
    blobs.ready()
    generations = GenerationStore(blobs, lease_s=settings.generations.lease_s)
    generations.read().admit(generation)  # first: of a generation that is refused nothing is made
    index = open_index(settings.qdrant, settings.qdrant_location, generation.name, generation.embedding_dim)
    try:
        index.ensure()
        claim = generations.claim(generation, settings, role)
    except BaseException:
        index.close()
        raise
    telemetry.watch_generation(generation.name)
    made = {
        "settings": claim.entry.bind(settings),
        "generation": generation,
        "index": index,
        "kv": KvStore(blobs, generation.name),
        "publisher": Publisher(settings.kafka),
        "generations": generations,
        "claim": claim,
    }
    return made, identity


def _index_parts(settings: Settings) -> IndexParts:
    from engine import load_embedder

    embedder = load_embedder(settings.embedder, settings.cache_folder)
    made, identity = _stores(settings, "index")
    chunker = Chunker(identity.tokenizer, settings.chunker.max_tokens)
    return IndexParts(**made, embedder=embedder, chunker=chunker, events=EventReader(settings.events))


def _prefill_parts(settings: Settings) -> PrefillParts:
    from engine import load_model

    model = load_model(settings.model, settings.cache_folder)
    if model.reuse_refusal is not None:
        raise UnsupportedModelError(f"prefill cannot run: {model.reuse_refusal}")
    made, identity = _stores(settings, "prefill")
    stepped_back = BackgroundPrefiller(model, settings.prefill.nice)
    parts = PrefillParts(
        **made, model=stepped_back, prefix_ids=identity.front_ids, first_ids=identity.template.prefix_ids
    )
    front, chunk, longest = len(identity.front_ids), settings.chunker.max_tokens, model.max_tokens
    if front + chunk > longest:
        parts.close()
        raise SettingsError(
            f"prefill.variant {identity.variant.name}: {front:,} tokens stand in front of a chunk of up to {chunk:,}, "
            f"and the model takes {longest:,}; name a shorter prefill.company, use shorter chunks or another variant"
        )
    return parts
