"""Fakes that are shipped: models that answer at once, count their calls and fail where they are told to.

With `stores.fakes` and Qdrant in memory they make both pipelines run in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from schemas.fingerprint import Fingerprint, Generation
from schemas.ids import DocumentKey, digest
from schemas.kv_artifact import KvArtifact
from stores.fakes import fake_artifact, fake_fingerprint

DIM = 8


class Forgetful(list[Any]):
    """A list that stays empty: for fakes that run for so long that what they remember would be all that grows."""

    def __iadd__(self, other: object) -> Self:  # type: ignore[misc]
        return self

    def append(self, item: object) -> None:
        """Not kept."""


class WordTokenizer:
    """One token per word and one per other visible character."""

    def encode(self, text: str) -> list[int]:
        """Ids below 2^31 that depend on the word alone."""
        return [int(digest(word)[:7], 16) for word in re.findall(r"\w+|[^\w\s]", text)]


@dataclass
class FakeEmbedder:
    """Unit vectors that depend on the text alone.

    Attributes:
        fails: called with every text; an error that it raises is the embedder's.
        embedded: every text, in order.
    """

    fails: Callable[[str], None] = lambda text: None
    embedded: list[str] = field(default_factory=list)

    def embed(self, texts: Sequence[str]) -> list[npt.NDArray[np.float32]]:
        """One `[1, DIM]` row per text."""
        for text in texts:
            self.fails(text)
        self.embedded += texts
        return [self._row(text) for text in texts]

    def _row(self, text: str) -> npt.NDArray[np.float32]:
        row = np.random.default_rng(int(digest(text)[:16], 16)).normal(size=(1, DIM)).astype(np.float32)
        return row / np.linalg.norm(row)


@dataclass(frozen=True)
class FakeRows:
    """KV rows of a chunk, as bytes."""

    k: bytes
    v: bytes

    def to_bytes(self) -> tuple[bytes, bytes]:
        """What the artifact takes."""
        return self.k, self.v


@dataclass
class FakePrefiller:
    """KV rows that depend on the token ids alone.

    Attributes:
        fails: called with every batch of chunks; an error that it raises is the model's.
        prefilled: the token ids of every chunk, in order.
        fused: ids of every chunk that was prefilled behind neighbours, and of those.
    """

    fails: Callable[[Sequence[Sequence[int]]], None] = lambda chunks: None
    fingerprint: Fingerprint = field(default_factory=fake_fingerprint)
    prefilled: list[tuple[int, ...]] = field(default_factory=list)
    max_tokens: int = 4096
    fused: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = field(default_factory=list)

    def prefill_chunks(self, prefix_ids: Sequence[int], chunks: Sequence[Sequence[int]]) -> list[FakeRows]:
        """One `FakeRows` per chunk."""
        self.fails(chunks)
        self.prefilled += [tuple(chunk) for chunk in chunks]
        artifacts = [fake_artifact(DocumentKey("fake", "fake"), chunk)[1] for chunk in chunks]
        return [FakeRows(bytes(artifact.k), bytes(artifact.v)) for artifact in artifacts]

    def prefill_behind(
        self, front_ids: Sequence[int], neighbours: Sequence[KvArtifact], chunk: Sequence[int]
    ) -> FakeRows:
        """Rows of as many tokens as the chunk has, that depend on the neighbours' ids too."""
        self.fails([chunk])
        behind = tuple(tuple(artifact.token_ids.tolist()) for artifact in neighbours)
        self.fused.append((tuple(chunk), behind))
        n_ids = [sum(ids) % 2**31 for ids in zip(chunk, *(cycle(ids) for ids in behind), strict=False)]
        _, artifact = fake_artifact(DocumentKey("fake", "fake"), n_ids)
        return FakeRows(bytes(artifact.k), bytes(artifact.v))


def fake_generation(**changes: Any) -> Generation:
    """The generation of the fakes; `changes` replace fields."""
    fields: dict[str, Any] = dict(
        fingerprint=fake_fingerprint(),
        prefix_sha256="3" * 64,
        front_sha256="3" * 64,
        prefill_variant="shared_prefix",
        neighbours=0,
        embedder="fake",
        embedder_sha256="4" * 64,
        embedding_dim=DIM,
        chunker="fake/1",
        chunk_max_tokens=16,
    )
    return Generation(**(fields | changes))
