"""Debezium change events: an envelope with `op`, `before`, `after` and `source`; behind a deletion, a tombstone.

What orders them is the database's own number, `source.lsn`: a connector that starts again sends older changes once
more. A tombstone has no value, so no such number: it deletes what changed before its time (`ChangeEvent.undated`).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ingest.formats.keys import RecordKey
from ingest.formats.place import At
from ingest.formats.records import record_event, record_tenant, whole_number
from schemas.errors import EventError
from schemas.events import DEFAULT_TENANT, ChangeEvent, make_deletion
from schemas.ids import packed_version
from schemas.settings import EventSettings, FieldSettings

OPERATIONS = {"c": "create", "u": "update", "r": "read of a snapshot", "d": "delete"}
_UNAVAILABLE = b"__debezium_unavailable_value"  # stands for a large column that an update left as it was
UNAVAILABLE = (_UNAVAILABLE.decode(), _UNAVAILABLE, base64.b64encode(_UNAVAILABLE).decode())


def envelope(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The envelope, with or without Connect's `schema` and `payload` around it; None where there is none."""
    payload = body.get("payload")
    if isinstance(payload, Mapping) and body.keys() <= {"schema", "payload"}:
        body = payload
    if "op" in body and ("after" in body or "before" in body or isinstance(body.get("source"), Mapping)):
        return body
    return None


def read(body: Mapping[str, Any], at: At, key: RecordKey | None, settings: EventSettings) -> ChangeEvent:
    """One change of one row.

    Raises:
        EventError: an operation on no single row, or a row that lacks what is needed.
    """
    operation = body.get("op")
    if not isinstance(operation, str) or operation not in OPERATIONS:
        known = ", ".join(f"{letter} ({name})" for letter, name in OPERATIONS.items())
        raise EventError(f"Debezium op {operation!r:.20} is not about one row; expected {known}")
    version = at.version if at.version is not None else _version(body.get("source"), at, settings)
    if operation == "d":
        before = body.get("before")
        row = {**(before if isinstance(before, Mapping) else {}), **(key.fields if key is not None else {})}
        tenant = record_tenant(row, settings.fields)
        return make_deletion(at.doc_id, tenant or DEFAULT_TENANT, version, event_ms=at.timestamp_ms, **at.order)
    after = body.get("after")
    if not isinstance(after, Mapping):
        raise EventError(f"Debezium op {operation} ({OPERATIONS[operation]}) must carry the row in `after`")
    return record_event(_filled(after, body.get("before"), settings.fields), at, settings.fields, version=version)


def tombstone(at: At, key: RecordKey, settings: EventSettings) -> ChangeEvent:
    """The null value that follows a deletion, so that compaction drops the row; see `ChangeEvent.undated`."""
    tenant = record_tenant(key.fields, settings.fields) or DEFAULT_TENANT
    event = make_deletion(at.doc_id, tenant, 0, event_ms=at.timestamp_ms, **at.order)
    return event.model_copy(update={"undated": True})


def _version(source: Any, at: At, settings: EventSettings) -> int:
    name = settings.debezium.version
    if not name:
        return packed_version(at.timestamp_ms, at.offset)
    if not isinstance(source, Mapping):
        raise EventError("the Debezium envelope has no `source`, which says when the row changed")
    if name == "ts_ms" or name not in source:
        changed_ms = source.get("ts_ms")
        if not isinstance(changed_ms, int) or isinstance(changed_ms, bool) or not 0 < changed_ms < 1 << 42:
            raise EventError(
                f"`source` has neither {name!r} nor a `ts_ms` in milliseconds; see events.debezium.version"
            )
        return packed_version(changed_ms, at.offset)
    return whole_number(source[name], f"source.{name}")


def _filled(after: Mapping[str, Any], before: Any, names: FieldSettings) -> Mapping[str, Any]:
    """The row with the columns that an update left alone, and the log therefore does not hold."""
    ours = {name for name in names.model_dump().values() if isinstance(name, str)} | {*names.metadata}
    known = before if isinstance(before, Mapping) else {}
    filled = dict(after)
    for name in ours & after.keys():
        if after[name] not in UNAVAILABLE:
            continue
        if known.get(name) is None or known[name] in UNAVAILABLE:
            raise EventError(
                f"column {name!r} is not in the log, because the update left it as it was; "
                "set REPLICA IDENTITY FULL for the table"
            )
        filled[name] = known[name]
    return filled
