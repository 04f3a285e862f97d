"""CloudEvents 1.0 over Kafka, in binary mode (attributes in `ce_…` headers) and structured mode (one JSON object).

Data that is JSON is a record with the names of `events.fields`; data of a document type is the document itself.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import re
from collections.abc import Mapping
from typing import Any

from ingest.formats.place import At
from ingest.formats.records import MEDIA_TYPES, media_type, record_event, whole_number
from schemas.errors import EventError
from schemas.events import (
    DEFAULT_TENANT,
    ChangeEvent,
    ContentType,
    check_size,
    load_object,
    make_deletion,
    make_event,
    read_body,
)
from schemas.settings import CloudEventSettings, EventSettings, FieldSettings

STRUCTURED = "application/cloudevents+json"
REQUIRED = ("id", "source", "type")
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([\w.-]{1,40})", re.IGNORECASE)
_CHARSETS = re.compile(
    r"utf-?8|utf-?16(le|be)?|(us-)?ascii|iso-?8859-\d{1,2}|latin-?1|(windows-|cp)125\d", re.IGNORECASE
)


def is_binary(headers: Mapping[str, bytes]) -> bool:
    """Whether the headers carry the attributes."""
    return "ce_specversion" in headers


def is_structured(headers: Mapping[str, bytes]) -> bool:
    """Whether the content type says that the value is a CloudEvent."""
    return _header(headers, "content-type").lower().startswith("application/cloudevents")


def read_binary(value: bytes | None, at: At, settings: EventSettings) -> ChangeEvent:
    """Attributes from the headers, data from the value; a null value deletes.

    A header without a value is an attribute that is not there, but for what names the document and its version: that
    must not become another's by accident.
    """
    attributes = {}
    own = {f"ce_{settings.cloudevents.tenant}", f"ce_{settings.cloudevents.version}"}
    for name, raw in at.headers.items():
        if name.startswith("ce_") and (raw or name in own):
            try:
                attributes[name.removeprefix("ce_")] = raw.decode()
            except UnicodeDecodeError as error:
                raise EventError(f"header {name} is not UTF-8: {error.reason} at byte {error.start}") from error
    if content_type := _header(at.headers, "content-type"):
        attributes["datacontenttype"] = content_type
    if value is not None:
        check_size(value)
    return _event(attributes, value, at, settings, tombstone=value is None)


def read_structured(body: Mapping[str, Any], at: At, settings: EventSettings) -> ChangeEvent:
    """Attributes and data from one JSON object."""
    content_type = _header(at.headers, "content-type").split(";")[0].strip().lower()
    if content_type not in ("", STRUCTURED) and content_type.startswith("application/cloudevents"):
        raise EventError(f"content type {content_type!r} cannot be read; expected {STRUCTURED}")
    data: Any = body.get("data")
    if body.get("data_base64") is not None:
        if data is not None:
            raise EventError("the event has data and data_base64; expected one of them")
        data = _from_base64(body["data_base64"])
    attributes = {name: value for name, value in body.items() if name not in ("data", "data_base64")}
    return _event(attributes, data, at, settings)


def _event(
    attributes: Mapping[str, Any], data: Any, at: At, settings: EventSettings, *, tombstone: bool = False
) -> ChangeEvent:
    _check(attributes, at)
    names = settings.cloudevents
    version, tenant = _version(attributes, at, names), _tenant(attributes, names)
    event_ms = _time_ms(attributes.get("time"), at.timestamp_ms)
    if tombstone or attributes["type"] in names.deleting_types:
        return make_deletion(at.doc_id, tenant or DEFAULT_TENANT, version, event_ms=event_ms, **at.order)
    declared = attributes.get("datacontenttype") or "application/json"
    kind = _media(declared)
    if data is None:
        if attributes.get("dataref") is None:
            raise EventError("the event has no data; to delete the document, see events.cloudevents.deleting_types")
        data = {"uri": attributes["dataref"], "sha256": attributes.get("sha256"), "content_type": declared}
        return record_event(data, at, FieldSettings(), version=version, tenant=tenant, event_ms=event_ms)
    if kind == "application/json" or kind.endswith("+json"):
        record = load_object(data) if isinstance(data, bytes) else data
        if not isinstance(record, Mapping):
            raise EventError(f"data of type {kind} must be a JSON object (got a JSON {type(record).__name__})")
        return record_event(record, at, settings.fields, version=version, tenant=tenant, event_ms=event_ms)
    if kind not in MEDIA_TYPES:
        raise EventError(f"datacontenttype {kind!r:.60} cannot be read; expected JSON or {', '.join(MEDIA_TYPES)}")
    content_type = media_type(kind)
    fields: dict[str, Any] = {"content": _content(data, declared, content_type), "content_type": str(content_type)}
    if tenant is not None:
        fields["tenant"] = tenant
    if isinstance(attributes.get("title"), str):
        fields["title"] = attributes["title"]
    return make_event(at.doc_id, read_body(fields), version=version, event_ms=event_ms, **at.order)


def _check(attributes: Mapping[str, Any], at: At) -> None:
    version = attributes.get("specversion")
    if version != "1.0":
        raise EventError(f"CloudEvents specversion {version!r:.40} cannot be read; expected '1.0'")
    for name in REQUIRED:
        if not isinstance(attributes.get(name), str) or not attributes[name]:
            raise EventError(f"the CloudEvent has no {name}; id, source and type are required")
    partition_key = attributes.get("partitionkey")
    if partition_key is not None and partition_key not in (at.raw_key, at.doc_id):
        raise EventError(
            f"the message key says {at.doc_id!r} and partitionkey says {partition_key!r:.80}; they must agree"
        )


def _version(attributes: Mapping[str, Any], at: At, names: CloudEventSettings) -> int | None:
    value = attributes.get(names.version) if names.version else None
    return at.version if value is None else whole_number(value, f"attribute {names.version!r}")


def _tenant(attributes: Mapping[str, Any], names: CloudEventSettings) -> str | None:
    if not names.tenant or names.tenant not in attributes:
        return None
    tenant = attributes[names.tenant]
    if not isinstance(tenant, str) or not tenant:
        raise EventError(f"attribute {names.tenant!r} must name the tenant (got {tenant!r:.60})")
    return tenant


def _time_ms(value: Any, otherwise: int) -> int:
    if value is None:
        return otherwise
    try:
        moment = datetime.datetime.fromisoformat(value)
        if moment.tzinfo is None:
            raise ValueError("no time zone")
        return round(moment.timestamp() * 1000)
    except (TypeError, ValueError, OverflowError) as error:
        raise EventError(f"attribute 'time' must be a time of RFC 3339 with a zone (got {value!r:.60})") from error


def _media(declared: Any) -> str:
    if not isinstance(declared, str):
        raise EventError(f"datacontenttype must be text (got {declared!r:.60})")
    return declared.split(";")[0].strip().lower()


def _content(data: Any, declared: str, kind: ContentType | None) -> str:
    """The document, as `EventBody.content` holds it."""
    if kind is ContentType.PDF:
        if not isinstance(data, bytes):
            raise EventError("a PDF in a structured CloudEvent must be in data_base64")
        return base64.b64encode(data).decode()
    if isinstance(data, str):
        return data
    if not isinstance(data, bytes):
        raise EventError(f"data of type {declared!r:.60} must be text (got a JSON {type(data).__name__})")
    named = _CHARSET.search(declared)
    charset = named.group(1) if named else "utf-8"
    if not _CHARSETS.fullmatch(charset):
        raise EventError(f"charset {charset!r} of the data cannot be read; send UTF-8")
    try:
        return data.decode(charset)
    except UnicodeDecodeError as error:
        raise EventError(f"the data is not {charset}: {error.reason} at byte {error.start}") from error
    except LookupError as error:
        raise EventError(f"charset {charset!r} of the data cannot be read; send UTF-8") from error


def _from_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise EventError(f"data_base64 is not base64: {error}") from error


def _header(headers: Mapping[str, bytes], name: str) -> str:
    for key in (name, name.title(), "contentType"):  # Kafka's header names know case; libraries differ
        if headers.get(key):
            return headers[key].decode("utf-8", "replace")
    return ""
