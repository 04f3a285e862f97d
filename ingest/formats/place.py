"""Where a message stands in its topic, and what its key and headers say: what every format needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from schemas.events import header_version, last_headers, text_key

if TYPE_CHECKING:
    from ingest.formats.keys import RecordKey
    from stores.topics import Message


class Order(TypedDict):
    """What orders events that carry no version."""

    timestamp_ms: int
    offset: int


@dataclass(frozen=True)
class At:
    """A message without its value.

    Attributes:
        doc_id: the document that the key names.
        raw_key: the key as text, empty where it is none.
        version: from the header `kvquilt.version`.
        headers: the last value under each name; empty where there is none.
    """

    doc_id: str
    raw_key: str
    version: int | None
    timestamp_ms: int
    offset: int
    headers: Mapping[str, bytes]

    @property
    def order(self) -> Order:
        """Timestamp and offset, as keyword arguments."""
        return {"timestamp_ms": self.timestamp_ms, "offset": self.offset}

    @classmethod
    def of(cls, message: Message, key: RecordKey | None) -> At:
        """Read key and headers.

        Raises:
            EventError: there is no usable key, or a header is wrong.
        """
        headers = last_headers(message.headers)
        return cls(
            doc_id=key.doc_id if key is not None else text_key(message.key),
            raw_key=(message.key or b"").decode("utf-8", "replace"),
            version=header_version(headers),
            timestamp_ms=message.timestamp_ms,
            offset=message.offset,
            headers=headers,
        )
