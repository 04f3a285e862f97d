"""The head of a document decides which version is visible; the commit record tells the world that it moved."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field

from schemas.errors import EventError, InputError
from schemas.ids import DocumentKey, canonical_bytes
from schemas.stored import Frozen, Stored

MAX_CHANGES = 33  # that a head remembers
_DAY_MS = 86_400_000


class DocumentState(StrEnum):
    """What the head says of the document: live, or a tombstone."""

    LIVE = "live"
    DELETED = "deleted"


class Head(Frozen):
    """One payload-only point per document. A chunk is visible if and only if the head `shows` it.

    `content_digest` tells a repeated event (equal version, equal digest) from a conflicting one. Times are in ms
    since the epoch: `event_ms` is the producer's (or broker's) time of the change, `committed_ms` ours.
    """

    tenant: str
    doc_id: str
    version: int
    state: DocumentState
    generation: str
    content_digest: str
    n_chunks: int = Field(ge=0)
    event_ms: int
    committed_ms: int
    title: str | None = None
    uri: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    changes_ms: tuple[int, ...] = ()  # `event_ms` of the last changes, this one last

    @property
    def document(self) -> DocumentKey:
        """The key of the document."""
        return DocumentKey(self.tenant, self.doc_id)

    @property
    def live(self) -> bool:
        """Whether the document may be answered from."""
        return self.state is DocumentState.LIVE

    def shows(self, version: int, content_digest: str | None) -> bool:
        """Whether a point of that version, made from that content, is visible.

        Two writers can come with one version and other contents, and the one that is refused may have written over the
        other's points before it knew: those are nobody's until they are written again. None: the point is of a time
        when points did not say.
        """
        return self.live and version == self.version and content_digest in (None, self.content_digest)

    def changed_more_often(self, per_day: int) -> bool:
        """Whether there were more changes than that in the day before the last one, which counts."""
        last = max(self.changes_ms, default=0)
        return sum(last - change < _DAY_MS for change in self.changes_ms) > per_day


class CommitRecord(Stored):
    """Published after a head moved and the older version was retired; the commits topic is compacted by `key`."""

    what: ClassVar[str] = "a commit record"
    refusal: ClassVar[type[InputError]] = EventError

    tenant: str
    doc_id: str
    version: int
    state: DocumentState
    generation: str
    event_ms: int
    committed_ms: int

    @property
    def document(self) -> DocumentKey:
        """The key of the document."""
        return DocumentKey(self.tenant, self.doc_id)

    @property
    def key(self) -> bytes:
        """The key of the Kafka message: compaction keeps the newest record of a document in each generation."""
        return canonical_bytes([self.tenant, self.doc_id, self.generation])

    @classmethod
    def of(cls, head: Head) -> CommitRecord:
        """The record that announces `head`."""
        return cls(**head.model_dump(include=set(cls.model_fields)))
