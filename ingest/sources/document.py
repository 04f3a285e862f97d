"""A file that is one document: text, Markdown, HTML, PDF. What is in it is extracted where every event is read."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingest.formats import EventReader
from ingest.sources.kinds import CONTENT_TYPES, title_of
from schemas.errors import StoreError
from schemas.events import MAX_CONTENT_BYTES, ContentType, message_key
from schemas.ids import DocumentKey
from stores.topics import Message

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DocumentFile:
    """One file. Its version is made from when it was last changed, so a newer change in the stream wins over it."""

    path: Path
    doc_id: str
    tenant: str
    n_rows: int = 1

    def read(self) -> Iterator[Message]:
        """See `Piece`. A file that is gone by now is no document of the folder any more, and gives nothing."""
        try:
            with self.path.open("rb") as file:
                # before reading: if it is changed meanwhile, the next run sees a newer time and takes it again
                changed_ms = os.fstat(file.fileno()).st_mtime_ns // 1_000_000
                source = file.read()
        except FileNotFoundError:
            log.warning("%s is gone: it was there when the folder was listed", self.path)
            return
        except OSError as error:
            raise StoreError(f"reading {self.path}: {error.strerror}; run the backfill again") from error
        key = message_key(DocumentKey(self.tenant, self.doc_id))
        yield Message(self.doc_id, 0, 0, changed_ms, key, self._value(source))

    def documents(self, events: EventReader) -> Iterator[DocumentKey]:
        """See `Piece`."""
        yield DocumentKey(self.tenant, self.doc_id)

    def _value(self, source: bytes) -> bytes:
        content_type = CONTENT_TYPES[self.path.suffix.lower()]
        if content_type is ContentType.PDF:
            content = base64.b64encode(source).decode()
        else:
            try:
                content = source.decode("utf-8-sig")
            except UnicodeDecodeError:
                return source  # its dead letter holds the file as it is, and says where it is not UTF-8
        fields = {"tenant": self.tenant, "content": content, "content_type": content_type.value}
        if title := title_of(content, content_type, self.path.stem):
            fields["title"] = title
        return json.dumps(fields, ensure_ascii=False).encode()


def longest(content_type: ContentType) -> int:
    """How many bytes a file may have to be one event."""
    return MAX_CONTENT_BYTES * 3 // 4 if content_type is ContentType.PDF else MAX_CONTENT_BYTES  # base64
