"""Schemas of the three kinds to functions that decode values. The libraries are loaded on first use.

All three take schemas from the registry, which the operator trusts, and values from anybody.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

from schemas.errors import EventError, RegistryError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

Decoder = Callable[[bytes], Any]
_WRAPPERS = "google.protobuf."


def avro_decoder(schema: str, references: Mapping[str, str]) -> Decoder:
    """Values of an Avro schema.

    Args:
        references: schemas that it refers to, by name, each after those that it refers to itself.
    """
    import fastavro

    named: dict[str, Any] = {}
    for text in references.values():
        fastavro.parse_schema(json.loads(text), named)
    parsed = fastavro.parse_schema(json.loads(schema), named)

    def decode(value: bytes) -> Any:
        stream = BytesIO(value)
        record = fastavro.schemaless_reader(stream, parsed, None)
        if stream.tell() != len(value):
            raise EventError(f"{len(value) - stream.tell()} bytes are left over behind the Avro record")
        return record

    return decode


def json_decoder(schema: str, references: Mapping[str, str]) -> Decoder:
    """JSON behind a schema id. The schema is not applied: what we map is checked, the rest is the producer's."""

    def decode(value: bytes) -> Any:
        try:
            return json.loads(value.decode())
        except UnicodeDecodeError as error:
            raise EventError(f"the value is not UTF-8: {error.reason} at byte {error.start}") from error
        except (ValueError, RecursionError) as error:
            raise EventError(f"the value is not JSON: {error}") from error

    return decode


def protobuf_decoder(schema: str, references: Mapping[str, str]) -> Decoder:
    """Values of a Protobuf schema, which the registry hands over as a serialised file descriptor in base64."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    _add_well_known(pool)
    for name, text in references.items():
        pool.Add(_file(descriptor_pb2.FileDescriptorProto, text, name))
    file = _file(descriptor_pb2.FileDescriptorProto, schema, "kvquilt-root.proto")
    pool.Add(file)
    descriptor = pool.FindFileByName(file.name)

    def decode(value: bytes) -> Any:
        indexes, start = _message_indexes(value)
        found = _nth(descriptor, indexes)
        message = message_factory.GetMessageClass(found)()
        message.ParseFromString(value[start:])
        return _record(message)

    return decode


def _file(kind: Any, text: str, name: str) -> Any:
    try:
        file = kind.FromString(base64.b64decode(text, validate=True))
    except Exception as error:
        raise RegistryError(
            "the schema registry does not hand over Protobuf schemas as descriptors (?format=serialized), "
            "which reading them needs"
        ) from error
    file.name = name
    return file


def _add_well_known(pool: Any) -> None:
    from google.protobuf import (
        any_pb2,
        descriptor_pb2,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        struct_pb2,
        timestamp_pb2,
        wrappers_pb2,
    )

    for module in (
        any_pb2, descriptor_pb2, duration_pb2, empty_pb2, field_mask_pb2, struct_pb2, timestamp_pb2, wrappers_pb2,
    ):  # fmt: skip
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)


def _message_indexes(value: bytes) -> tuple[list[int], int]:
    """Which message of the file it is: a count and so many indexes, as zigzag varints; a single 0 means the first."""
    count, at = _varint(value, 0)
    if count == 0:
        return [0], at
    if not 0 < count <= 32:
        raise EventError(f"the value names a Protobuf message {count} levels deep; expected 1 to 32")
    indexes = []
    for _ in range(count):
        index, at = _varint(value, at)
        indexes.append(index)
    return indexes, at


def _varint(value: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(value) and shift < 35:
        byte = value[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
    raise EventError("the value ends within the index of its Protobuf message")


def _nth(file: Any, indexes: list[int]) -> Descriptor:
    messages = list(file.message_types_by_name.values())
    found = None
    for index in indexes:
        if not 0 <= index < len(messages):
            raise EventError(f"the schema has no Protobuf message at index {indexes}")
        found = messages[index]
        messages = list(found.nested_types)
    assert found is not None
    return found


def _record(message: Message) -> dict[str, Any]:
    """What is set in a message, by field name. Fields without presence that hold their default are not set."""
    return {field.name: _value(field, value) for field, value in message.ListFields()}


def _value(field: Any, value: Any) -> Any:
    if field.message_type is None:
        repeated = not isinstance(value, str | bytes | int | float)
        return list(value) if repeated else value
    if field.message_type.GetOptions().map_entry:
        of_messages = field.message_type.fields_by_name["value"].message_type is not None
        return {str(name): _message(item) if of_messages else item for name, item in value.items()}
    if hasattr(value, "ListFields"):
        return _message(value)
    return [_message(item) for item in value]


def _message(message: Message) -> Any:
    name = message.DESCRIPTOR.full_name
    if not name.startswith(_WRAPPERS):
        return _record(message)
    if name.endswith("Value") and [field.name for field in message.DESCRIPTOR.fields] == ["value"]:
        return message.value
    from google.protobuf import json_format

    return json_format.MessageToDict(message)


DECODERS: dict[str, Callable[[str, Mapping[str, str]], Decoder]] = {
    "AVRO": avro_decoder,
    "JSON": json_decoder,
    "PROTOBUF": protobuf_decoder,
}
