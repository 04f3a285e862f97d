"""What travels through the pipelines: one message, what became of it so far, and nothing of the outside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, Protocol, Self, TypeVar

from schemas.chunk import IndexedChunk
from schemas.errors import EventError
from schemas.events import ChangeEvent
from schemas.head import CommitRecord, Head
from schemas.ids import DocumentKey
from stores.topics import Message


class Outcome(StrEnum):
    """What becomes of a message. The values are metric labels."""

    PENDING = "pending"  # still on its way
    SUPERSEDED = "superseded"  # a newer version is there: nothing to do
    REPEATED = "repeated"  # the head is there already: redo what is unfinished
    COMMITTED = "committed"  # this pass flipped the head
    CONFIRMED = "confirmed"  # KV of the record's version is in place
    DEAD = "dead"  # a data error: goes to the dead-letter topic


@dataclass(frozen=True)
class Work:
    """A message and its outcome. A step leaves alone what is superseded or dead.

    `attempts` says how often the failing step was tried, for the dead letter.
    """

    message: Message
    outcome: Outcome = Outcome.PENDING
    error: EventError | None = None
    attempts: int = 1

    @property
    def active(self) -> bool:
        """Whether there is still something to do for it."""
        return self.outcome in (Outcome.PENDING, Outcome.REPEATED, Outcome.COMMITTED)

    def dead(self, error: EventError, attempts: int = 1) -> Self:
        """The same, given up because of its data."""
        return replace(self, outcome=Outcome.DEAD, error=error, attempts=attempts)


@dataclass(frozen=True)
class IndexWork(Work):
    """A change event on its way through INDEX.

    Attributes:
        event: None only where parsing failed.
        points: all points of the event's version that are to be written, in order; those whose `vectors` is None
            are to be embedded.
        head: the head as read by plan (None: a new document), and after the flip the one that is stored.
        announced: its commit record, as it was published.
    """

    event: ChangeEvent | None = None
    points: tuple[IndexedChunk, ...] = ()
    head: Head | None = None
    announced: Message | None = None

    @property
    def document(self) -> DocumentKey | None:
        """The document, where parsing came that far."""
        return self.event.document if self.event else None

    @property
    def change(self) -> ChangeEvent:
        """The event of work that is not dead."""
        assert self.event is not None
        return self.event


@dataclass(frozen=True)
class PrefillWork(Work):
    """A commit record on its way through PREFILL.

    Attributes:
        record: None only where parsing failed.
        points: the points of the live version, without vectors.
        missing: those of them whose artifact is to be made, one per artifact key.
        failed: artifact keys that could not be made.
    """

    record: CommitRecord | None = None
    points: tuple[IndexedChunk, ...] = ()
    missing: tuple[IndexedChunk, ...] = ()
    failed: frozenset[str] = frozenset()

    @property
    def document(self) -> DocumentKey | None:
        """The document, where parsing came that far."""
        return self.record.document if self.record else None

    @property
    def commit(self) -> CommitRecord:
        """The record of work that is not dead."""
        assert self.record is not None
        return self.record


W = TypeVar("W", bound=Work)
Batch = tuple[W, ...]
P_contra = TypeVar("P_contra", contravariant=True)


class StepFunction(Protocol, Generic[P_contra]):
    """One step over one batch: pure in its data, effects only through the parts it is handed."""

    def __call__(self, parts: P_contra, batch: tuple[Any, ...], /) -> tuple[Any, ...]:
        """The batch with outcomes moved on; as many elements, in the same order."""
        ...
