"""The KV artifact: one chunk's keys and values in one safetensors file.

Tensors: `k` and `v` `[L, H, T, D]`, keys before RoPE; `token_ids` `[T]` int32. The header travels as the file's
`__metadata__` (all values strings, as the format demands). docs/kv_format.md is the prose; the golden bytes are
in tests/golden/. No tensor library is needed here: tensors are a dtype name, a shape and bytes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ArtifactMiss, MissReason
from schemas.fingerprint import Fingerprint
from schemas.ids import DocumentKey, token_bytes, token_digest

FORMAT_VERSION = 1
Buffer = bytes | bytearray | memoryview
DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SAFETENSORS_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class ArtifactHeader(BaseModel):
    """What the file says of itself. Every read compares it with what the reader expects."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    generation: str
    fingerprint: Fingerprint
    prefix_sha256: str
    tenant: str
    doc_id: str
    version: int
    ordinal: int
    token_sha256: str
    payload_sha256: str

    @property
    def document(self) -> DocumentKey:
        """The document the chunk was cut from."""
        return DocumentKey(self.tenant, self.doc_id)


@dataclass(frozen=True, eq=False)
class KvArtifact:
    """Header and rows. `k` and `v` are the raw bytes of `[L, H, T, D]` tensors of `fingerprint.dtype`."""

    header: ArtifactHeader
    k: Buffer
    v: Buffer
    token_ids: npt.NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(L, H, T, D)` of `k` and of `v`."""
        fingerprint = self.header.fingerprint
        return fingerprint.n_layers, fingerprint.n_kv_heads, len(self.token_ids), fingerprint.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return len(self.k) + len(self.v) + self.token_ids.nbytes


def payload_sha256(k: Buffer, v: Buffer, token_ids: npt.NDArray[np.int32]) -> str:
    """SHA-256 over k, v and the ids (little-endian int32), in that order."""
    state = hashlib.sha256(k)
    state.update(v)
    state.update(token_bytes(token_ids.tolist()))
    return state.hexdigest()


def encode(artifact: KvArtifact) -> bytes:
    """The bytes of the file.

    Raises:
        ValueError: `k` or `v` do not have the size that the header says.
    """
    shape = artifact.shape
    dtype = artifact.header.fingerprint.dtype
    expected = int(np.prod(shape)) * DTYPE_NBYTES[dtype]
    for name, tensor in (("k", artifact.k), ("v", artifact.v)):
        if len(tensor) != expected:
            raise ValueError(f"{name} has {len(tensor)} bytes; {shape} of {dtype} needs {expected}")
    buffers = {
        "k": (dtype, list(shape), np.frombuffer(artifact.k, np.uint8)),
        "v": (dtype, list(shape), np.frombuffer(artifact.v, np.uint8)),
        "token_ids": ("int32", [shape[2]], np.frombuffer(token_bytes(artifact.token_ids.tolist()), np.uint8)),
    }
    tensors = {  # addresses: `buffers` stays alive until the bytes are made
        name: safetensors.TensorSpec(dtype=kind, shape=size, data_ptr=raw.ctypes.data, data_len=raw.nbytes)
        for name, (kind, size, raw) in buffers.items()
    }
    metadata = {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in artifact.header.model_dump(mode="json").items()
    }
    return bytes(safetensors.serialize(tensors, metadata))


def decode(data: Buffer) -> KvArtifact:
    """Read a file; its tensors are views into `data`. Checks form, not identity: see `check`.

    Raises:
        ArtifactMiss: `TRUNCATED` or `FORMAT`.
    """
    view = memoryview(data).cast("B")
    header, tensors, start = _split(view)
    shape = (
        header.fingerprint.n_layers,
        header.fingerprint.n_kv_heads,
        _n_tokens(tensors),
        header.fingerprint.head_dim,
    )
    dtype = header.fingerprint.dtype
    if dtype not in _SAFETENSORS_NAME:
        raise ArtifactMiss(MissReason.FORMAT, f"dtype {dtype!r} is not one of {sorted(_SAFETENSORS_NAME)}")
    k = _tensor(view, start, tensors, "k", _SAFETENSORS_NAME[dtype], list(shape))
    v = _tensor(view, start, tensors, "v", _SAFETENSORS_NAME[dtype], list(shape))
    ids = _tensor(view, start, tensors, "token_ids", "I32", [shape[2]])
    return KvArtifact(header, k, v, np.frombuffer(ids, dtype="<i4"))


def check(artifact: KvArtifact, *, generation: str, fingerprint: str, token_sha256: str) -> None:
    """Refuse an artifact that is not the one that was asked for, or not the bytes that were written.

    Args:
        generation: name of the generation in use.
        fingerprint: digest of the fingerprint in use.
        token_sha256: token digest of the chunk that is to be served.

    Raises:
        ArtifactMiss: `FINGERPRINT`, `TOKEN_IDS` or `CHECKSUM`.
    """
    header = artifact.header
    if header.generation != generation or header.fingerprint.digest != fingerprint:
        raise ArtifactMiss(MissReason.FINGERPRINT, f"made by generation {header.generation}, {generation} is in use")
    if header.token_sha256 != token_sha256 or token_digest(artifact.token_ids.tolist()) != token_sha256:
        raise ArtifactMiss(MissReason.TOKEN_IDS, f"holds other token ids than chunk {token_sha256[:16]}")
    if payload_sha256(artifact.k, artifact.v, artifact.token_ids) != header.payload_sha256:
        raise ArtifactMiss(MissReason.CHECKSUM, "the payload does not have the SHA-256 that the header says")


def _split(view: memoryview) -> tuple[ArtifactHeader, dict[str, Any], int]:
    if len(view) < 8:
        raise ArtifactMiss(MissReason.TRUNCATED, f"{len(view)} bytes are no safetensors file")
    start = 8 + int.from_bytes(view[:8], "little")
    if start > len(view):
        raise ArtifactMiss(MissReason.TRUNCATED, f"the header ends at byte {start}, the file at {len(view)}")
    try:
        tensors = json.loads(bytes(view[8:start]))
        metadata = dict(tensors.pop("__metadata__"))
        for name in ("format_version", "version", "ordinal", "fingerprint"):
            metadata[name] = json.loads(metadata[name])
        if metadata["format_version"] != FORMAT_VERSION:
            raise ArtifactMiss(
                MissReason.FORMAT, f"format version {metadata['format_version']}; this release reads {FORMAT_VERSION}"
            )
        return ArtifactHeader.model_validate(metadata), tensors, start
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError) as error:
        raise ArtifactMiss(MissReason.FORMAT, f"unreadable header: {error}") from error


def _n_tokens(tensors: dict[str, Any]) -> int:
    try:
        (n_tokens,) = tensors["token_ids"]["shape"]
        return int(n_tokens)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactMiss(MissReason.FORMAT, "no tensor token_ids [T]") from error


def _tensor(
    view: memoryview, start: int, tensors: dict[str, Any], name: str, dtype: str, shape: list[int]
) -> memoryview:
    entry = tensors.get(name)
    if not isinstance(entry, dict) or entry.get("dtype") != dtype or entry.get("shape") != shape:
        raise ArtifactMiss(MissReason.FORMAT, f"tensor {name} is {entry}; expected {dtype} {shape}")
    try:
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactMiss(MissReason.FORMAT, f"tensor {name} has no data_offsets") from error
    nbytes = int(np.prod(shape)) * (4 if dtype in ("F32", "I32") else 2)
    if begin < 0 or end - begin != nbytes:
        raise ArtifactMiss(MissReason.FORMAT, f"tensor {name} has {end - begin} bytes; expected {nbytes}")
    if start + end > len(view):
        raise ArtifactMiss(MissReason.TRUNCATED, f"tensor {name} ends at byte {start + end}, the file at {len(view)}")
    return view[start + begin : start + end]
