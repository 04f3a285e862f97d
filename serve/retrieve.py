"""A question -> the visible chunks that match it best."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from schemas.api import Citation
from schemas.chunk import IndexedChunk
from schemas.errors import RequestError
from serve import threads
from serve.forms import neighbours_visible
from serve.parts import Parts


@dataclass(frozen=True)
class Found:
    """A visible chunk and how well it matched; `neighbours_visible` is of the chunks that it was fused with."""

    indexed: IndexedChunk
    score: float
    neighbours_visible: bool = True

    def citation(self, source: str | None = None) -> Citation:
        """The chunk as the API shows it; `source` is `cached` or `fresh`."""
        chunk = self.indexed.chunk
        return Citation(
            tenant=chunk.document.tenant,
            doc_id=chunk.document.doc_id,
            version=chunk.version,
            chunk_id=str(chunk.id),
            ordinal=chunk.ordinal,
            char_start=chunk.char_start,
            char_end=chunk.char_end,
            score=self.score,
            title=self.indexed.title,
            uri=self.indexed.uri,
            text=chunk.text,
            source=source,
        )


class Retriever:
    """Vector search of one tenant's chunks.

    The heads are read in the same call as the points, and what is not its document's live version is dropped and
    refilled to k: a chunk of an older version or of a deleted document is never returned. With them go the heads of
    the chunks that a found one was fused with: what is not visible must not speak through its rows either.
    """

    def __init__(self, parts: Parts, pool: Executor) -> None:
        self._parts, self._pool = parts, pool

    async def visible(self, tenant: str, question: str, k: int) -> list[Found]:
        """At most `k` chunks, best first.

        Raises:
            RequestError: the question holds no text.
            VectorIndexError: the index did not answer.
        """
        check_question(question)
        return await threads.call(self._pool, self._search, tenant, question, k)

    def _search(self, tenant: str, question: str, k: int) -> list[Found]:
        vector = self._parts.embedder.embed_query(question)
        found = self._parts.index.search_visible(tenant, vector, k)
        neighbours = {one.document for hit in found if hit.chunk.fusion for one in hit.chunk.fusion.neighbours}
        heads = self._parts.index.heads(list(neighbours)) if neighbours else {}
        return [
            Found(hit.chunk, float(hit.score), hit.chunk.fusion is None or neighbours_visible(hit.chunk.fusion, heads))
            for hit in found
        ]


def check_question(question: str) -> None:
    """Refuse what has a length and says nothing.

    Raises:
        RequestError: 400 with `param` `question`.
    """
    if not question.strip():
        raise RequestError("question holds no text", code="empty_question", param="question")
