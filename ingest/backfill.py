"""Backfill: a source of documents -> INDEX -> PREFILL, one batch job of the streaming pipelines' own transforms.

What a row says is a change event; where it names no version, one is made from when its file was last changed and its
place in the file. So what changed in the stream after that wins, whichever is read first. Nothing is remembered of
a run: the heads, points and artifacts say what is done, so one that was killed goes on where it was, and a second one
finds nothing to do. What the source no longer has is `ingest.prune`'s.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics

from ingest.connect import ConnectIndex, ConnectPrefill, ConnectStores, connected
from ingest.handles import Handle, held
from ingest.parts import Connect, IndexParts, PrefillParts
from ingest.pipeline import IndexDocuments, PrefillDocuments
from ingest.prune import Prune, publish_deletions
from ingest.retry import store_retry
from ingest.runners import NAMESPACE, Runner
from ingest.sources import Piece, Source
from ingest.work import Batch, IndexWork, Outcome, Work
from schemas.settings import IngestSettings, Settings
from stores.clock import SystemClock
from stores.topics import Message, ensure_topics

_LOCAL = Runner()


@dataclass(frozen=True)
class BackfillProgress:
    """How far a backfill is. `total` rows were found; each is indexed, then every live one is prefilled."""

    total: int = 0  # at most so many, before they were read
    indexed: int = 0
    committed: int = 0  # heads that moved
    repeated: int = 0  # were there already
    superseded: int = 0  # a newer version was there
    dead: int = 0
    to_prefill: int = 0
    prefilled: int = 0  # documents whose KV is in place
    pruned: int = 0  # documents that the source no longer has


class Tally:
    """Adds up what becomes of the rows and tells a callback after each batch. Safe to use from several threads."""

    def __init__(self, total: int, tell: Callable[[BackfillProgress], None]) -> None:
        self._counts: Counter[str] = Counter(total=total)
        self._tell, self._lock = tell, threading.Lock()

    def add(self, counts: Mapping[str, int]) -> None:
        """Count a batch."""
        with self._lock:
            self._counts.update(counts)
            self._tell(_progress(self._counts))


def run_backfill(
    settings: Settings,
    source: Source,
    progress: Callable[[BackfillProgress], None] | None = None,
    *,
    runner: Runner = _LOCAL,
    prune: Prune | None = None,
) -> BackfillProgress:
    """Ingest a source; returns when every row's text and KV are servable, or its dead letter is written.

    Args:
        progress: called after each batch where the workers are in this process, from their threads.
        prune: documents to delete when everything else is done.

    Raises:
        InputError: a file changed while it was read, or the runner is none.
        SettingsError: a store cannot be shared with the workers.
        StoreError: infrastructure kept failing. Run it again: what is done is skipped.
        UnsupportedModelError: a model cannot be used.
    """
    runner.check(settings)
    index, prefill = ConnectIndex(settings), ConnectPrefill(settings)
    store_retry(lambda: ensure_topics(settings.kafka), "setting up topics", settings.ingest, SystemClock())
    with connected(*((index, prefill) if runner.is_here else ())):
        done = backfill(settings.ingest, source.pieces, index, prefill, progress, runner)
        if prune is None:
            return done
        deletions = _publish_deletions(settings, index if runner.is_here else None, prune)
        deleted = backfill(settings.ingest, [deletions], index, prefill, None, runner)
    return replace(done, pruned=deleted.committed + deleted.repeated)


def _publish_deletions(settings: Settings, index: ConnectIndex | None, prune: Prune) -> Piece:
    if index is not None:  # Qdrant's local mode is opened once
        return publish_deletions(index(), prune)
    stores = ConnectStores(settings)
    with connected(stores):
        return publish_deletions(stores(), prune)


def backfill(
    settings: IngestSettings,
    pieces: Sequence[Piece],
    index: Connect[IndexParts],
    prefill: Connect[PrefillParts],
    progress: Callable[[BackfillProgress], None] | None = None,
    runner: Runner = _LOCAL,
) -> BackfillProgress:
    """The job itself, over parts that are given."""
    tally = Tally(sum(piece.n_rows for piece in pieces), progress or (lambda now: None))
    with held(tally) as handle:
        transform = Backfill(settings, pieces, index, prefill, handle if runner.is_here else None)
        counts = runner.run(lambda pipeline: pipeline | transform)
    return replace(_progress(counts), total=counts.get("indexed", 0))


class Backfill(beam.PTransform):  # type: ignore[misc] # Beam has no types
    """Pieces -> INDEX -> PREFILL.

    Pieces are spread, never rows: what they hold is read where it is worked on, and never all at once. The second
    shuffle makes all text servable before the first KV is computed.
    """

    def __init__(
        self,
        settings: IngestSettings,
        pieces: Sequence[Piece],
        index: Connect[IndexParts],
        prefill: Connect[PrefillParts],
        tally: Handle[Tally] | None,
    ) -> None:
        super().__init__("Backfill")
        self._settings, self._pieces, self._tally = settings, list(pieces), tally
        self._index, self._prefill = index, prefill

    def expand(self, pbegin: Any) -> beam.PCollection:
        """The graph."""
        return (
            pbegin
            | "Pieces" >> beam.Create(self._pieces)
            | "SpreadPieces" >> beam.Reshuffle()
            | "ReadRows" >> beam.FlatMap(_read)
            | IndexDocuments(self._settings, self._index)
            | "CountIndexed" >> beam.Map(_count, _indexed, self._tally)
            | "CommitRecords" >> beam.FlatMap(commit_messages)
            | "SpreadRecords" >> beam.Reshuffle()
            | PrefillDocuments(self._settings, self._prefill)
            | "CountPrefilled" >> beam.Map(_count, _prefilled, self._tally)
        )


def _read(piece: Piece) -> Iterator[Message]:
    return piece.read()


def commit_messages(batch: Batch[IndexWork]) -> Iterator[Message]:
    """The commit records of a batch, as PREFILL reads them from the topic."""
    return (work.announced for work in batch if work.announced is not None)


def _indexed(batch: Batch[Work]) -> Counter[str]:
    outcomes = Counter(work.outcome.value for work in batch)
    return outcomes + Counter(indexed=len(batch), to_prefill=sum(work.active for work in batch))


def _prefilled(batch: Batch[Work]) -> Counter[str]:
    return Counter(prefilled=len(batch), dead=sum(work.outcome is Outcome.DEAD for work in batch))


def _count(
    batch: Batch[Any], counts_of: Callable[[Batch[Any]], Counter[str]], tally: Handle[Tally] | None
) -> Batch[Any]:
    """Count a batch for whoever waits here, and in Beam's metrics, which come from wherever the worker is."""
    counts = counts_of(batch)
    for name, count in counts.items():
        Metrics.counter(NAMESPACE, name).inc(count)
    if tally is not None:
        tally().add(counts)
    return batch


def _progress(counts: Mapping[str, int]) -> BackfillProgress:
    return BackfillProgress(**{field.name: counts.get(field.name, 0) for field in fields(BackfillProgress)})
