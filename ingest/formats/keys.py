"""Message keys that are records: a connector writes `{"id": 7}`, or the same framed with a schema id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingest.formats import framing
from ingest.formats.registry import Registry
from schemas.errors import EventError
from schemas.settings import FieldSettings

MAX_KEY_BYTES = 64 * 1024
_OURS = {"doc_id", "tenant"}  # what `schemas.events.message_key` writes


@dataclass(frozen=True)
class RecordKey:
    """A key that is a record. `tenant` is set where the key is ours and names the whole document key."""

    fields: Mapping[str, Any]
    doc_id: str
    tenant: str | None = None


def read_key(key: bytes | None, names: FieldSettings, registry: Registry) -> RecordKey | None:
    """The key as a record; None where it is plain text, which is the document id as it is.

    The key alone decides, never the value: a change and the tombstone after it must name one document.

    Raises:
        EventError: a record that names no document.
        RegistryError: the key is framed, and its schema cannot be had now.
    """
    if key is None or len(key) > MAX_KEY_BYTES:
        return None
    if registry.url and framing.is_framed(key):
        fields = framing.decode(key, registry)
    elif key[:1] == b"{" and (parsed := _json_object(key)) is not None:
        fields = parsed
    else:
        return None
    if fields.keys() == {"schema", "payload"} and isinstance(fields["payload"], dict):
        fields = fields["payload"]
    if fields.keys() == _OURS:
        doc_id, tenant = (id_text(fields[name], f"field {name!r} of the message key") for name in ("doc_id", "tenant"))
        return RecordKey(fields, doc_id, tenant)
    return RecordKey(fields, _doc_id(fields, names.id))


def id_text(value: Any, what: str) -> str:
    """A document id from a field: text as it is, a whole number in decimal digits."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise EventError(f"{what} must be text or a whole number to be a document id (got {_shown(value)})")


def _doc_id(fields: Mapping[str, Any], name: str) -> str:
    if name:
        if name not in fields:
            raise EventError(f"the message key has no field {name!r}, which events.fields.id names as the document id")
        return id_text(fields[name], f"field {name!r} of the message key")
    if len(fields) != 1:
        raise EventError(
            f"the message key has {len(fields)} fields; name the one that is the document id in events.fields.id"
        )
    ((name, value),) = fields.items()
    return id_text(value, f"field {name!r} of the message key")


def _json_object(key: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(key)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
