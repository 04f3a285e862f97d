"""What the steps work with. Made once per process from the settings, through the doors of stores/ and engine/.

A step never makes a client. It gets its parts from a `Connect`, which travels in the pickled graph and is called in
`DoFn.setup`: `ConnectIndex` and `ConnectPrefill` for real, a `handles.Handle` to anything else in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ingest import telemetry
from ingest.chunking import Chunker
from ingest.formats import EventReader
from ingest.retry import store_retry
from schemas.errors import BlobError
from schemas.fingerprint import Fingerprint, Generation
from schemas.ids import artifact_key
from schemas.kv_artifact import Buffer, KvArtifact
from schemas.settings import Settings
from stores.clock import Clock, SystemClock

if TYPE_CHECKING:
    from stores.generations import Claim, GenerationStore
    from stores.kv_store import KvStore
    from stores.receipts import Receipts
    from stores.replicas import Replicas
    from stores.topics import Publisher
    from stores.vectors import VectorIndex

T = TypeVar("T")
P_co = TypeVar("P_co", covariant=True)


class TextEncoder(Protocol):
    """The embedder, as far as ingest uses it."""

    def embed(self, texts: Sequence[str]) -> list[npt.NDArray[np.float32]]:
        """One `[n_windows, dim]` array per text."""
        ...


class Rows(Protocol):
    """The KV rows of one chunk."""

    def to_bytes(self) -> tuple[Buffer, Buffer]:
        """The buffers of `k` and `v`, each `[L, H, T, D]`."""
        ...


class ChunkPrefiller(Protocol):
    """The LLM, as far as ingest uses it."""

    @property
    def max_tokens(self) -> int:
        """The longest sequence that it takes."""
        ...

    @property
    def fingerprint(self) -> Fingerprint:
        """What its KV rows are."""
        ...

    def prefill_chunks(self, prefix_ids: Sequence[int], chunks: Sequence[Sequence[int]]) -> Sequence[Rows]:
        """KV rows of each chunk, computed behind the prefix."""
        ...

    def prefill_behind(self, front_ids: Sequence[int], neighbours: Sequence[Any], chunk: Sequence[int]) -> Rows:
        """KV rows of a chunk, computed behind `front_ids` and its neighbours' rows of pass 1, nearest first."""
        ...


def kv_rows(artifact: KvArtifact) -> Any:
    """`engine.KvRows` over an artifact's bytes."""
    from engine import KvRows

    return KvRows.from_bytes(artifact.k, artifact.v, artifact.header.fingerprint)


@dataclass(frozen=True)
class Stores:
    """What both pipelines use.

    Attributes:
        settings: of the process, with the consumer groups of this generation.
        claim: keeps the generation from being reclaimed until the parts are closed.
    """

    settings: Settings
    generation: Generation
    index: VectorIndex
    kv: KvStore
    publisher: Publisher
    clock: Clock = field(default_factory=SystemClock)
    generations: GenerationStore | None = None  # without: there is no other generation
    claim: Claim | None = None

    def retry(self, action: Callable[[], T], what: str) -> T:
        """`retry.store_retry` with this process's settings; counts each failure of the KV artifacts' store."""

        def counted() -> T:
            try:
                return action()
            except BlobError:
                telemetry.kv_store_failed(self.generation.name)
                raise

        return store_retry(counted, what, self.settings.ingest, self.clock)

    def close(self) -> None:
        """Close what the parts hold open."""
        self.publisher.close()
        self.index.close()
        if self.claim is not None:
            self.claim.close()

    @property
    def receipts(self) -> Receipts:
        """Deletion receipts, in the object store that the artifacts are in."""
        from stores.receipts import Receipts

        return Receipts(self.kv.blobs)

    @property
    def replicas(self) -> Replicas:
        """The serving replicas of this generation that keep KV in memory."""
        from stores.replicas import Replicas

        return Replicas(self.kv.blobs, self.generation.name, self.clock)

    def kv_key(self, token_ids: Sequence[int]) -> str:
        """The name of a chunk's artifact in this generation: of pass 1, where chunks are fused."""
        return artifact_key(self.generation.fingerprint.digest, self.generation.front_sha256, token_ids)

    def first_key(self, token_ids: Sequence[int]) -> str | None:
        """The name of the artifact for the place right behind the prefix, where it is another one."""
        generation = self.generation
        if not self.fuses or generation.front_sha256 == generation.prefix_sha256:
            return None
        return artifact_key(generation.fingerprint.digest, generation.prefix_sha256, token_ids)

    @property
    def fuses(self) -> bool:
        """Whether chunks are fused with their neighbours."""
        return self.generation.neighbours > 0


@dataclass(frozen=True)
class IndexParts(Stores):
    """What INDEX needs: no LLM weights."""

    chunker: Chunker = field(kw_only=True)
    embedder: TextEncoder = field(kw_only=True)
    events: EventReader = field(kw_only=True, default_factory=EventReader)

    def close(self) -> None:
        """Close what the parts hold open, also what they hold beside the stores."""
        super().close()
        self.events.close()


@dataclass(frozen=True)
class PrefillParts(Stores):
    """What PREFILL needs: no embedder.

    Attributes:
        prefix_ids: what chunks and their neighbours are prefilled behind: the prefix, unless the variant differs.
        first_ids: the prefix itself, where it is another.
        read_rows: an artifact's rows as the model takes them.
    """

    model: ChunkPrefiller = field(kw_only=True)
    prefix_ids: tuple[int, ...] = field(kw_only=True)
    first_ids: tuple[int, ...] = field(kw_only=True, default=())
    read_rows: Callable[[KvArtifact], Any] = field(kw_only=True, default=kv_rows)


class Connect(Protocol[P_co]):
    """Gives the parts of this process; picklable."""

    def __call__(self) -> P_co:
        """The parts, the same ones for every step of a process."""
        ...
