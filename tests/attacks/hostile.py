"""One good KV file, ways to spoil it, and a reader that refuses what is spoilt."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas import kv_artifact
from schemas.errors import ArtifactMiss, MissReason
from schemas.ids import DocumentKey
from schemas.kv_artifact import KvArtifact
from stores.fakes import fake_artifact, fake_fingerprint

DOC = DocumentKey("acme", "a")
IDS = [3, 1, 2]
FINGERPRINT = fake_fingerprint()
KEY, GOOD = fake_artifact(DOC, IDS)
DATA = kv_artifact.encode(GOOD)
END = kv_artifact.header_end(DATA)
GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.safetensors"))


def read(data: bytes) -> KvArtifact:
    """As a reader does: decode, compare identity, check."""
    artifact = kv_artifact.decode(data)
    kv_artifact.check(
        artifact, generation="fake", fingerprint=FINGERPRINT.digest, token_sha256=GOOD.header.token_sha256
    )
    return artifact


def refused(data: bytes) -> tuple[MissReason, str]:
    with pytest.raises(ArtifactMiss) as miss:
        read(data)
    return miss.value.reason, str(miss.value)


def file(header: bytes | str, payload: bytes = DATA[END:]) -> bytes:
    """A file with this header text, padded, its length in front."""
    text = header.encode() if isinstance(header, str) else header
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + payload


def changed(change: Callable[[dict[str, Any]], None], payload: bytes = DATA[END:]) -> bytes:
    """The good file with its parsed header changed."""
    header = json.loads(DATA[8:END])
    change(header)
    return file(json.dumps(header), payload)


def with_fingerprint(**fields: Any) -> bytes:
    def apply(header):
        fingerprint = json.loads(header["__metadata__"]["fingerprint"]) | fields
        header["__metadata__"]["fingerprint"] = json.dumps({k: v for k, v in fingerprint.items() if v is not None})

    return changed(apply)


def with_tensor(name: str, **fields: Any) -> bytes:
    return changed(lambda header: header[name].update(fields))
