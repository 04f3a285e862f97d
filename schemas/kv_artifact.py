"""The KV artifact: one chunk's keys and values in one safetensors file.

Tensors: `k` and `v` `[L, H, T, D]`, keys before RoPE; `token_ids` `[T]` int32. The header travels as the file's
`__metadata__` (all values strings, as the format demands). docs/kv_format.md is the prose; the golden bytes are
in tests/golden/. No tensor library is needed here: tensors are a dtype name, a shape and bytes. The file is written
and read here, not by the safetensors library: its writer orders metadata at random, and its reader is not asked to
refuse what we refuse. Files of ours are valid for it (tested).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from schemas.errors import ArtifactMiss, MissReason
from schemas.fingerprint import Fingerprint
from schemas.ids import DocumentKey, canonical_bytes, token_bytes, token_digest

FORMAT_VERSION = 1
Buffer = bytes | bytearray | memoryview
DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_HEADER_NBYTES = 1 << 20  # ours have 2 to 3 KB; a longer one is not parsed
_SAFETENSORS_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_EXPONENT = {"float32": (np.uint32, 0x7F800000), "bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00)}
_FINITE_BLOCK = 1 << 18  # elements that are looked at together: they stay in the CPU's cache


class NeighbourName(BaseModel):
    """A chunk whose rows stood in front while an artifact was made: its document, and its own artifact's key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: str
    doc_id: str
    kv_key: str


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
    neighbours: tuple[NeighbourName, ...] = ()  # of a fused artifact, nearest first; left out of other files

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
    """The bytes of the file; equal artifacts have equal bytes.

    Raises:
        ValueError: `k` or `v` do not have the size that the header says.
    """
    shape = list(artifact.shape)
    dtype = artifact.header.fingerprint.dtype
    expected = math.prod(shape) * DTYPE_NBYTES[dtype]
    for name, tensor in (("k", artifact.k), ("v", artifact.v)):
        if len(tensor) != expected:
            raise ValueError(f"{name} has {len(tensor)} bytes; {shape} of {dtype} needs {expected}")
    ids = token_bytes(artifact.token_ids.tolist())
    # ids first: their 4 bytes each keep k and v aligned, whatever the shape
    ends = [len(ids), len(ids) + expected, len(ids) + 2 * expected]
    header = {
        "__metadata__": {
            name: value if isinstance(value, str) else canonical_bytes(value).decode()
            for name, value in sorted(artifact.header.model_dump(mode="json").items())
            if name != "neighbours" or value
        },
        "token_ids": {"dtype": "I32", "shape": [shape[2]], "data_offsets": [0, ends[0]]},
        "k": {"dtype": _SAFETENSORS_NAME[dtype], "shape": shape, "data_offsets": ends[:2]},
        "v": {"dtype": _SAFETENSORS_NAME[dtype], "shape": shape, "data_offsets": ends[1:]},
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, ids, artifact.k, artifact.v))


def header_end(start: Buffer) -> int:
    """Where a file's header ends and its tensors begin, from the first 8 bytes at least.

    Raises:
        ArtifactMiss: `TRUNCATED`, or `FORMAT` for a length that no artifact has.
    """
    if len(start) < 8:
        raise ArtifactMiss(MissReason.TRUNCATED, f"{len(start)} bytes are no safetensors file")
    nbytes = int.from_bytes(bytes(start[:8]), "little")
    if nbytes > MAX_HEADER_NBYTES:
        raise ArtifactMiss(MissReason.FORMAT, f"the header says {nbytes} bytes; at most {MAX_HEADER_NBYTES} are read")
    return 8 + nbytes


def read_header(start: Buffer) -> ArtifactHeader:
    """The header, from the first `header_end(start)` bytes of a file; what follows is not looked at.

    Raises:
        ArtifactMiss: `TRUNCATED` or `FORMAT`.
    """
    header, _, _ = _split(memoryview(start).cast("B"))
    return header


def decode(data: Buffer) -> KvArtifact:
    """Read a file; its tensors are views into `data`. Checks form, not identity: see `check`.

    Exactly the three tensors, of the dtype and shape that the fingerprint says, one after the other without gap or
    overlap, from the header's end to the file's end: nothing else can be hidden in the file or read outside of it.

    Raises:
        ArtifactMiss: `TRUNCATED` or `FORMAT`.
    """
    view = memoryview(data).cast("B")
    header, tensors, start = _split(view)
    fingerprint = header.fingerprint
    if fingerprint.dtype not in _SAFETENSORS_NAME:
        raise ArtifactMiss(
            MissReason.FORMAT, f"dtype {fingerprint.dtype[:40]!r} is not one of {sorted(_SAFETENSORS_NAME)}"
        )
    n_tokens = _n_tokens(tensors)
    shape = [fingerprint.n_layers, fingerprint.n_kv_heads, n_tokens, fingerprint.head_dim]
    dtype, itemsize = _SAFETENSORS_NAME[fingerprint.dtype], DTYPE_NBYTES[fingerprint.dtype]
    ranges = {
        "k": _range(tensors, "k", dtype, shape, itemsize),
        "v": _range(tensors, "v", dtype, shape, itemsize),
        "token_ids": _range(tensors, "token_ids", "I32", [n_tokens], 4),
    }
    if len(tensors) != len(ranges):
        raise ArtifactMiss(MissReason.FORMAT, f"tensors {sorted(tensors)[:8]}; expected k, token_ids, v and no other")
    end = 0
    for begin, stop in sorted(ranges.values()):
        if begin != end:
            raise ArtifactMiss(MissReason.FORMAT, f"a tensor begins at byte {begin}, the one before ends at {end}")
        end = stop
    if start + end > len(view):
        raise ArtifactMiss(MissReason.TRUNCATED, f"the tensors end at byte {start + end}, the file at {len(view)}")
    if start + end < len(view):
        raise ArtifactMiss(MissReason.FORMAT, f"{len(view) - start - end} bytes follow the tensors")
    k, v, ids = (view[start + begin : start + stop] for begin, stop in ranges.values())
    return KvArtifact(header, k, v, np.frombuffer(ids, dtype="<i4"))


def check(
    artifact: KvArtifact, *, generation: str, fingerprint: str, token_sha256: str, neighbours: Sequence[str] = ()
) -> None:
    """Refuse an artifact that is not the one that was asked for, or not the bytes that were written.

    Args:
        generation: name of the generation in use.
        fingerprint: digest of the fingerprint in use.
        token_sha256: token digest of the chunk that is to be served.
        neighbours: keys of the chunks that it is to be fused with; none for rows of pass 1.

    Raises:
        ArtifactMiss: `FINGERPRINT`, `TOKEN_IDS`, `CHECKSUM`, or `FORMAT` for rows that are not finite.
    """
    header = artifact.header
    if header.generation != generation or header.fingerprint.digest != fingerprint:
        raise ArtifactMiss(
            MissReason.FINGERPRINT, f"made by generation {header.generation[:40]}, {generation} is in use"
        )
    if [one.kv_key for one in header.neighbours] != list(neighbours):
        raise ArtifactMiss(
            MissReason.FINGERPRINT,
            f"fused with {len(header.neighbours)} chunks, not with the {len(neighbours)} expected",
        )
    if header.token_sha256 != token_sha256 or token_digest(artifact.token_ids.tolist()) != token_sha256:
        raise ArtifactMiss(MissReason.TOKEN_IDS, f"holds other token ids than chunk {token_sha256[:16]}")
    if payload_sha256(artifact.k, artifact.v, artifact.token_ids) != header.payload_sha256:
        raise ArtifactMiss(MissReason.CHECKSUM, "the payload does not have the SHA-256 that the header says")
    if not is_finite(artifact):
        raise ArtifactMiss(MissReason.FORMAT, "k or v holds NaN or infinity")


def is_finite(artifact: KvArtifact) -> bool:
    """Whether no number of `k` and `v` is NaN or infinite (an exponent of all ones, in each of the three dtypes)."""
    unsigned, mask = _EXPONENT[artifact.header.fingerprint.dtype]
    for tensor in (artifact.k, artifact.v):
        bits = np.frombuffer(tensor, unsigned)
        for begin in range(0, len(bits), _FINITE_BLOCK):
            if ((bits[begin : begin + _FINITE_BLOCK] & unsigned(mask)) == mask).any():
                return False
    return True


def _split(view: memoryview) -> tuple[ArtifactHeader, dict[str, Any], int]:
    start = header_end(view)
    if start > len(view):
        raise ArtifactMiss(MissReason.TRUNCATED, f"the header ends at byte {start}, the file at {len(view)}")
    if start % 8:
        raise ArtifactMiss(MissReason.FORMAT, f"the header ends at byte {start}; a multiple of 8 keeps tensors aligned")
    try:
        tensors = json.loads(
            str(view[8:start], "utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
        metadata = dict(tensors.pop("__metadata__"))
        for name in ("format_version", "version", "ordinal", "fingerprint", "neighbours"):
            if name == "neighbours" and name not in metadata:
                continue
            metadata[name] = json.loads(metadata[name], object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        found = str(metadata["format_version"])[:40]
        if found != str(FORMAT_VERSION):
            raise ArtifactMiss(MissReason.FORMAT, f"format version {found}; this release reads {FORMAT_VERSION}")
        canonical_bytes(metadata)  # half of a surrogate pair passes JSON and pydantic, and fails wherever it is encoded
        if "neighbours" in metadata:
            if not isinstance(metadata["neighbours"], list):
                raise ValueError("neighbours is not a list")
            named = [NeighbourName.model_validate(one, strict=True) for one in metadata["neighbours"]]
            metadata["neighbours"] = tuple(named)
        return ArtifactHeader.model_validate(metadata, strict=True), tensors, start
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ArtifactMiss(MissReason.FORMAT, f"unreadable header: {type(error).__name__}: {reason}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # of two equal keys every parser takes the one it likes
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key stands twice in one JSON object")
    return unique


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _n_tokens(tensors: dict[str, Any]) -> int:
    entry = tensors.get("token_ids")
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 0:
        raise ArtifactMiss(MissReason.FORMAT, "no tensor token_ids [T]")
    return shape[0]


def _range(tensors: dict[str, Any], name: str, dtype: str, shape: list[int], itemsize: int) -> tuple[int, int]:
    entry = tensors.get(name)
    found = {field: entry.get(field) for field in ("dtype", "shape")} if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or found != {"dtype": dtype, "shape": shape}:
        raise ArtifactMiss(MissReason.FORMAT, f"tensor {name} is {str(found)[:200]}; expected {dtype} {shape}")
    offsets = entry.get("data_offsets")
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(offset) is not int for offset in offsets):
        raise ArtifactMiss(MissReason.FORMAT, f"tensor {name} has no data_offsets [begin, end]")
    begin, end = offsets
    nbytes = math.prod(shape) * itemsize
    if begin % itemsize or end - begin != nbytes:  # that it is not negative follows from `decode`'s first range
        raise ArtifactMiss(MissReason.FORMAT, f"tensor {name} lies at [{begin}, {end}); expected {nbytes} bytes")
    return begin, end
