"""JSON Lines: one object per line. A piece is some hundred lines, found by where they begin in the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingest.formats import EventReader
from ingest.sources.rows import FileState, documents_of, reading
from schemas.ids import DocumentKey
from stores.topics import Message

ROWS_PER_PIECE = 256


@dataclass(frozen=True)
class Lines:
    """`n_rows` lines from byte `start` on; the first of them is row `first` of the file. Empty lines are no rows."""

    file: FileState
    start: int
    first: int
    n_rows: int
    tenant: str

    def read(self) -> Iterator[Message]:
        """See `Piece`."""
        for number, line in enumerate(self._lines(), self.first):
            yield self.file.message(number, line, self.tenant)

    def documents(self, events: EventReader) -> Iterator[DocumentKey]:
        """See `Piece`."""
        return documents_of(self.read(), events)

    def _lines(self) -> Iterator[bytes]:
        with reading(self.file.path):
            file = self.file.path.open("rb")
        with file:
            self.file.check(os.fstat(file.fileno()))
            file.seek(self.start)
            left = self.n_rows
            while left:
                line = file.readline()
                if not line:  # shorter than it was
                    raise self.file.changed()
                if line.strip():
                    left -= 1
                    yield line.rstrip(b"\r\n")
            self.file.check(os.fstat(file.fileno()))


def line_pieces(path: Path, tenant: str) -> Iterator[Lines]:
    """The pieces of a file, in order.

    Raises:
        InputError: it cannot be read.
    """
    with reading(path), path.open("rb") as file:
        state = FileState.of(path)
        start = at = first = n_rows = 0
        for line in file:
            at += len(line)
            n_rows += bool(line.strip())
            if n_rows == ROWS_PER_PIECE:
                yield Lines(state, start, first, n_rows, tenant)
                start, first, n_rows = at, first + n_rows, 0
        if n_rows:
            yield Lines(state, start, first, n_rows, tenant)
