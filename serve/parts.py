"""The parts that the service is made of, and how they are built from settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engine import Embedder, Model, PromptTemplate, load_embedder, load_model, resolve_generation
from engine.certified import coverage, packaged_certificates
from engine.identity import Identity
from engine.variants import SHARED_PREFIX, Variant, company_of
from schemas.fingerprint import Generation
from schemas.generations import KnownGeneration, differences
from schemas.settings import Settings
from serve.blend import Certificates
from serve.errors import NotReadyError
from stores import Blobs, CertificateStore, KvStore, Publisher, VectorIndex, open_blobs, open_index
from stores.generations import GenerationStore
from stores.tail import OpenTail, open_tail


@dataclass(frozen=True)
class Parts:
    """Everything behind the routes. In `kvquilt up` the pipelines share model, embedder and index with it.

    Attributes:
        generation: what index and KV store must have been made by.
        template: the prompt's fixed pieces, as token ids.
        certificates: what `blend` may do.
        variant: how the chunks are prefilled.
        front_ids: what they were prefilled behind in pass 1; None: the prefix.
        generations: the record of generations, of which the live one is served; None: these parts, whatever is live.
        beside: parts of another generation over the same model, embedder and connections.
        commits: opens the tail of the commits topic; None: there is no topic to follow.
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
    generations: GenerationStore | None = None
    beside: Callable[[Parts, KnownGeneration], Parts] | None = None
    commits: OpenTail | None = None
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
        model=model,
        embedder=embedder,
        index=index,
        blobs=blobs,
        publisher=publisher,
        generations=GenerationStore(blobs, lease_s=settings.generations.lease_s),
        beside=lambda parts, entry: parts_beside(settings, parts, entry),
        commits=lambda positions: open_tail(settings.kafka, settings.kafka.commits_topic, positions),
        closers=(publisher.close, index.close),
        **_of_generation(settings, identity, model, blobs),
    )


def parts_beside(settings: Settings, parts: Parts, entry: KnownGeneration) -> Parts:
    """The parts of another generation, where the model and the embedder that are loaded made it.

    Args:
        settings: of this process.

    Raises:
        NotReadyError: another model or embedder made it, or this process cannot make the same; says which.
    """
    wanted, have = entry.generation, parts.generation
    loaded = have.model_copy(update={"fingerprint": parts.model.fingerprint})
    if (wanted.fingerprint.digest, wanted.embedder_sha256) != (loaded.fingerprint.digest, loaded.embedder_sha256):
        alike = {"prefix_sha256", "front_sha256", "prefill_variant", "neighbours", "chunker", "chunk_max_tokens"}
        ours = loaded.model_copy(update={name: getattr(wanted, name) for name in alike})
        raise NotReadyError(
            f"generation {entry.name} is live, and it was not made by what is loaded here ({differences(wanted, ours)})"
            f". Restart the service with model.name={entry.settings['model']['name']} and "
            f"embedder.name={entry.settings['embedder']['name']}, or run `kvquilt rollback`"
        )
    adapted = entry.adapt(settings)
    identity = resolve_generation(adapted)
    if identity.generation.name != entry.name:
        raise NotReadyError(
            f"generation {entry.name} is live, and its settings make {identity.generation.name} here "
            f"({differences(wanted, identity.generation)}): a file that they name differs, or another release made it"
        )
    index = parts.index.beside(entry.name, wanted.embedding_dim)
    return replace(
        parts,
        index=index,
        closers=(index.close, *parts.closers),
        **_of_generation(adapted, identity, parts.model, parts.blobs),
    )


def _of_generation(settings: Settings, identity: Identity, model: Model, blobs: Blobs) -> dict[str, Any]:
    """The parts that differ between generations of one model and embedder."""
    name = identity.generation.name
    model.precompute(identity.template.prefix_ids)  # also a model that cannot reuse rows has them at the same place
    covers = coverage(model.fingerprint, identity.template, company_of(settings.prefill, identity.tokenizer))
    stored = CertificateStore(blobs, name)
    return {
        "generation": identity.generation,
        "template": identity.template,
        "kv": KvStore(blobs, name),
        "certificates": Certificates(covers, lambda: [*stored.all(), *packaged_certificates()]),
        "variant": identity.variant,
        "front_ids": identity.front_ids,
    }
