"""The vector index: chunks as immutable points, one head per document that says which version is visible.

A generation has two collections, `<prefix>_<generation>_chunks` (one multivector per chunk, cosine, MaxSim) and
`<prefix>_<generation>_heads` (payload only). Writes wait until they are applied; points are deleted by explicit ids
only, never by filter, because a filter can also match what another writer has just added.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from qdrant_client import models

from schemas.chunk import Fusion, IndexedChunk
from schemas.errors import VectorIndexError
from schemas.head import Head
from schemas.ids import DocumentKey
from schemas.settings import QdrantSettings
from stores import points
from stores.heads import Heads
from stores.points import PointName
from stores.qdrant import Connection, connect

MAX_BATCH_POINTS = 128
MAX_BATCH_NBYTES = 8 * 1024 * 1024
_PAGE = 1000


class Hit(NamedTuple):
    """A chunk that a search found, whether visible or not; `score` is MaxSim over cosines, at most 1."""

    chunk: IndexedChunk
    score: float


class VisibleHit(NamedTuple):
    """A visible chunk that a search found, with the head that makes it visible."""

    chunk: IndexedChunk
    score: float
    head: Head


def open_index(qdrant: QdrantSettings, location: str, generation: str, dim: int) -> VectorIndex:
    """The index of one generation.

    Args:
        location: `Settings.qdrant_location`: a URL, a folder, or `:memory:` (`:memory:NAME` for a space of its own).
            Within one process the same folder, and the same memory space, is one store, however often it is opened;
            what is in memory is gone when the last handle is closed.
        generation: `Generation.name`.
        dim: numbers per embedding vector.

    Raises:
        VectorIndexError: the folder is in use by another process.
    """
    return VectorIndex(connect(qdrant, location), f"{qdrant.prefix}_{generation}", dim)


class VectorIndex:
    """Chunks and heads of one generation. Safe to use from several threads; every failure is `VectorIndexError`."""

    def __init__(self, connection: Connection, name: str, dim: int) -> None:
        self.dim = dim
        self.collection = f"{name}_chunks"
        self._connection, self._name = connection, name
        self._heads = Heads(connection, f"{name}_heads")
        self._closed = False

    def ensure(self) -> None:
        """Create the two collections and their payload indexes where they are missing.

        Raises:
            VectorIndexError: the server is too old, or the collection has other vectors.
        """
        self._connection.check_server()
        vectors = models.VectorParams(
            size=self.dim,
            distance=models.Distance.COSINE,
            multivector_config=models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM),
        )
        self._ensure(self.collection, vectors, points.CHUNK_INDEXES)
        self._ensure(self._heads.collection, {}, points.HEAD_INDEXES)
        self._check_vectors()

    def ready(self) -> None:
        """Raise `VectorIndexError` with the reason where the index cannot be used now."""
        self._connection.check_server()
        self._check_vectors()
        self._connection.call("get_collection", collection_name=self._heads.collection)

    def heads(self, documents: Sequence[DocumentKey]) -> dict[DocumentKey, Head]:
        """The heads of `documents` as they are now; no entry where there is none."""
        return self._heads.read(documents)

    def flip(self, head: Head) -> Head:
        """Compare-and-set on version, the commit; returns the head that is stored now (`Heads.flip`)."""
        return self._heads.flip(head)

    def documents(self, tenant: str | None = None) -> Iterator[Head]:
        """Every head, tombstones too, of one tenant or of all."""
        return self._heads.all(tenant)

    def documents_page(
        self, tenant: str | None, metadata: Mapping[str, Any], *, after: str | None = None, limit: int = _PAGE
    ) -> tuple[list[Head], str | None]:
        """Heads by tenant and metadata, a page at a time, over one payload index (`Heads.page`)."""
        return self._heads.page(tenant, metadata, after=after, limit=limit)

    def points(self, tenant: str | None = None) -> Iterator[list[PointName]]:
        """What every point is called, page by page, without text and vectors; of one tenant or of all."""
        wanted = ["tenant", "doc_id", "document", "version", "ordinal"]
        wanted += ["kv_key", "kv_ready", "first_key", "fused_key", "fused_ready", "content_digest"]
        where = points.of_tenant(tenant) if tenant is not None else None
        for page in self._pages(where, with_payload=wanted, with_vectors=False):
            yield [points.read_name(record) for record in page]

    def chunks(self, document: DocumentKey, version: int | None = None, *, vectors: bool = False) -> list[IndexedChunk]:
        """The chunks of a document, visible or not, by version and ordinal; of one version if it is given."""
        found = [points.read_chunk(r) for r in self._scroll(document, version, with_payload=True, with_vectors=vectors)]
        found = [
            indexed
            for indexed in found  # the index is trusted to find, not to exclude
            if indexed.chunk.document == document and version in (None, indexed.chunk.version)
        ]
        return sorted(found, key=lambda indexed: (indexed.chunk.version, indexed.chunk.ordinal))

    def live_chunks(self, head: Head, *, vectors: bool = False) -> list[IndexedChunk]:
        """The chunks that a head shows, by ordinal."""
        found = self.chunks(head.document, head.version, vectors=vectors)
        return [indexed for indexed in found if head.shows(indexed.chunk.version, indexed.content_digest)]

    def stale_chunk_ids(self, document: DocumentKey, below_version: int) -> list[uuid.UUID]:
        """Ids of the points of `document` with a version lower than `below_version`."""
        wanted = ["document", "version"]
        return [
            uuid.UUID(str(record.id))
            for record in self._scroll(document, None, with_payload=wanted, with_vectors=False)
            if record.payload["document"] == document.digest and int(record.payload["version"]) < below_version
        ]

    def upsert(self, chunks: Sequence[IndexedChunk]) -> None:
        """Write the points of `chunks`, overwriting those that exist; they stay invisible until the head flips.

        Raises:
            ValueError: vectors of a wrong shape or not finite; nothing is written then.
            VectorIndexError: the write failed; some batches may be there: do it again.
        """
        for indexed in chunks:
            points.check_vectors(indexed, self.dim)
        for batch in _batches(chunks):
            self._connection.call(
                "upsert",
                collection_name=self.collection,
                points=[points.chunk_point(indexed) for indexed in batch],
                wait=True,
            )

    def delete(self, ids: Sequence[uuid.UUID]) -> None:
        """Delete these points; an id that is not there is fine."""
        for start in range(0, len(ids), _PAGE):
            page: list[Any] = [str(point) for point in ids[start : start + _PAGE]]
            self._connection.call(
                "delete",
                collection_name=self.collection,
                points_selector=models.PointIdsList(points=page),
                wait=True,
            )

    def mark_kv(self, ids: Sequence[uuid.UUID], ready: bool) -> None:
        """Set `kv_ready` on these points; a point that was deleted meanwhile stays deleted."""
        for start in range(0, len(ids), _PAGE):
            self._mark([str(point) for point in ids[start : start + _PAGE]], ready)

    def mark_fusion(self, point: uuid.UUID, fusion: Fusion | None, *, was: Fusion | None = None) -> None:
        """Set what a point says of its fused artifact; a point that was deleted meanwhile stays deleted.

        Args:
            was: only while the point names this one's artifact.
        """
        self._connection.call(
            "set_payload",
            collection_name=self.collection,
            payload=points.fusion_payload(fusion),
            points=models.FilterSelector(filter=points.naming(point, was.kv_key if was else None)),
            wait=True,
        )

    def fused_with(self, document: DocumentKey) -> list[IndexedChunk]:
        """Chunks, of any document and version, whose fused artifact was made with a chunk of `document`."""
        pages = self._pages(points.with_neighbour(document), with_payload=True, with_vectors=False)
        found = [points.read_chunk(record) for page in pages for record in page]
        return [
            indexed
            for indexed in found
            if indexed.fusion and any(one.document == document for one in indexed.fusion.neighbours)
        ]

    def search(
        self, tenant: str, vector: npt.NDArray[np.float32], k: int, *, exclude: Sequence[uuid.UUID] = ()
    ) -> list[Hit]:
        """The `k` nearest chunks of a tenant, best first, visible or not.

        Args:
            vector: `[dim]`.
            exclude: points to leave out.

        Raises:
            ValueError: `vector` has another shape or is not finite.
            VectorIndexError: the search failed, or it gave a chunk of another tenant.
        """
        if vector.shape != (self.dim,) or not np.isfinite(vector).all():
            raise ValueError(f"vector must be [{self.dim}] and finite (got shape {vector.shape})")
        answer = self._connection.call(
            "query_points",
            collection_name=self.collection,
            query=[vector.tolist()],
            query_filter=points.of_tenant(tenant, exclude),
            limit=k,
            with_payload=True,
            with_vectors=False,
        )
        hits = [Hit(points.read_chunk(point), float(point.score)) for point in answer.points]
        for hit in hits:
            if hit.chunk.chunk.document.tenant != tenant:
                raise VectorIndexError(
                    f"a search for tenant {tenant!r} gave a chunk of another tenant: "
                    f"Qdrant at {self._connection.place} does not apply its filters"
                )
        return hits

    def search_visible(self, tenant: str, vector: npt.NDArray[np.float32], k: int) -> list[VisibleHit]:
        """The `k` nearest visible chunks of a tenant, best first; fewer only where there are no more.

        Heads are read after the chunks, and again for all of them after each refill: what is returned was visible
        when the last of them was read. A document that moved on between the two is looked for once more, so that one
        which is being changed does not drop out of the answer.
        """
        hits: list[Hit] = []
        limit = k + min(k, 8)  # some spare, so that a few superseded chunks cost no second search
        looked_again = False
        while True:
            more = self.search(tenant, vector, limit, exclude=[hit.chunk.chunk.id for hit in hits])
            hits += more
            heads = self.heads([hit.chunk.chunk.document for hit in hits])
            visible = [
                VisibleHit(hit.chunk, hit.score, head)
                for hit in hits
                if (head := heads.get(hit.chunk.chunk.document)) is not None
                and head.shows(hit.chunk.chunk.version, hit.chunk.content_digest)
            ]
            if not looked_again and _moved_on(hits, heads):
                looked_again = True
                continue
            if len(visible) >= k or len(more) < limit:
                return sorted(visible, key=lambda hit: -hit.score)[:k]
            limit *= 2

    def count(self, document: DocumentKey, version: int | None = None) -> int:
        """How many points there are of a document, of all versions or of one; exact."""
        return self._count(points.of_document(document, version))

    def count_live(self, head: Head) -> int:
        """How many points a head shows; exact."""
        return self._count(points.shown_by(head)) if head.live else 0

    def _count(self, where: models.Filter) -> int:
        answer = self._connection.call("count", collection_name=self.collection, count_filter=where, exact=True)
        return int(answer.count)

    def beside(self, generation: str, dim: int) -> VectorIndex:
        """The index of another generation over the same connection; to be closed too. Creates nothing."""
        prefix, _, _ = self._name.rpartition("_")
        return VectorIndex(self._connection.share(), f"{prefix}_{generation}", dim)

    def exists(self) -> bool:
        """Whether both collections are there."""
        names = (self.collection, self._heads.collection)
        return all(self._connection.call("collection_exists", collection_name=name) for name in names)

    def drop(self) -> int:
        """Delete both collections, the heads last: without heads nothing is visible. Returns how many there were."""
        names = (self.collection, self._heads.collection)
        there = [name for name in names if self._connection.call("collection_exists", collection_name=name)]
        for name in there:
            self._connection.call("delete_collection", collection_name=name)
        return len(there)

    def close(self) -> None:
        """Give the handle back. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self._connection.close()

    def __enter__(self) -> VectorIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ensure(self, collection: str, vectors: Any, indexes: dict[str, models.PayloadSchemaType]) -> None:
        if not self._connection.call("collection_exists", collection_name=collection):
            try:
                self._connection.call("create_collection", collection_name=collection, vectors_config=vectors)
            except VectorIndexError:  # another process was faster, or it is a real fault
                if not self._connection.call("collection_exists", collection_name=collection):
                    raise
        if self._connection.local:
            return  # local mode ignores payload indexes, with a warning
        for field, kind in indexes.items():
            self._connection.call(
                "create_payload_index", collection_name=collection, field_name=field, field_schema=kind, wait=True
            )

    def _check_vectors(self) -> None:
        info = self._connection.call("get_collection", collection_name=self.collection)
        found = info.config.params.vectors
        size = getattr(found, "size", None)
        if size != self.dim or getattr(found, "multivector_config", None) is None:
            raise VectorIndexError(
                f"collection {self.collection} holds vectors of {size} numbers, this embedder makes {self.dim}; "
                "vectors cannot be changed in place: use another qdrant.prefix, or delete the collection"
            )

    def _scroll(self, document: DocumentKey, version: int | None, **what: Any) -> Iterator[Any]:
        for page in self._pages(points.of_document(document, version), **what):
            yield from page

    def _pages(self, where: models.Filter | None, **what: Any) -> Iterator[Sequence[Any]]:
        offset = None
        while True:
            records, offset = self._connection.call(
                "scroll",
                collection_name=self.collection,
                scroll_filter=where,
                limit=_PAGE,
                offset=offset,
                **what,
            )
            yield records
            if offset is None:
                return

    def _mark(self, page: list[str], ready: bool) -> None:
        # A point that is missing fails the request, after the others were set. So ask which are there; a point can
        # go between the two calls, hence more than one try.
        for tries_left in (2, 1, 0):
            present = self._connection.call(
                "retrieve", collection_name=self.collection, ids=page, with_payload=False, with_vectors=False
            )
            if not present:
                return
            try:
                self._connection.call(
                    "set_payload",
                    collection_name=self.collection,
                    payload={"kv_ready": ready},
                    points=[record.id for record in present],
                    wait=True,
                )
                return
            except VectorIndexError:
                if not tries_left:
                    raise


def _moved_on(hits: Sequence[Hit], heads: Mapping[DocumentKey, Head]) -> bool:
    """Whether some document has a live version of which no chunk was found, and an older one of which some were."""
    found = {(hit.chunk.chunk.document, hit.chunk.chunk.version) for hit in hits}
    live = {(document, head.version) for document, head in heads.items() if head.live}
    return any((document, version) not in found for document, version in live)


def _batches(chunks: Sequence[IndexedChunk]) -> Iterator[list[IndexedChunk]]:
    batch: list[IndexedChunk] = []
    nbytes = 0
    for indexed in chunks:
        size = points.point_nbytes(indexed)
        if batch and (len(batch) >= MAX_BATCH_POINTS or nbytes + size > MAX_BATCH_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(indexed)
        nbytes += size
    if batch:
        yield batch
