"""Parquet: one row per document, in columns of an event's names. A piece is one row group.

Binary columns are text in UTF-8, as tables have it whose writers did not say so; of a PDF `content` is the file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingest.formats import EventReader
from ingest.sources.rows import FileState, documents_of, reading
from schemas.events import ContentType
from schemas.ids import DocumentKey
from stores.topics import Message

ROWS_PER_READ = 256


@dataclass(frozen=True)
class RowGroup:
    """Row group `group` of a file, whose first row is row `first` of the file."""

    file: FileState
    group: int
    first: int
    n_rows: int
    tenant: str

    def read(self) -> Iterator[Message]:
        """See `Piece`."""
        for number, row in enumerate(self._rows(), self.first):
            yield self.file.message(number, _value(row), self.tenant)

    def documents(self, events: EventReader) -> Iterator[DocumentKey]:
        """See `Piece`."""
        return documents_of(self.read(), events)

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        import pyarrow.parquet

        with reading(self.file.path):
            self.file.check(self.file.path.stat())
            with pyarrow.parquet.ParquetFile(self.file.path) as file:
                for batch in file.iter_batches(batch_size=ROWS_PER_READ, row_groups=[self.group]):
                    yield from batch.to_pylist(maps_as_pydicts="strict")
            self.file.check(self.file.path.stat())


def row_groups(path: Path, tenant: str) -> Iterator[RowGroup]:
    """The pieces of a file, in order.

    Raises:
        InputError: it cannot be read.
    """
    import pyarrow.parquet

    with reading(path):
        state, metadata = FileState.of(path), pyarrow.parquet.read_metadata(path)
    first = 0
    for group in range(metadata.num_row_groups):
        n_rows = metadata.row_group(group).num_rows
        yield RowGroup(state, group, first, n_rows, tenant)
        first += n_rows


def _value(row: Mapping[str, Any]) -> bytes:
    """The row as the value of a message. A column that is null in it is a field that the event does not have."""
    fields = {name: value for name, value in row.items() if value is not None}
    content, is_pdf = fields.get("content"), fields.get("content_type") in (ContentType.PDF, ContentType.PDF.encode())
    if is_pdf and isinstance(content, bytes):
        fields["content"] = base64.b64encode(content).decode()
    # bytes that are not UTF-8 come out as they went in: the row's dead letter says where they are
    return json.dumps(fields, default=_plain, ensure_ascii=False).encode("utf-8", "surrogateescape")


def _plain(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
