"""The parts that the service is made of, and how they are built from settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine import Embedder, Model, PromptTemplate, load_embedder, load_model, resolve_generation
from engine.certified import coverage, packaged_certificates
from engine.variants import SHARED_PREFIX, Variant, company_of
from schemas.fingerprint import Generation
from schemas.settings import Settings
from serve.blend import Certificates
from stores import Blobs, CertificateStore, KvStore, Publisher, VectorIndex, open_blobs, open_index


@dataclass(frozen=True)
class Parts:
    """Everything behind the routes. In `kvquilt up` the pipelines share model, embedder and index with it.

    Attributes:
        generation: what index and KV store must have been made by.
        template: the prompt's fixed pieces, as token ids.
        certificates: what `blend` may do.
        variant: how the chunks are prefilled.
        front_ids: what they were prefilled behind in pass 1; None: the prefix.
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
    certificates: Certificates
    variant: Variant = SHARED_PREFIX
    front_ids: tuple[int, ...] | None = None
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
    model.precompute(identity.template.prefix_ids)  # also a model that cannot reuse rows has them at the same place
    covers = coverage(model.fingerprint, identity.template, company_of(settings.prefill, identity.tokenizer))
    stored = CertificateStore(blobs, generation.name)
    return Parts(
        generation=generation,
        template=identity.template,
        model=model,
        embedder=embedder,
        index=index,
        blobs=blobs,
        kv=KvStore(blobs, generation.name),
        publisher=publisher,
        certificates=Certificates(covers, lambda: [*stored.all(), *packaged_certificates()]),
        variant=identity.variant,
        front_ids=identity.front_ids,
        closers=(publisher.close, index.close),
    )
