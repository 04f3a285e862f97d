"""What the stores hold of a document, compared with what its live version names."""

from __future__ import annotations

from schemas.chunk import IndexedChunk
from schemas.head import Head
from schemas.ids import DocumentKey
from schemas.receipt import Counts, Place
from stores.kv_store import KvStore
from stores.vectors import VectorIndex


def live_names(index: VectorIndex, document: DocumentKey) -> tuple[Head | None, set[str] | None]:
    """The head, and the artifact keys that its version names; None for the names where points of it were lost."""
    head = index.heads([document]).get(document)
    while head is not None and head.live:
        points = index.live_chunks(head)
        if len(points) == head.n_chunks:
            return head, {key for point in points for key in point.kv_keys}
        # Fewer than the head says: it moved between the two reads, and the points went with the old version.
        before, head = head, index.heads([document]).get(document)
        if head is not None and head.version == before.version:
            return head, None
    return head, set()


def leftovers(index: VectorIndex, kv: KvStore, document: DocumentKey, version: int) -> Counts:
    """What there is of the versions up to `version` of a document, counted now.

    Objects are listed before the head is read: one that was put before the list was made, for a version that is live,
    is named by that version or by a higher one, which we then see. Such a one is no leftover.

    Raises:
        StoreError: a store did not answer.
    """
    listed = kv.keys(document)
    head, named = live_names(index, document)
    points = index.stale_chunk_ids(document, version + 1)
    # of a live document what a writer has staged can be a put that is under way
    staged = kv.staged(document) if head is None or not head.live else 0
    unnamed = [key for key in listed if named is None or key not in named]
    return {
        Place.POINTS: len(points),
        Place.OBJECTS: len(unnamed) + staged,
        Place.FUSED: sum(_made_with(point, document, version) for point in index.fused_with(document)),
    }


def _made_with(point: IndexedChunk, document: DocumentKey, version: int) -> bool:
    """Whether another document's chunk has a fused artifact that holds a version of `document` up to `version`."""
    neighbours = point.fusion.neighbours if point.fusion is not None else ()
    used = any(one.document == document and one.version <= version for one in neighbours)
    return used and point.chunk.document != document
