"""What files of rows have in common: a row is a change event in the form of `EventBody`, with its `doc_id`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import stat_result
from pathlib import Path

from ingest.formats import EventReader
from schemas.errors import EventError, InputError
from schemas.events import DEFAULT_TENANT
from schemas.ids import PACKED_OFFSET_BITS, DocumentKey
from stores.topics import Message


@dataclass(frozen=True)
class FileState:
    """What tells that a file is the one that was surveyed."""

    path: Path
    changed_ns: int
    nbytes: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state now."""
        state = path.stat()
        return cls(path, state.st_mtime_ns, state.st_size)

    @property
    def changed_ms(self) -> int:
        """When the file was last changed, ms since the epoch."""
        return self.changed_ns // 1_000_000

    def check(self, found: stat_result) -> None:
        """Raise `InputError` where the open file is another one by now."""
        if (found.st_mtime_ns, found.st_size) != (self.changed_ns, self.nbytes):
            raise self.changed()

    def changed(self) -> InputError:
        """What to raise where the file is another one by now."""
        return InputError(f"{self.path} was changed while it was read; run the backfill again")

    def message(self, number: int, value: bytes, tenant: str) -> Message:
        """Row `number` as a message: topic is the file's name, offset the row's number, key its `doc_id`.

        A version has room for the low bits of the number. What is above them counts as milliseconds, so that of the
        rows of one document the last one wins in a file of any length.
        """
        doc_id, value = _read(value, tenant)
        return Message(self.path.name, 0, number, self.changed_ms + (number >> PACKED_OFFSET_BITS), doc_id, value)


def documents_of(messages: Iterator[Message], events: EventReader) -> Iterator[DocumentKey]:
    """The documents that messages are about.

    Raises:
        InputError: a message does not tell.
    """
    for message in messages:
        try:
            yield events.parse(message).document
        except EventError as error:
            raise InputError(
                f"row {message.offset} of {message.topic} does not tell which document it is about: {error}"
            ) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Faults of the file as `InputError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _read(value: bytes, tenant: str) -> tuple[bytes | None, bytes]:
    """The row's own key, None where it has none; and the row, with the tenant where it names none itself.

    What is wrong with a row is said where it is parsed, so a broken one gets a key and passes as it is.
    """
    try:
        row = json.loads(value)
    except (ValueError, RecursionError):
        return b"?", value
    if not isinstance(row, dict):
        return b"?", value
    if tenant != DEFAULT_TENANT and "tenant" not in row:
        value = json.dumps(row | {"tenant": tenant}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    doc_id = row.get("doc_id")
    return doc_id.encode("utf-8", "surrogatepass") if isinstance(doc_id, str) else None, value
