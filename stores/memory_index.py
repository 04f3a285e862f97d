"""What the pipelines ask of a vector index, over dictionaries: for benches that are about everything else.

Unlike Qdrant's local mode it costs the same however much is in it, and forgets what is deleted. It searches nothing.
"""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from schemas.chunk import IndexedChunk
from schemas.head import Head
from schemas.ids import DocumentKey


class MemoryIndex:
    """`VectorIndex` without search and without fused chunks; the calls mean the same. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heads: dict[DocumentKey, Head] = {}
        self._points: defaultdict[DocumentKey, dict[uuid.UUID, IndexedChunk]] = defaultdict(dict)
        self._homes: dict[uuid.UUID, DocumentKey] = {}

    def heads(self, documents: Sequence[DocumentKey]) -> dict[DocumentKey, Head]:
        """The heads of `documents`; no entry where there is none."""
        with self._lock:
            return {document: self._heads[document] for document in documents if document in self._heads}

    def documents(self, tenant: str | None = None) -> Iterator[Head]:
        """Every head, tombstones too."""
        with self._lock:
            return iter([head for head in self._heads.values() if tenant in (None, head.tenant)])

    def flip(self, head: Head) -> Head:
        """Compare-and-set on version; returns what is stored now."""
        with self._lock:
            stored = self._heads.get(head.document)
            if stored is None or stored.version < head.version:
                stored = self._heads[head.document] = head
            return stored

    def chunks(self, document: DocumentKey, version: int | None = None, *, vectors: bool = False) -> list[IndexedChunk]:
        """The chunks of a document, by version and ordinal."""
        with self._lock:
            found = [p for p in self._points[document].values() if version in (None, p.chunk.version)]
        found.sort(key=lambda point: (point.chunk.version, point.chunk.ordinal))
        return found if vectors else [replace(point, vectors=None) for point in found]

    def live_chunks(self, head: Head, *, vectors: bool = False) -> list[IndexedChunk]:
        """The chunks that a head shows, by ordinal."""
        found = self.chunks(head.document, head.version, vectors=vectors)
        return [point for point in found if head.shows(point.chunk.version, point.content_digest)]

    def count_live(self, head: Head) -> int:
        """How many points a head shows."""
        return len(self.live_chunks(head))

    def count(self, document: DocumentKey, version: int | None = None) -> int:
        """How many points there are of a document."""
        return len(self.chunks(document, version))

    def stale_chunk_ids(self, document: DocumentKey, below_version: int) -> list[uuid.UUID]:
        """Ids of its points with a lower version."""
        with self._lock:
            return [name for name, point in self._points[document].items() if point.chunk.version < below_version]

    def upsert(self, chunks: Sequence[IndexedChunk]) -> None:
        """Write points."""
        with self._lock:
            for point in chunks:
                self._points[point.chunk.document][point.chunk.id] = point
                self._homes[point.chunk.id] = point.chunk.document

    def delete(self, ids: Sequence[uuid.UUID]) -> None:
        """Delete points; one that is not there is fine."""
        with self._lock:
            for name in ids:
                home = self._homes.pop(name, None)
                if home is not None:
                    del self._points[home][name]

    def mark_kv(self, ids: Sequence[uuid.UUID], ready: bool) -> None:
        """Set `kv_ready`; a point that was deleted stays deleted."""
        with self._lock:
            for name in ids:
                if name in self._homes:
                    of_document = self._points[self._homes[name]]
                    of_document[name] = replace(of_document[name], kv_ready=ready)

    def fused_with(self, document: DocumentKey) -> list[IndexedChunk]:
        """None: nothing is fused here."""
        return []

    def close(self) -> None:
        """Nothing to let go of."""
