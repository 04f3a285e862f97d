"""What a chunk and a head look like as Qdrant points, and the filters that select them.

Qdrant compares ranges as float64, which has 53 bits; a version has 63, and packed versions (timestamp and offset)
differ in the last ones. So a head also carries its version as two halves, the upper 32 and the lower 31 bits, and order
is decided on those. Equality is exact on integers, so the filters for one version use the whole number.
"""

from __future__ import annotations

import base64
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError
from qdrant_client import models

from schemas.chunk import Chunk, Fusion, IndexedChunk, Neighbour
from schemas.errors import VectorIndexError
from schemas.head import Head
from schemas.ids import DocumentKey, digest, head_id, token_bytes

CHUNK_INDEXES: dict[str, models.PayloadSchemaType] = {
    "tenant": models.PayloadSchemaType.KEYWORD,
    "document": models.PayloadSchemaType.KEYWORD,
    "version": models.PayloadSchemaType.INTEGER,
    "kv_ready": models.PayloadSchemaType.BOOL,
    "neighbours": models.PayloadSchemaType.KEYWORD,
}
HEAD_INDEXES: dict[str, models.PayloadSchemaType] = {
    "tenant": models.PayloadSchemaType.KEYWORD,
    "version_high": models.PayloadSchemaType.INTEGER,
    "version_low": models.PayloadSchemaType.INTEGER,
    "labels": models.PayloadSchemaType.KEYWORD,
}
_LOW_BITS = 31
_LABEL_DIGITS = 32  # of a SHA-256: 128 bits, and what is found is compared with the metadata itself
_HEAD_ONLY = ("version_high", "version_low", "labels")


class PointName(NamedTuple):
    """What a point is called, without what it holds.

    Attributes:
        names: every artifact that it names.
        ready: those of them that it says are there.
        content_digest: of the event that it was made from.
    """

    id: uuid.UUID
    document: DocumentKey
    version: int
    ordinal: int
    names: tuple[str, ...]
    ready: tuple[str, ...]
    content_digest: str | None


def chunk_point(indexed: IndexedChunk) -> models.PointStruct:
    """The point of a chunk; its vectors must be there (`check_vectors`)."""
    chunk = indexed.chunk
    assert indexed.vectors is not None
    payload = {
        "tenant": chunk.document.tenant,
        "doc_id": chunk.document.doc_id,
        "document": chunk.document.digest,
        "version": chunk.version,
        "ordinal": chunk.ordinal,
        "text": chunk.text,
        "char_start": chunk.char_start,
        "char_end": chunk.char_end,
        "token_ids": base64.b64encode(token_bytes(chunk.token_ids)).decode("ascii"),
        "kv_key": indexed.kv_key,
        "kv_ready": indexed.kv_ready,
        "title": indexed.title,
        "uri": indexed.uri,
        "metadata": indexed.metadata,
        "content_digest": indexed.content_digest,
        "first_key": indexed.first_key,
        **fusion_payload(indexed.fusion),
    }
    return models.PointStruct(id=str(chunk.id), vector=indexed.vectors.tolist(), payload=payload)


def fusion_payload(fusion: Fusion | None) -> dict[str, Any]:
    """What a point says of its fused artifact. `neighbours`, digests of document keys, is what it is found by."""
    if fusion is None:
        return {"fused_key": None, "fused_ready": False, "fused_with": [], "neighbours": []}
    return {
        "fused_key": fusion.kv_key,
        "fused_ready": fusion.ready,
        "fused_with": [
            {"tenant": one.document.tenant, "doc_id": one.document.doc_id, "version": one.version, "kv_key": one.kv_key}
            for one in fusion.neighbours
        ],
        "neighbours": sorted({one.document.digest for one in fusion.neighbours}),
    }


def _read_fusion(payload: Mapping[str, Any]) -> Fusion | None:
    if payload.get("fused_key") is None:
        return None
    neighbours = tuple(
        Neighbour(DocumentKey(one["tenant"], one["doc_id"]), int(one["version"]), one["kv_key"])
        for one in payload["fused_with"]
    )
    return Fusion(payload["fused_key"], neighbours, bool(payload["fused_ready"]))


def read_chunk(record: models.Record | models.ScoredPoint) -> IndexedChunk:
    """The chunk of a point.

    Raises:
        VectorIndexError: the payload is not one that `chunk_point` writes, or stands under another chunk's id.
    """
    payload = record.payload or {}
    try:
        chunk = Chunk(
            document=DocumentKey(payload["tenant"], payload["doc_id"]),
            version=int(payload["version"]),
            ordinal=int(payload["ordinal"]),
            text=payload["text"],
            char_start=int(payload["char_start"]),
            char_end=int(payload["char_end"]),
            token_ids=tuple(np.frombuffer(base64.b64decode(payload["token_ids"], validate=True), "<i4").tolist()),
        )
        indexed = IndexedChunk(
            chunk=chunk,
            kv_key=payload["kv_key"],
            vectors=_read_vectors(record.vector),
            kv_ready=bool(payload["kv_ready"]),
            title=payload.get("title"),
            uri=payload.get("uri"),
            metadata=payload.get("metadata") or {},
            content_digest=payload.get("content_digest"),
            first_key=payload.get("first_key"),
            fusion=_read_fusion(payload),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise VectorIndexError(f"point {record.id} is no chunk of ours: {error!r}; delete it") from error
    if str(chunk.id) != str(record.id):
        raise VectorIndexError(f"point {record.id} holds chunk {chunk.id}; delete it and ingest the document again")
    return indexed


def read_name(record: models.Record) -> PointName:
    """What a point is called.

    Raises:
        VectorIndexError: the payload is not one that `chunk_point` writes.
    """
    payload = record.payload or {}
    try:
        document = DocumentKey(payload["tenant"], payload["doc_id"])
        version, ordinal = int(payload["version"]), int(payload["ordinal"])
        first_pass = [str(key) for key in (payload["kv_key"], payload.get("first_key")) if key is not None]
        kv_ready = bool(payload["kv_ready"])
    except (KeyError, TypeError, ValueError) as error:
        raise VectorIndexError(f"point {record.id} is no chunk of ours: {error!r}; delete it") from error
    fused = [str(payload["fused_key"])] if payload.get("fused_key") is not None else []
    ready = (first_pass if kv_ready else []) + (fused if payload.get("fused_ready") else [])
    names = tuple(first_pass + fused)
    made_from = payload.get("content_digest")
    return PointName(uuid.UUID(str(record.id)), document, version, ordinal, names, tuple(ready), made_from)


def check_vectors(indexed: IndexedChunk, dim: int) -> None:
    """Refuse vectors that would be stored wrongly; raises `ValueError`."""
    vectors = indexed.vectors
    if vectors is None or vectors.ndim != 2 or vectors.shape[0] == 0 or vectors.shape[1] != dim:
        shape = None if vectors is None else vectors.shape
        raise ValueError(f"chunk {indexed.chunk.id}: vectors must be [n_windows >= 1, {dim}] (got {shape})")
    if not np.isfinite(vectors).all():
        raise ValueError(f"chunk {indexed.chunk.id}: vectors must be finite (got NaN or infinity)")


def point_nbytes(indexed: IndexedChunk) -> int:
    """About how long the point is as JSON, for keeping requests under the server's 32 MB."""
    chunk, vectors = indexed.chunk, indexed.vectors
    numbers = 0 if vectors is None else vectors.size
    of_document = len(json.dumps([indexed.title, indexed.uri, indexed.metadata], default=str))
    return 24 * numbers + 6 * len(chunk.token_ids) + 3 * len(chunk.text) + of_document + 1000


def head_point(head: Head) -> models.PointStruct:
    """The payload-only point of a head."""
    high, low = _halves(head.version)
    payload = {**head.model_dump(mode="json"), "version_high": high, "version_low": low}
    payload["labels"] = labels(head.metadata)
    return models.PointStruct(id=str(head_id(head.document)), vector={}, payload=payload)


def read_head(record: models.Record) -> Head:
    """The head of a point.

    Raises:
        VectorIndexError: the payload is not a head, or stands under another document's id.
    """
    payload = {name: value for name, value in (record.payload or {}).items() if name not in _HEAD_ONLY}
    try:
        head = Head.model_validate(payload)
    except ValidationError as error:
        fault = error.errors()[0]
        raise VectorIndexError(
            f"point {record.id} is no head: {'.'.join(map(str, fault['loc']))}: {fault['msg']}; delete it"
        ) from error
    if str(head_id(head.document)) != str(record.id):
        raise VectorIndexError(f"point {record.id} holds the head of {head.document}; delete it")
    return head


def labels(metadata: Mapping[str, Any]) -> list[str]:
    """One label for each key and value of `metadata`; of a list of values, one for each of them.

    Which keys a producer uses is not known beforehand, so no index can be made for each of them. One index over these
    labels serves them all. Types count: `1` and `"1"` are two values; `1` and `1.0` are one. What is nested deeper has
    no label.
    """
    found = set()
    for key, value in metadata.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, float) and one.is_integer():
                one = int(one)
            if isinstance(one, str | int) or (isinstance(one, float) and math.isfinite(one)):
                found.add(digest([key, one])[:_LABEL_DIGITS])
    return sorted(found)


def of_heads(tenant: str | None, metadata: Mapping[str, Any]) -> models.Filter | None:
    """Heads of a tenant, or of all, whose metadata has all these values.

    Raises:
        ValueError: a value is none that has a label; leaving it out would find more than was asked for.
    """
    for key, value in metadata.items():
        if isinstance(value, list) or not labels({key: value}):
            raise ValueError(f"metadata {key!r} must be a string, a number or a boolean (got {type(value).__name__})")
    conditions: list[models.Condition] = [] if tenant is None else [_equals("tenant", tenant)]
    conditions += [_equals("labels", label) for label in labels(metadata)]
    return models.Filter(must=conditions) if conditions else None


def of_document(document: DocumentKey, version: int | None = None) -> models.Filter:
    """All points of a document, or of one version of it."""
    conditions: list[models.Condition] = [_equals("document", document.digest)]
    if version is not None:
        conditions.append(_equals("version", version))
    return models.Filter(must=conditions)


def shown_by(head: Head) -> models.Filter:
    """The points that a live head shows, as `Head.shows` has it."""
    conditions = [_equals("document", head.document.digest), _equals("version", head.version)]
    unknown = models.IsEmptyCondition(is_empty=models.PayloadField(key="content_digest"))
    return models.Filter(must=[*conditions], should=[_equals("content_digest", head.content_digest), unknown])


def of_tenant(tenant: str, exclude: Sequence[uuid.UUID] = ()) -> models.Filter:
    """All points of a tenant but the ones in `exclude`."""
    without: list[models.Condition] = [models.HasIdCondition(has_id=[str(point) for point in exclude])]
    return models.Filter(must=[_equals("tenant", tenant)], must_not=without if exclude else None)


def with_neighbour(document: DocumentKey) -> models.Filter:
    """All points whose fused artifact was made with a chunk of `document`."""
    return models.Filter(must=[_equals("neighbours", document.digest)])


def naming(point: uuid.UUID, fused_key: str | None = None) -> models.Filter:
    """One point, if it is there; with `fused_key` only while that is its fused artifact."""
    conditions: list[models.Condition] = [models.HasIdCondition(has_id=[str(point)])]
    if fused_key is not None:
        conditions.append(_equals("fused_key", fused_key))
    return models.Filter(must=conditions)


def older_than(version: int) -> models.Filter:
    """Heads with a lower version. A point without a version does not match and so is never overwritten."""
    high, low = _halves(version)
    same_high: list[models.Condition] = [
        _equals("version_high", high),
        models.FieldCondition(key="version_low", range=models.Range(lt=low)),
    ]
    lower: list[models.Condition] = [
        models.FieldCondition(key="version_high", range=models.Range(lt=high)),
        models.Filter(must=same_high),
    ]
    return models.Filter(should=lower)


def _equals(field: str, value: str | int) -> models.FieldCondition:
    return models.FieldCondition(key=field, match=models.MatchValue(value=value))


def _halves(version: int) -> tuple[int, int]:
    return version >> _LOW_BITS, version & ((1 << _LOW_BITS) - 1)


def _read_vectors(vector: Any) -> npt.NDArray[np.float32] | None:
    if vector is None or (isinstance(vector, Mapping) and not vector):
        return None
    return np.atleast_2d(np.asarray(vector, dtype=np.float32))
