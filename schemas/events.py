"""Change events: what a producer writes to the documents topic.

The Kafka key is the document id (UTF-8), the value a JSON object or null; null deletes the document. The
tenant is `default` unless the event names one. A null value has no room for a version: the header
`kvquilt.version` (decimal digits) carries it, also for producers that do not want it in the body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from schemas.errors import EventError
from schemas.ids import DocumentKey, digest, packed_version

SCHEMA_VERSION = 1
VERSION_HEADER = "kvquilt.version"
TENANT_HEADER = "kvquilt.tenant"
DEFAULT_TENANT = "default"
MAX_CONTENT_BYTES = 8 * 1024 * 1024  # of UTF-8; a larger document is several documents

Version = Annotated[int, Field(ge=0, lt=1 << 63)]
Name = Annotated[str, Field(min_length=1, max_length=512)]


class ContentType(StrEnum):
    """How `content` is to be read."""

    TEXT = "text"
    MARKDOWN = "markdown"


class ChangeEvent(BaseModel):
    """One version of one document, or its deletion (`content` is None).

    `version` is the producer's own monotonic number; without one the message's timestamp and offset order the
    event. `event_ms` is when the change happened, ms since the epoch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=False)

    tenant: Name
    doc_id: Name
    version: Version
    event_ms: int
    content: str | None
    content_type: ContentType = ContentType.TEXT
    title: str | None = None
    uri: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def document(self) -> DocumentKey:
        """The key of the document."""
        return DocumentKey(self.tenant, self.doc_id)

    @property
    def deletes(self) -> bool:
        """Whether the event is a tombstone."""
        return self.content is None

    @property
    def content_digest(self) -> str:
        """SHA-256 of everything that would be indexed; equal versions with equal digests are the same event."""
        body = self.model_dump(mode="json", exclude={"tenant", "doc_id", "version", "event_ms"})
        return digest(body)


class EventBody(BaseModel):
    """The JSON value of a message, as the producer writes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: int = SCHEMA_VERSION
    tenant: Name = DEFAULT_TENANT
    doc_id: Name | None = None
    version: Version | None = None
    content: str
    content_type: Annotated[ContentType, Field(strict=False)] = ContentType.TEXT
    title: str | None = None
    uri: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("content")
    @classmethod
    def _has_text(cls, content: str) -> str:
        if not content.strip():
            raise ValueError("the document is empty; to delete it, send a null value")
        if "\x00" in content:
            raise ValueError("the document holds a NUL character")
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half of a surrogate pair at character {error.start}") from error
        return content

    def to_bytes(self) -> bytes:
        """The value of the Kafka message."""
        return self.model_dump_json(exclude_defaults=True).encode()


def parse_event(
    key: bytes | None,
    value: bytes | None,
    *,
    timestamp_ms: int,
    offset: int,
    headers: Sequence[tuple[str, bytes | None]] = (),
) -> ChangeEvent:
    """Read one Kafka message; raises `EventError` that says what was wrong and what was expected."""
    extra = {name: header for name, header in headers if header is not None}
    doc_id = _doc_id(key)
    version = _header_version(extra)
    if value is None:
        tenant = extra.get(TENANT_HEADER, DEFAULT_TENANT.encode()).decode("utf-8", "replace")
        body: dict[str, Any] = {"tenant": tenant, "content": None}
    else:
        parsed = _parse_body(value)
        if parsed.doc_id is not None and parsed.doc_id != doc_id:
            raise EventError(f"the message key says {doc_id!r} and doc_id says {parsed.doc_id!r}; they must agree")
        body = parsed.model_dump(exclude={"schema_version", "doc_id", "version"})
        version = parsed.version if parsed.version is not None else version
    if version is None:
        version = packed_version(timestamp_ms, offset)
    try:
        return ChangeEvent(doc_id=doc_id, version=version, event_ms=timestamp_ms, **body)
    except ValidationError as error:
        raise EventError(describe(error)) from error


def describe(error: ValidationError) -> str:
    """The first faults of a pydantic error in one sentence: field, what was wrong, what was found."""
    faults = []
    for fault in error.errors()[:3]:
        where = ".".join(map(str, fault["loc"])) or "the value"
        found = repr(fault["input"])
        faults.append(f"{where}: {fault['msg']} (got {found if len(found) <= 60 else found[:57] + '...'})")
    return "; ".join(faults)


def _doc_id(key: bytes | None) -> str:
    if not key:
        raise EventError("the message has no key; the key must be the document id")
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise EventError(f"the message key is not UTF-8: {error.reason} at byte {error.start}") from error


def _header_version(headers: Mapping[str, bytes]) -> int | None:
    raw = headers.get(VERSION_HEADER)
    if raw is None:
        return None
    if not raw.isdigit() or int(raw) >= 1 << 63:
        raise EventError(f"header {VERSION_HEADER} must be decimal digits below 2^63 (got {raw[:40]!r})")
    return int(raw)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _parse_body(value: bytes) -> EventBody:
    if len(value) > MAX_CONTENT_BYTES:
        raise EventError(
            f"the event has {len(value):,} bytes; at most {MAX_CONTENT_BYTES:,} are accepted. Split the document"
        )
    try:
        body = json.loads(value.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise EventError(f"the value is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise EventError(f"the value is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise EventError(f"the value must be a JSON object or null (got a JSON {type(body).__name__})")
    declared = body.get("schema_version", SCHEMA_VERSION)
    if isinstance(declared, int) and declared > SCHEMA_VERSION:
        raise EventError(
            f"schema_version {declared} is newer than {SCHEMA_VERSION}, the newest this release reads; upgrade kvquilt"
        )
    try:
        return EventBody.model_validate(body)
    except ValidationError as error:
        raise EventError(describe(error)) from error
