"""Change events: what a producer writes to the documents topic.

The Kafka key is the document id (UTF-8), the value a JSON object or null; null deletes the document. The
tenant is `default` unless the event names one. A null value has no room for a version: the header
`kvquilt.version` (decimal digits) carries it, also for producers that do not want it in the body.

This module knows our own JSON and what an event is. Other formats (CloudEvents, Debezium, Avro, …) are read in
`ingest/formats`, which also turns references, HTML and PDF into text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from schemas.errors import EventError
from schemas.ids import DocumentKey, canonical_bytes, digest, packed_version, writable

SCHEMA_VERSION = 1
VERSION_HEADER = "kvquilt.version"
TENANT_HEADER = "kvquilt.tenant"
DEFAULT_TENANT = "default"
MAX_CONTENT_BYTES = 8 * 1024 * 1024  # of UTF-8; a larger document is several documents
MAX_LABEL_CHARACTERS = 4096  # of title and URI
MAX_METADATA_BYTES = 64 * 1024  # as JSON

Version = Annotated[int, Field(ge=0, lt=1 << 63)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]  # of a document; every chunk has a copy


class ContentType(StrEnum):
    """How `content` is to be read. What is indexed is text or markdown: HTML becomes markdown, PDF text."""

    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"
    PDF = "pdf"  # in JSON, `content` holds the file in base64


class ChangeEvent(BaseModel):
    """One version of one document, or its deletion.

    `version` is the producer's own monotonic number; without one the message's timestamp and offset order the
    event. `event_ms` is when the change happened, ms since the epoch.

    As `parse_event` reads it, an event may still be a reference (no `content`, but `uri` and `source_sha256`), or
    hold HTML, or a PDF in base64. `ingest.formats` resolves it: then `content` is text or markdown, and
    `source_sha256` is of the bytes that it was made from.

    Attributes:
        source_sha256: of the bytes referred to, in hex; None where `content` is what the producer wrote.
        undated: a deletion by a message that had no room for a version, of a document that is ordered by its
            source's own numbers: it deletes what was changed before `event_ms`. `version` says nothing then.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=False)

    tenant: Name
    doc_id: Name
    version: Version
    event_ms: int
    content: str | None
    content_type: ContentType = ContentType.TEXT
    title: Label | None = None
    uri: Label | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    source_sha256: str | None = None
    undated: bool = False

    @property
    def document(self) -> DocumentKey:
        """The key of the document."""
        return DocumentKey(self.tenant, self.doc_id)

    @property
    def deletes(self) -> bool:
        """Whether the event is a tombstone."""
        return self.content is None and self.source_sha256 is None

    @property
    def content_digest(self) -> str:
        """SHA-256 of everything that would be indexed; equal versions with equal digests are the same event.

        Of extracted text it is the source that counts: another release of an extractor makes no other content.
        """
        body = self.model_dump(mode="json", exclude=_NOT_CONTENT)
        if self.source_sha256 is not None:
            body |= {"content": None, "source_sha256": self.source_sha256}
        return digest(body)


_NOT_CONTENT = {"tenant", "doc_id", "version", "event_ms", "source_sha256", "undated"}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: int = SCHEMA_VERSION
    tenant: Name = DEFAULT_TENANT
    doc_id: Name | None = None
    version: Version | None = None
    content_type: Annotated[ContentType, Field(strict=False)] = ContentType.TEXT
    title: Label | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("title", "uri", "metadata", check_fields=False)
    @classmethod
    def _can_be_written(cls, value: object) -> object:
        value = writable(value)  # else `to_bytes` would make null of NaN and infinity
        return _small(value) if isinstance(value, dict) else value

    def to_bytes(self) -> bytes:
        """The value of the Kafka message."""
        return self.model_dump_json(exclude_defaults=True).encode()


class EventBody(_Body):
    """The JSON value of a message, as the producer writes it."""

    content: str
    uri: Label | None = None

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

    @model_validator(mode="after")
    def _pdf_is_base64(self) -> EventBody:
        if self.content_type is ContentType.PDF:
            try:
                base64.b64decode(self.content, validate=True)
            except ValueError as error:
                raise ValueError(f"the content of a PDF must be in base64 ({error})") from error
        return self


class ReferenceBody(_Body):
    """The same with `uri` and `sha256` of the content in place of the content."""

    uri: Annotated[Label, Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]


def parse_event(
    key: bytes | None,
    value: bytes | None,
    *,
    timestamp_ms: int,
    offset: int,
    headers: Sequence[tuple[str, bytes | None]] = (),
) -> ChangeEvent:
    """Read one Kafka message; raises `EventError` that says what was wrong and what was expected."""
    extra = last_headers(headers)
    doc_id = text_key(key)
    version = header_version(extra)
    if value is None:
        tenant = header_tenant(extra) or DEFAULT_TENANT
        return make_deletion(doc_id, tenant, version, event_ms=timestamp_ms, timestamp_ms=timestamp_ms, offset=offset)
    body = read_body(load_object(value))
    return make_event(doc_id, body, version=version, event_ms=timestamp_ms, timestamp_ms=timestamp_ms, offset=offset)


def make_event(
    doc_id: str, body: EventBody | ReferenceBody, *, version: int | None, event_ms: int, timestamp_ms: int, offset: int
) -> ChangeEvent:
    """A change of document `doc_id`. The body's own version comes first, then `version`, then the message's place.

    Raises:
        EventError: the body names another document, or cannot be written down.
    """
    if body.doc_id is not None and body.doc_id != doc_id:
        raise EventError(f"the message key says {doc_id!r} and doc_id says {body.doc_id!r}; they must agree")
    fields = body.model_dump(exclude={"schema_version", "doc_id", "version", "sha256"})
    if isinstance(body, ReferenceBody):
        fields |= {"content": None, "source_sha256": body.sha256.lower()}
    if body.version is not None:
        version = body.version
    elif version is None:
        version = packed_version(timestamp_ms, offset)
    return _checked({"doc_id": doc_id, "version": version, "event_ms": event_ms, **fields})


def make_deletion(
    doc_id: str, tenant: str, version: int | None, *, event_ms: int, timestamp_ms: int, offset: int
) -> ChangeEvent:
    """The deletion of a document; without a version, in the order of the messages."""
    if version is None:
        version = packed_version(timestamp_ms, offset)
    fields = {"tenant": tenant, "doc_id": doc_id, "version": version, "event_ms": event_ms, "content": None}
    return _checked(fields)


def _checked(fields: Mapping[str, Any]) -> ChangeEvent:
    try:
        event = ChangeEvent.model_validate(fields)
    except ValidationError as error:
        raise EventError(describe(error)) from error
    try:  # what Python holds and neither JSON nor a store does: half surrogate pairs, infinity, a thousand levels
        canonical_bytes([event.tenant, event.doc_id, event.title, event.uri, event.metadata])
        event.model_dump_json(exclude={"content"})
    except (ValueError, RecursionError) as error:
        raise EventError(f"title, uri or metadata cannot be written as JSON: {str(error)[:200]}") from error
    try:
        _small(event.metadata)
    except ValueError as error:
        raise EventError(f"metadata: {error}") from error
    return event


def _small(metadata: dict[str, Any]) -> dict[str, Any]:
    if (n_bytes := len(canonical_bytes(metadata))) > MAX_METADATA_BYTES:
        raise ValueError(
            f"{n_bytes:,} bytes of JSON; at most {MAX_METADATA_BYTES:,} are accepted, since every chunk has a copy"
        )
    return metadata


def describe(error: ValidationError) -> str:
    """The first faults of a pydantic error in one sentence: field, what was wrong, what was found."""
    faults = []
    for fault in error.errors()[:3]:
        where = ".".join(map(str, fault["loc"])) or "the value"
        found = repr(fault["input"])
        faults.append(f"{where}: {fault['msg']} (got {found if len(found) <= 60 else found[:57] + '...'})")
    return "; ".join(faults)


def message_key(document: DocumentKey) -> bytes:
    """The Kafka key of a document's events: its id, and for another tenant than `default` a record that names both.

    Compaction keeps one message per key, so documents of the same id of two tenants must not share one. An id that
    would be read as a record is written as one too.
    """
    if document.tenant == DEFAULT_TENANT and not document.doc_id.startswith("{"):
        return document.doc_id.encode()
    return canonical_bytes({"doc_id": document.doc_id, "tenant": document.tenant})


def text_key(key: bytes | None) -> str:
    """The message key as the document id; raises `EventError` where there is none."""
    if not key:
        raise EventError("the message has no key; the key must be the document id")
    return _utf8(key, "the message key")


def last_headers(headers: Sequence[tuple[str, bytes | None]]) -> dict[str, bytes]:
    """The last value under each name. A header without a value is an empty one, as a dead letter keeps it."""
    return {name: value or b"" for name, value in headers}


def header_version(headers: Mapping[str, bytes]) -> int | None:
    """The version that `kvquilt.version` names; raises `EventError` where it is no int64."""
    return header_number(headers, VERSION_HEADER)


def header_number(headers: Mapping[str, bytes], name: str) -> int | None:
    """The number in a header of ours; raises `EventError` where it is there and is no int64."""
    raw = headers.get(name)
    if raw is None:
        return None
    if not raw.isdigit() or len(raw) > 19 or int(raw) >= 1 << 63:
        raise EventError(f"header {name} must be decimal digits below 2^63 (got {raw[:40]!r})")
    return int(raw)


def header_tenant(headers: Mapping[str, bytes]) -> str | None:
    """The tenant that `kvquilt.tenant` names; raises `EventError` where it is there and names none.

    What is deleted must not become the default tenant's, or another's, by accident.
    """
    raw = headers.get(TENANT_HEADER)
    if raw is None:
        return None
    if not raw:
        raise EventError(f"header {TENANT_HEADER} must name the tenant (it is empty)")
    return _utf8(raw, f"header {TENANT_HEADER}")


def _utf8(raw: bytes, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise EventError(f"{what} is not UTF-8: {error.reason} at byte {error.start}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def load_object(value: bytes) -> dict[str, Any]:
    """A message's value as a JSON object.

    Raises:
        EventError: it is too large, not JSON, or no object.
    """
    check_size(value)
    try:
        body = json.loads(value.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise EventError(f"the value is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise EventError(f"the value is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise EventError(f"the value must be a JSON object or null (got a JSON {type(body).__name__})")
    return body


def check_size(value: bytes) -> None:
    """Raise `EventError` where a message's value is larger than events may be."""
    if len(value) > MAX_CONTENT_BYTES:
        raise EventError(
            f"the event has {len(value):,} bytes; at most {MAX_CONTENT_BYTES:,} are accepted. Split the document"
        )


def read_body(body: Mapping[str, Any]) -> EventBody | ReferenceBody:
    """The fields of an event, checked; one with `sha256` and no `content` refers to its content."""
    declared = body.get("schema_version", SCHEMA_VERSION)
    if isinstance(declared, int) and declared > SCHEMA_VERSION:
        raise EventError(
            f"schema_version {declared} is newer than {SCHEMA_VERSION}, the newest this release reads; upgrade kvquilt"
        )
    by_reference = "sha256" in body and body.get("content") is None
    try:
        if by_reference:
            return ReferenceBody.model_validate({name: value for name, value in body.items() if name != "content"})
        return EventBody.model_validate(body)
    except ValidationError as error:
        raise EventError(describe(error)) from error
