"""Fingerprint and generation, found out without loading weights: ingest and serve agree on them before they start.

`Identity` is what both build first from the settings; two processes with equal settings get equal generations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.embedder import embedder_identity
from engine.models import display_name, model_folder, weights_digest
from engine.prompt import PromptTemplate
from engine.tokenizer import Tokenizer, load_tokenizer
from schemas.fingerprint import Fingerprint, Generation
from schemas.ids import token_digest
from schemas.settings import ModelSettings, Settings

if TYPE_CHECKING:
    from engine.hf_adapter import ModelSpec
    from engine.variants import Variant

CHUNKER = "sections/1"  # name and number of the chunking rules; ingest raises it when it cuts differently
K_STATE, LAYOUT = "pre_rope", "LHTD"


@dataclass(frozen=True)
class Identity:
    """The generation of a set of settings, and the parts that it was made of.

    Attributes:
        variant: how chunks are prefilled.
        front_ids: what stands in front of a chunk in pass 1 (for most variants the only one).
    """

    generation: Generation
    fingerprint: Fingerprint
    tokenizer: Tokenizer
    template: PromptTemplate
    variant: Variant
    front_ids: tuple[int, ...]


def resolve_generation(settings: Settings) -> Identity:
    """Everything that decides what index and KV store hold.

    Raises:
        UnsupportedModelError: the model or the embedder cannot be found or read.
        SettingsError: the prompt settings do not fit the model's chat template, or the prefill settings the model.
    """
    from engine.variants import company_of, front_ids, variant_named

    cache = settings.cache_folder
    tokenizer = load_tokenizer(settings.model, cache)
    template = PromptTemplate.from_settings(tokenizer, settings.prompt)
    fingerprint = _fingerprint(settings.model, cache, tokenizer)
    embedder = embedder_identity(settings.embedder, cache)
    variant = variant_named(settings.prefill.variant)
    front = front_ids(variant.pass1_front, template, company_of(settings.prefill, tokenizer))
    generation = Generation(
        fingerprint=fingerprint,
        prefix_sha256=template.prefix_sha256,
        front_sha256=token_digest(front),
        prefill_variant=variant.name,
        neighbours=settings.prefill.neighbours if variant.fused else 0,
        embedder=embedder.name,
        embedder_sha256=embedder.sha256,
        embedding_dim=embedder.dim,
        chunker=CHUNKER,
        chunk_max_tokens=settings.chunker.max_tokens,
    )
    return Identity(generation, fingerprint, tokenizer, template, variant, front)


def resolve_fingerprint(model: ModelSettings, cache: Path) -> Fingerprint:
    """The LLM side of the identity. Weights are hashed (once, then remembered), not loaded.

    Raises:
        UnsupportedModelError: the model cannot be found or read.
    """
    return _fingerprint(model, cache, load_tokenizer(model, cache))


def make_fingerprint(name: str, spec: ModelSpec, weights_sha256: str, tokenizer_sha256: str, dtype: str) -> Fingerprint:
    """Put the parts together; `dtype` is the resolved one."""
    return Fingerprint(
        model=name,
        weights_sha256=weights_sha256,
        tokenizer_sha256=tokenizer_sha256,
        rope=spec.rope_digests,
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=spec.rotary_dim,
        rope_layout=spec.rope_layout,
        dtype=dtype,
        k_state=K_STATE,
        layout=LAYOUT,
    )


def _fingerprint(model: ModelSettings, cache: Path, tokenizer: Tokenizer) -> Fingerprint:
    from engine.dtype import resolve_dtype
    from engine.hf_adapter import read_spec

    folder = model_folder(model.name, cache)
    dtype = resolve_dtype(model, folder, cache)
    return make_fingerprint(
        display_name(model.name), read_spec(folder, cache), weights_digest(folder, cache), tokenizer.digest, dtype
    )
