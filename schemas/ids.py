"""Identity: which document, which version, which chunk, which artifact.

Nothing here reads a clock, a random number or Python's `hash()`: the same input names the same thing on
every machine, so that work that is done twice is written once.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from pydantic_core import to_json

T = TypeVar("T")

NAMESPACE = uuid.UUID("6f1d2a52-6f0b-5a39-9d53-0a5c0b6b7a11")  # ours; changing it renames every point

PACKED_OFFSET_BITS = 21
PACKED_VERSION_MIN = 1 << 60  # every timestamp since 1987 packs to more, producers' own counters below


def canonical_bytes(value: object) -> bytes:
    """JSON with sorted keys, no spaces and plain UTF-8: one spelling for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def writable(value: T) -> T:
    """The value, checked: Python holds NaN, infinity and half surrogate pairs; JSON and the stores do not.

    Raises:
        ValueError: it cannot be written as JSON as it is.
    """
    try:
        canonical_bytes(value)
        to_json([[value]])  # as documents are published, inside others; it goes less deep
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {str(error)[:200]}") from error
    return value


def digest(value: object) -> str:
    """SHA-256 of `canonical_bytes(value)`, in hex."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


@dataclass(frozen=True, order=True)
class DocumentKey:
    """Names a document: (tenant, doc_id)."""

    tenant: str
    doc_id: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the key: the document's folder name in the object store and its id in payload filters."""
        return digest([self.tenant, self.doc_id])

    @cached_property
    def tenant_digest(self) -> str:
        """SHA-256 of the tenant, so that tenant names never become path segments."""
        return digest([self.tenant])

    def __str__(self) -> str:
        return f"{self.tenant}/{self.doc_id}"


def packed_version(timestamp_ms: int, offset: int) -> int:
    """The version of an event that carries none: broker timestamp in ms, then the low bits of its offset.

    Two events of one document lie in one partition, so the offset orders those of the same millisecond.
    """
    return (timestamp_ms << PACKED_OFFSET_BITS) | (offset & ((1 << PACKED_OFFSET_BITS) - 1))


def is_packed(version: int) -> bool:
    """Whether `version` came from `packed_version` rather than from the producer's own counter."""
    return version >= PACKED_VERSION_MIN


def chunk_id(document: DocumentKey, version: int, ordinal: int) -> uuid.UUID:
    """The id of a chunk and of its point: a function of document, version and place in the document."""
    return uuid.uuid5(NAMESPACE, canonical_bytes([document.tenant, document.doc_id, version, ordinal]).decode())


def head_id(document: DocumentKey) -> uuid.UUID:
    """The id of a document's head point."""
    return uuid.uuid5(NAMESPACE, canonical_bytes([document.tenant, document.doc_id]).decode())


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, the form that is digested and stored."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def token_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 of the token ids: two chunks with equal digests need one KV artifact."""
    return hashlib.sha256(token_bytes(token_ids)).hexdigest()


def artifact_key(fingerprint: str, prefix_digest: str, token_ids: Sequence[int], neighbours: Iterable[str] = ()) -> str:
    """The name of a KV artifact within its document's folder.

    Args:
        fingerprint: digest of the model's fingerprint.
        prefix_digest: digest of the ids that the chunk saw in front of it while it was prefilled.
        token_ids: the chunk.
        neighbours: artifact keys of the chunks it was fused with, in order; empty if it was not fused.
    """
    return digest([fingerprint, prefix_digest, token_digest(token_ids), list(neighbours)])
