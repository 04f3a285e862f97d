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


@dataclass(frozen=True)
class Neighbour:
    """A chunk that another one was fused with.

    Attributes:
        version: a version of its document that names the chunk; the fused rows may be served while it is the live one.
        kv_key: its artifact of pass 1.
    """

    document: DocumentKey
    version: int
    kv_key: str


@dataclass(frozen=True)
class Fusion:
    """The fused artifact of a chunk.

    Attributes:
        kv_key: its name, in the folder of the chunk's own document.
        neighbours: nearest first.
        ready: it was put. Before that the point names it already, so that it is found wherever a run is killed.
    """

    kv_key: str
    neighbours: tuple[Neighbour, ...]
    ready: bool = False


@dataclass(frozen=True, eq=False)
class IndexedChunk:
    """A chunk as a point of the vector index.

    Attributes:
        vectors: `[n_windows, dim]` float32; one row per embedder window, compared by MaxSim. `None` where it was
            read without vectors.
        kv_key: the name of the KV artifact that belongs to the chunk, whether or not it exists yet. Of a chunk that is
            to be fused it is the one of pass 1.
        kv_ready: the artifact was put and confirmed.
        first_key: the artifact that the chunk has besides, for the place right behind the prefix, where `kv_key` is
            not exact there and the variant wants it.
        fusion: its fused artifact.
        title, uri, metadata: of the document, for citations and filters.
        content_digest: of the event that the point was made from.
    """

    chunk: Chunk
    kv_key: str
    vectors: npt.NDArray[np.float32] | None = None
    kv_ready: bool = False
    title: str | None = None
    uri: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    content_digest: str | None = None
    first_key: str | None = None
    fusion: Fusion | None = None

    @property
    def kv_keys(self) -> tuple[str, ...]:
        """Every artifact that the chunk names: what retiring its document leaves alone."""
        keys = (self.kv_key, self.first_key, self.fusion.kv_key if self.fusion else None)
        return tuple(key for key in keys if key is not None)
