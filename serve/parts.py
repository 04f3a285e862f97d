"""The parts that the service is made of, and how they are built from settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine import Embedder, Model, PromptTemplate, load_embedder, load_model, resolve_generation
from schemas.fingerprint import Generation
from schemas.settings import Settings
from stores import Blobs, KvStore, Publisher, VectorIndex, open_blobs, open_index


@dataclass(frozen=True)
class Parts:
    """Everything behind the routes. In `kvquilt up` the pipelines share model, embedder and index with it.

    Attributes:
        generation: what index and KV store must have been made by.
        template: the prompt's fixed pieces, as token ids.
        closers: called in order by `close`.
    """

    generation: Generation
    template: PromptTemplate
    model: Model
    embedder: Embedder
    index: VectorIndex
    blobs: Blobs
    kv: KvStore
    publisher: Publisher
    closers: tuple[Callable[[], None], ...] = field(default=())

    def close(self) -> None:
        """Let go of what was opened for the service."""
        for close in self.closers:
            close()


def build_parts(settings: Settings) -> Parts:
    """Load the models and open the stores; minutes for a large model.

    Raises:
        UnsupportedModelError: the model cannot be served.
        StoreError: an outside system did not answer; trying again may help.
    """
    identity = resolve_generation(settings)
    generation = identity.generation
    model = load_model(settings.model, settings.cache_folder)
    embedder = load_embedder(settings.embedder, settings.cache_folder)
    blobs = open_blobs(settings.blobs_url, settings.blobs.options)
    # last what has to be closed: a fault above leaves nothing open
    index = open_index(settings.qdrant, settings.qdrant_location, generation.name, generation.embedding_dim)
    publisher = Publisher(settings.kafka)
    return Parts(
        generation=generation,
        template=identity.template,
        model=model,
        embedder=embedder,
        index=index,
        blobs=blobs,
        kv=KvStore(blobs, generation.name),
        publisher=publisher,
        closers=(publisher.close, index.close),
    )
