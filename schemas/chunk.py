"""A chunk: a run of token ids of one version of one document, and the text it stands for."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.ids import DocumentKey, chunk_id, token_digest


@dataclass(frozen=True)
class Chunk:
    """Cut once; its token ids are what is prefilled, stored and served, and are never made again from text.

    Attributes:
        ordinal: place of the chunk in its document, from 0.
        text: exactly `content[char_start:char_end]` of the document.
        char_start, char_end: half-open character range in the document's content.
        token_ids: ids under the LLM's tokenizer, without special tokens.
    """

    document: DocumentKey
    version: int
    ordinal: int
    text: str
    char_start: int
    char_end: int
    token_ids: tuple[int, ...]

    @cached_property
    def id(self) -> uuid.UUID:
        """The id of the chunk's point."""
        return chunk_id(self.document, self.version, self.ordinal)

    @cached_property
    def token_digest(self) -> str:
        """SHA-256 of the token ids."""
        return token_digest(self.token_ids)


@dataclass(frozen=True, eq=False)
class IndexedChunk:
    """A chunk as a point of the vector index.

    Attributes:
        vectors: `[n_windows, dim]` float32; one row per embedder window, compared by MaxSim. `None` where it was
            read without vectors.
        kv_key: the name of the KV artifact that belongs to the chunk, whether or not it exists yet.
        kv_ready: the artifact was put and confirmed.
        title, uri, metadata: of the document, for citations and filters.
    """

    chunk: Chunk
    kv_key: str
    vectors: npt.NDArray[np.float32] | None = None
    kv_ready: bool = False
    title: str | None = None
    uri: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
