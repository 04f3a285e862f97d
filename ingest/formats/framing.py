"""Confluent's framing: a zero byte, the schema's id in four bytes (big-endian), then Avro, Protobuf or JSON."""

from __future__ import annotations

from typing import Any

from ingest.formats.registry import Registry
from schemas.errors import EventError

HEADER_BYTES = 5


def is_framed(value: bytes) -> bool:
    """Whether a value begins as a framed one does. No JSON text begins with a zero byte."""
    return value[:1] == b"\x00"


def decode(value: bytes, registry: Registry) -> dict[str, Any]:
    """The record of a framed value.

    Raises:
        EventError: no registry is set, it does not know the id, or the bytes do not fit the schema.
        RegistryError: the registry cannot be asked now.
    """
    if len(value) < HEADER_BYTES:
        raise EventError(f"a value framed with a schema id has at least {HEADER_BYTES} bytes (got {len(value)})")
    if not registry.url:
        raise EventError("the value begins as one framed with a schema id, but events.registry.url is not set")
    schema_id = int.from_bytes(value[1:HEADER_BYTES], "big")
    decoder = registry.decoder(schema_id)
    try:
        record = decoder(value[HEADER_BYTES:])
    except EventError:
        raise
    except Exception as error:  # decoders of others raise what their parts raise: EOFError, struct.error, …
        told = " ".join(str(error).split())[:200]
        raise EventError(
            f"the value does not fit schema {schema_id}: {type(error).__name__}{f': {told}' if told else ''}"
        ) from error
    if not isinstance(record, dict):
        raise EventError(f"schema {schema_id} must describe a record (the value is a {type(record).__name__})")
    return record
