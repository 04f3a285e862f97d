"""Was an answer stale? Counted for every answer, without making it wait.

An answer is **stale** if a chunk in its prompt was not, when retrieval had finished, a chunk of its document's live
version, and that had been so since before retrieval began. The heads are read once more right after retrieval, beside
the loading of KV, and not by the code that decided what is visible: a fault there, or an index that answers from a
copy, shows here.

A document may change between the two reads, which is no fault. So the head that is found must have been committed
more than `SLACK_MS` before retrieval began: that covers a flip that took long, and clocks that differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future

from schemas.chunk import Chunk
from schemas.errors import StoreError
from schemas.head import Head
from schemas.ids import DocumentKey
from serve.telemetry import Telemetry
from stores import VectorIndex
from stores.clock import Clock, SystemClock

SLACK_MS = 1_000

Heads = Mapping[DocumentKey, Head]


def is_stale(chunk: Chunk, head: Head | None, began_ms: int) -> bool:
    """Whether a chunk of a prompt was out of date before retrieval began at `began_ms`, by the head read after it."""
    if head is None:  # nothing of ours removes a head
        return True
    if head.live and head.version == chunk.version:
        return False
    return head.committed_ms < began_ms - SLACK_MS


class StaleWatch:
    """Looks at the heads again after each retrieval and counts stale answers."""

    def __init__(self, index: VectorIndex, pool: Executor, telemetry: Telemetry, clock: Clock | None = None) -> None:
        self._index, self._pool, self._telemetry = index, pool, telemetry
        self._clock = clock or SystemClock()

    def now_ms(self) -> int:
        """To be taken before retrieval begins."""
        return self._clock.now_ms()

    def look(self, chunks: Sequence[Chunk], began_ms: int) -> Look:
        """Read the heads of `chunks` now, in another thread; to be called when retrieval has finished."""
        documents = [chunk.document for chunk in chunks]
        return Look(self._pool.submit(self._index.heads, documents), began_ms, self._telemetry)


class Look:
    """The heads as they were when retrieval had finished, as soon as they are read."""

    def __init__(self, heads: Future[dict[DocumentKey, Head]], began_ms: int, telemetry: Telemetry) -> None:
        self._heads, self._began_ms, self._telemetry = heads, began_ms, telemetry

    def judge(self, chunks: Sequence[Chunk], cached: Sequence[bool]) -> None:
        """Count the answer that was made from `chunks`; returns at once, it is counted when the heads are there.

        Args:
            cached: for each chunk whether its KV came from the store.
        """
        self._heads.add_done_callback(lambda heads: self._count(heads, chunks, cached))

    def _count(self, read: Future[dict[DocumentKey, Head]], chunks: Sequence[Chunk], cached: Sequence[bool]) -> None:
        try:
            heads = read.result()
        except (StoreError, CancelledError):
            self._telemetry.stale_check(None, None)
            return
        stale = [is_stale(chunk, heads.get(chunk.document), self._began_ms) for chunk in chunks]
        kv = any(out and from_store for out, from_store in zip(stale, cached, strict=True))
        self._telemetry.stale_check(any(stale), kv)
