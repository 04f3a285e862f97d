"""Step 2 of INDEX: vectors for the chunks that are new, batched over the documents of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ingest import telemetry
from ingest.isolate import isolate
from ingest.parts import IndexParts
from ingest.work import Batch, IndexWork
from schemas.errors import EventError

PROBE_TEXT = "A sentence that every text encoder can read."


def embed(parts: IndexParts, batch: Batch[IndexWork]) -> Batch[IndexWork]:
    """Fill in the vectors that are None. A document that the embedder fails on, alone, comes out dead."""
    done = list(batch)

    def run(indexes: Sequence[int]) -> None:
        # One text twice in a batch is one call; keyed by text, since that is what the vector is of.
        texts = list(dict.fromkeys(p.chunk.text for index in indexes for p in batch[index].points if p.vectors is None))
        vectors = dict(zip(texts, _checked(parts, parts.embedder.embed(texts), texts), strict=True))
        telemetry.EMBEDDED_CHUNKS.inc(len(texts))
        for index in indexes:
            points = tuple(
                p if p.vectors is not None else replace(p, vectors=vectors[p.chunk.text]) for p in batch[index].points
            )
            done[index] = replace(batch[index], points=points)

    def give_up(index: int, error: Exception, attempts: int) -> None:
        cause = EventError(f"the embedder failed on this document: {type(error).__name__}: {error}", stage="embed")
        cause.__cause__ = error
        done[index] = batch[index].dead(cause, attempts)

    wanted = [i for i, work in enumerate(batch) if work.active and any(p.vectors is None for p in work.points)]
    isolate(wanted, run, give_up, probe=lambda: parts.embedder.embed([PROBE_TEXT]))
    return tuple(done)


def _checked(
    parts: IndexParts, vectors: list[npt.NDArray[np.float32]], texts: Sequence[str]
) -> list[npt.NDArray[np.float32]]:
    """Refuse here what the vector index would refuse: there it would count as a fault of the index."""
    dim = parts.generation.embedding_dim
    for text, rows in zip(texts, vectors, strict=True):
        if rows.ndim != 2 or rows.shape[1] != dim or rows.shape[0] == 0 or not np.isfinite(rows).all():
            raise ValueError(f"vectors of shape {rows.shape} or not finite, expected [n_windows, {dim}]: {text[:60]!r}")
    return vectors
