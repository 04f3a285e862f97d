"""Records (rows, Avro, Protobuf and JSON values, data of CloudEvents) to events, by the names in `events.fields`.

Other than our own JSON, records may have fields that we know nothing of: tables have more columns than documents.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
import uuid
from collections.abc import Mapping
from typing import Any

from ingest.formats.keys import id_text
from ingest.formats.place import At
from schemas.errors import EventError
from schemas.events import ChangeEvent, ContentType, make_event, read_body
from schemas.settings import FieldSettings

MEDIA_TYPES = {
    "text/plain": ContentType.TEXT,
    "text/markdown": ContentType.MARKDOWN,
    "text/x-markdown": ContentType.MARKDOWN,
    "text/html": ContentType.HTML,
    "application/xhtml+xml": ContentType.HTML,
    "application/pdf": ContentType.PDF,
} | {kind.value: kind for kind in ContentType}

_MAX_LEVELS = 100


def record_event(
    record: Mapping[str, Any],
    at: At,
    names: FieldSettings,
    *,
    version: int | None = None,
    tenant: str | None = None,
    event_ms: int | None = None,
) -> ChangeEvent:
    """A change as a record says it.

    Args:
        version: from elsewhere (an LSN, an attribute); it comes before the record's own field.
        tenant: from elsewhere; it comes before the record's own field.

    Raises:
        EventError: a field is missing or is of another type.
    """
    if names.id and record.get(names.id) is not None:
        named = id_text(record[names.id], f"field {names.id!r}")
        if named != at.doc_id:
            raise EventError(
                f"the message key says {at.doc_id!r} and field {names.id!r} says {named!r}; they must agree"
            )
    fields: dict[str, Any] = {"metadata": _metadata(record, names)}
    tenant = tenant if tenant is not None else record_tenant(record, names)
    if tenant is not None:
        fields["tenant"] = tenant
    if version is None:
        version = _version(record, names.version)
    content_type = media_type(_get(record, names.content_type))
    if content_type is not None:
        fields["content_type"] = content_type.value
    for field, name in (("title", names.title), ("uri", names.uri), ("sha256", names.digest)):
        if (value := _get(record, name)) is not None:
            fields[field] = value
    content = _get(record, names.content)
    if content is not None:
        fields["content"] = _content(content, content_type, names.content)
        fields.pop("sha256", None)  # content that is there needs no digest to be checked with
    elif "sha256" not in fields:
        raise EventError(
            f"{names.content}: the record has no such field, or it is null; events.fields.content names it"
        )
    return make_event(
        at.doc_id,
        read_body(fields),
        version=at.version if version is None else version,
        event_ms=at.timestamp_ms if event_ms is None else event_ms,
        **at.order,
    )


def record_tenant(record: Mapping[str, Any], names: FieldSettings) -> str | None:
    """The tenant that a record names; None where it has no such field.

    Raises:
        EventError: the field is there and is null or no text: nothing may become everybody's by accident.
    """
    if not names.tenant or names.tenant not in record:
        return None
    tenant = record[names.tenant]
    if not isinstance(tenant, str) or not tenant:
        raise EventError(f"field {names.tenant!r} must name the tenant (got {tenant!r:.60})")
    return tenant


def whole_number(value: Any, what: str) -> int:
    """A version: a number, or decimal digits.

    Raises:
        EventError: it is neither, or not within 0 and 2^63.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 19:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise EventError(f"{what} must be a whole number from 0 to 2^63 - 1 to be a version (got {value!r:.60})")
    return value


def media_type(value: Any) -> ContentType | None:
    """A content type by our name or by its media type; None where there is none.

    Raises:
        EventError: it is another one.
    """
    if value is None:
        return None
    kind = MEDIA_TYPES.get(value.split(";")[0].strip().lower()) if isinstance(value, str) else None
    if kind is None:
        known = ", ".join(MEDIA_TYPES)
        raise EventError(f"content type {value!r:.60} cannot be read; expected one of {known}")
    return kind


def plain(value: Any, level: int = 0) -> Any:
    """A value as JSON has it: dates in ISO 8601, bytes in base64, decimals as text."""
    if level > _MAX_LEVELS:
        raise EventError(f"metadata has more than {_MAX_LEVELS} levels")
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise EventError(f"metadata holds {value}, which is not a JSON number")
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item, level + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, level + 1) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    raise EventError(f"metadata holds a {type(value).__name__}, which JSON has no form for")


def _get(record: Mapping[str, Any], name: str) -> Any:
    return record.get(name) if name else None


def _version(record: Mapping[str, Any], name: str) -> int | None:
    value = _get(record, name)
    return None if value is None else whole_number(value, f"field {name!r}")


def _metadata(record: Mapping[str, Any], names: FieldSettings) -> dict[str, Any]:
    """A named field that is itself a record is taken apart; any other stands under its name."""
    found: dict[str, Any] = {}
    for name in names.metadata:
        value = record.get(name)
        if isinstance(value, Mapping):
            found |= plain(value)
        elif value is not None:
            found[name] = plain(value)
    return found


def _content(content: Any, content_type: ContentType | None, name: str) -> Any:
    if not isinstance(content, bytes):
        return content
    if content_type is ContentType.PDF:
        return base64.b64encode(content).decode()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise EventError(
            f"field {name!r} holds bytes that are not UTF-8 ({error.reason} at byte {error.start})"
        ) from error
