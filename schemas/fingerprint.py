"""What decides whether a stored KV cache or vector may be used: fingerprint and generation.

The fingerprint describes the LLM side of an artifact, in two halves: the semantic half (which numbers the
model would compute) and the representation half (how they are laid out). The generation adds everything else
that decides what is stored: embedder, chunker, prefix. Each is the SHA-256 of its canonical bytes, and a
partial one is refused: pydantic has no defaults here.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from schemas.ids import digest


class _Identity(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical bytes of all fields, in hex."""
        return digest(self.model_dump(mode="json"))


class Fingerprint(_Identity):
    """One model's KV rows: what they mean and how they lie in memory.

    `rope` holds one SHA-256 per layer type over the inverse frequencies and the attention scaling that the
    model's own rotary module has (for length-dependent types over its config).
    """

    # semantic half
    model: str
    weights_sha256: str
    tokenizer_sha256: str
    rope: dict[str, str]
    # representation half
    n_layers: int = Field(gt=0)
    n_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rotary_dim: int = Field(ge=0)
    rope_layout: str  # half_split | interleaved | none
    dtype: str  # float32 | bfloat16 | float16
    k_state: str  # pre_rope
    layout: str  # LHTD


class Generation(_Identity):
    """Everything that decides what the index and the KV store hold; one pair of collections and one KV prefix."""

    fingerprint: Fingerprint
    prefix_sha256: str  # token digest of the prompt's prefix
    front_sha256: str  # token digest of what a chunk stands behind in pass 1; for most variants the prefix
    prefill_variant: str  # shared_prefix, alone, bos, dummy_prefix, company, fused, fused_company
    neighbours: int = Field(ge=0)  # how many a fused chunk has at most; 0 where chunks are not fused
    embedder: str
    embedder_sha256: str
    embedding_dim: int = Field(gt=0)
    chunker: str  # name and format number of the chunking rules
    chunk_max_tokens: int = Field(gt=0)

    @property
    def name(self) -> str:
        """The short name used in collection names and object keys: the first 16 hex digits of the digest."""
        return self.digest[:16]
