"""Files and JSON lines as change events, ready to be published."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingest.sources.kinds import CONTENT_TYPES, LINES, title_of
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
    """The files named, and all that can be read in the folders named, sorted.

    Raises:
        InputError: a path does not exist, is of another kind, or a folder holds nothing to publish.
    """
    readable = (*CONTENT_TYPES, *LINES)
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in readable and file.is_file())
            if not inside:
                raise InputError(f"folder {path} holds no file that ends in {', '.join(readable)}")
            found += inside
        elif not path.exists():
            raise InputError(f"{path} does not exist")
        elif path.suffix not in readable:
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
    if file.suffix in LINES:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield _from_line(line, tenant, version)
                    except InputError as error:
                        yield InputError(f"{file}:{number}: {error}")
        return
    try:
        yield _from_file(file, root, tenant, version)
    except InputError as error:
        yield InputError(f"{file}: {error}")


def delete(doc_id: str, *, tenant: str = DEFAULT_TENANT, version: int | None = None) -> Outgoing:
    """The event that deletes a document."""
    headers = [(TENANT_HEADER, tenant.encode())]
    if version is not None:
        headers.append((VERSION_HEADER, str(version).encode()))
    return Outgoing(doc_id, None, tuple(headers), tenant)


def _from_file(file: Path, root: Path, tenant: str, version: int | None) -> Outgoing:
    try:
        doc_id = file.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise InputError(
            f"lies outside {root}, which document ids are relative to; name another folder with --root"
        ) from None
    if file.stat().st_size > MAX_CONTENT_BYTES:
        raise InputError(
            f"has {file.stat().st_size:,} bytes; at most {MAX_CONTENT_BYTES:,} are accepted. Split the document"
        )
    content_type, source = CONTENT_TYPES[file.suffix], file.read_bytes()
    try:
        content = base64.b64encode(source).decode() if content_type is ContentType.PDF else source.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8: {error.reason} at byte {error.start}") from error
    title = title_of(content, content_type, file.stem)
    fields = {"content": content, "content_type": content_type, "title": title, "version": version}
    return _outgoing(doc_id, {**fields, "tenant": tenant})


def _from_line(line: bytes, tenant: str, version: int | None) -> Outgoing:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise EventError(f"not JSON: {error}") from error
    doc_id = fields.pop("doc_id", None) if isinstance(fields, dict) else None
    if not isinstance(doc_id, str) or not doc_id:
        raise EventError('expected an object with "doc_id" and "content"')
    fields.setdefault("tenant", tenant)
    fields.setdefault("version", version)
    if fields.get("content", "") is None and "sha256" not in fields:
        return delete(doc_id, tenant=fields["tenant"], version=fields["version"])
    return _outgoing(doc_id, fields)


def _outgoing(doc_id: str, fields: dict[str, object]) -> Outgoing:
    body = read_body(fields)
    return Outgoing(doc_id, body.to_bytes(), tenant=body.tenant)
