"""Files and JSON lines as change events, ready to be published."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingest.sources.base import LeftOut
from ingest.sources.folder import files_in as files_in_folder
from ingest.sources.kinds import CONTENT_TYPES, LINES, is_utf8, relative_id, shown, title_of
from schemas.errors import EventError, InputError
from schemas.events import (
    DEFAULT_TENANT,
    MAX_CONTENT_BYTES,
    TENANT_HEADER,
    VERSION_HEADER,
    ContentType,
    message_key,
    read_body,
)
from schemas.ids import DocumentKey


@dataclass(frozen=True)
class Outgoing:
    """One message for the documents topic; a value of None deletes the document."""

    doc_id: str
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    tenant: str = DEFAULT_TENANT

    @property
    def key(self) -> bytes:
        """The Kafka key."""
        return message_key(DocumentKey(self.tenant, self.doc_id))


def files_in(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those in the folders named that a backfill would read too, sorted.

    What it would name as a fault is among them: `read_documents` says what is wrong.

    Raises:
        InputError: a path does not exist, is of another kind, or a folder holds nothing to publish.
    """
    readable = (*CONTENT_TYPES, *LINES)
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [file for file in _inside(path) if file.suffix.lower() in readable]
            if not inside:
                raise InputError(f"folder {path} holds no file that ends in {', '.join(readable)}")
            found += inside
        elif not path.exists():
            raise InputError(f"{path} does not exist")
        elif path.suffix.lower() not in readable:
            raise InputError(f"{path} ends in {path.suffix or 'nothing'}; publish reads {', '.join(readable)}")
        else:
            found.append(path)
    return found


def read_documents(
    file: Path, *, root: Path, tenant: str = DEFAULT_TENANT, version: int | None = None
) -> Iterator[Outgoing | InputError]:
    """The events in one file: one document, or one for each line of JSON. A fault of one never hides the others.

    Args:
        root: ids of documents are paths relative to this folder.
    """
    try:
        if file.suffix.lower() in LINES:
            yield from _from_lines(file, tenant, version)
        else:
            yield _from_file(file, relative_id(file, root), tenant, version)
    except InputError as error:
        yield error
    except OSError as error:
        yield InputError(f"{shown(file)} cannot be read: {error.strerror}")


def delete(doc_id: str, *, tenant: str = DEFAULT_TENANT, version: int | None = None) -> Outgoing:
    """The event that deletes a document."""
    headers = [(TENANT_HEADER, tenant.encode())]
    if version is not None:
        headers.append((VERSION_HEADER, str(version).encode()))
    return Outgoing(doc_id, None, tuple(headers), tenant)


def _inside(folder: Path) -> Iterator[Path]:
    for found in files_in_folder(folder, ""):
        if not isinstance(found, LeftOut):
            yield found[0]
        elif found.why.is_fault:
            yield folder / found.doc_id


def _from_file(file: Path, doc_id: str, tenant: str, version: int | None) -> Outgoing:
    if (nbytes := file.stat().st_size) > MAX_CONTENT_BYTES:
        raise InputError(
            f"{shown(file)} has {nbytes:,} bytes; at most {MAX_CONTENT_BYTES:,} are accepted. Split the document"
        )
    content_type, source = CONTENT_TYPES[file.suffix.lower()], file.read_bytes()
    try:
        content = base64.b64encode(source).decode() if content_type is ContentType.PDF else source.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{shown(file)} is not UTF-8: {error.reason} at byte {error.start}") from error
    title = title_of(content, content_type, file.stem)
    fields = {"content": content, "content_type": content_type, "title": title, "version": version}
    try:
        return _outgoing(doc_id, {**fields, "tenant": tenant})
    except EventError as error:
        raise InputError(f"{shown(file)}: {error}") from error


def _from_lines(file: Path, tenant: str, version: int | None) -> Iterator[Outgoing | InputError]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield _from_line(line, tenant, version)
                except InputError as error:
                    yield InputError(f"{shown(file)}:{number}: {error}")


def _from_line(line: bytes, tenant: str, version: int | None) -> Outgoing:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EventError(f"not JSON: {error}") from error
    doc_id = fields.pop("doc_id", None) if isinstance(fields, dict) else None
    if not isinstance(doc_id, str) or not doc_id or not is_utf8(doc_id):
        raise EventError('expected an object with "doc_id" and "content"')
    fields.setdefault("tenant", tenant)
    fields.setdefault("version", version)
    if fields.get("content", "") is None and "sha256" not in fields:
        if not isinstance(fields["tenant"], str) or not fields["tenant"] or not is_utf8(fields["tenant"]):
            raise EventError(f"tenant must name the tenant (got {fields['tenant']!r:.60})")
        return delete(doc_id, tenant=fields["tenant"], version=fields["version"])
    return _outgoing(doc_id, fields)


def _outgoing(doc_id: str, fields: dict[str, object]) -> Outgoing:
    body = read_body(fields)
    return Outgoing(doc_id, body.to_bytes(), tenant=body.tenant)
