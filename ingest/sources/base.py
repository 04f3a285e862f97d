"""What every source is: pieces that workers read, and what is known of it before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ingest.formats import EventReader
from schemas.ids import DocumentKey
from stores.topics import Message


class Why(StrEnum):
    """Why a file was left out."""

    HIDDEN = "hidden"
    KIND = "of another kind"
    FOLDER_LINK = "link to a folder"
    SPECIAL = "no regular file"
    NAME = "name is not UTF-8"
    SIZE = "too large"
    ACCESS = "cannot be opened"

    @property
    def is_fault(self) -> bool:
        """Whether somebody should do something about it: the file looks like a document and is not taken."""
        return self in (Why.NAME, Why.SIZE, Why.ACCESS)


@dataclass(frozen=True)
class LeftOut:
    """A file or a hidden folder that is not read.

    Attributes:
        doc_id: what its document would be called.
    """

    path: str
    doc_id: str
    why: Why


class Piece(Protocol):
    """What one worker reads at a time; picklable, and cheap to carry about: it refers to its rows."""

    @property
    def n_rows(self) -> int:
        """How many messages it gives; at most so many where that cannot be told before."""
        ...

    def read(self) -> Iterator[Message]:
        """The rows as messages. The same ones each time, unless the source changed.

        Raises:
            InputError: the source is damaged, or changed so that the piece is no piece of it any more.
            StoreError: it cannot be read now.
        """
        ...

    def documents(self, events: EventReader) -> Iterator[DocumentKey]:
        """The documents that the rows are about, whether or not their content can be used.

        Raises:
            InputError: as `read`; also where a row does not tell its document.
        """
        ...


@dataclass(frozen=True)
class Source:
    """Everything that one backfill reads.

    Attributes:
        owns: what the ids of its documents begin with, where the source itself tells: a folder does.
        as_of_ms: what is in the source was so at that time, ms since the epoch; it knows of no later change.
    """

    pieces: tuple[Piece, ...]
    left_out: tuple[LeftOut, ...]
    owns: tuple[str, ...]
    as_of_ms: int

    @property
    def n_rows(self) -> int:
        """How many rows there are, at most."""
        return sum(piece.n_rows for piece in self.pieces)
