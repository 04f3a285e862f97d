"""Backfill: files of documents -> INDEX -> PREFILL, one batch job of the streaming pipelines' own transforms.

A row is a change event in the form of `EventBody`, with its `doc_id`: one JSON object per line of a JSONL file, or
one row of a Parquet file with columns of those names. A row that names no version gets one from the file's time of
last change and its place in the file. So what changed in the stream after the file was written wins over the file,
whichever is read first, and a second run finds everything done.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam

from ingest.connect import ConnectIndex, ConnectPrefill, connected
from ingest.handles import Handle, held
from ingest.parts import Connect, IndexParts, PrefillParts
from ingest.pipeline import IndexDocuments, PrefillDocuments
from ingest.retry import store_retry
from ingest.run import run_pipeline
from ingest.work import Batch, IndexWork, Outcome, Work
from schemas.errors import InputError
from schemas.head import CommitRecord
from schemas.ids import canonical_bytes
from schemas.settings import IngestSettings, Settings
from stores.clock import SystemClock
from stores.topics import Message, ensure_topics

ROWS_PER_READ = 256


@dataclass(frozen=True)
class BackfillProgress:
    """How far a backfill is. `total` rows were found; each is indexed, then every live one is prefilled."""

    total: int = 0
    indexed: int = 0
    committed: int = 0  # heads that moved
    repeated: int = 0  # were there already
    superseded: int = 0  # a newer version was there
    dead: int = 0
    to_prefill: int = 0
    prefilled: int = 0  # documents whose KV is in place


class Tally:
    """Counts what becomes of the rows and tells a callback after each batch."""

    def __init__(self, total: int, tell: Callable[[BackfillProgress], None] | None) -> None:
        self._counts: Counter[str] = Counter(total=total)
        self._tell = tell

    @property
    def now(self) -> BackfillProgress:
        """The counts so far."""
        return BackfillProgress(**{name: self._counts[name] for name in asdict(BackfillProgress())})

    def indexed(self, batch: Batch[Work]) -> None:
        """A batch went through INDEX."""
        self._counts.update(work.outcome.value for work in batch)
        self._counts["indexed"] += len(batch)
        self._counts["to_prefill"] += sum(work.active for work in batch)
        self._report()

    def prefilled(self, batch: Batch[Work]) -> None:
        """A batch went through PREFILL."""
        self._counts["prefilled"] += len(batch)
        self._counts["dead"] += sum(work.outcome is Outcome.DEAD for work in batch)
        self._report()

    def _report(self) -> None:
        if self._tell is not None:
            self._tell(self.now)


def run_backfill(
    settings: Settings, paths: Sequence[Path], progress: Callable[[BackfillProgress], None] | None = None
) -> BackfillProgress:
    """Ingest files; returns when every row's text and KV are servable, or its dead letter is written.

    Args:
        paths: `.jsonl` and `.parquet` files.
        progress: called after each batch.

    Raises:
        InputError: a file is missing, or of another kind.
        StoreError: infrastructure kept failing. Run it again: what is done is skipped.
        UnsupportedModelError: a model cannot be used.
    """
    total = sum(count_rows(path) for path in paths)
    index, prefill = ConnectIndex(settings), ConnectPrefill(settings)
    store_retry(lambda: ensure_topics(settings.kafka), "setting up topics", settings.ingest, SystemClock())
    tally = Tally(total, progress)
    with connected(index, prefill), held(tally) as handle:
        run_pipeline(lambda p: p | Backfill(settings.ingest, paths, index, prefill, handle))
    return tally.now


class Backfill(beam.PTransform):  # type: ignore[misc] # Beam has no types
    """Files -> INDEX -> PREFILL. The second shuffle makes all text servable before the first KV is computed."""

    def __init__(
        self,
        settings: IngestSettings,
        paths: Sequence[Path],
        index: Connect[IndexParts],
        prefill: Connect[PrefillParts],
        tally: Handle[Tally],
    ) -> None:
        super().__init__("Backfill")
        self._settings, self._paths, self._tally = settings, [str(path) for path in paths], tally
        self._index, self._prefill = index, prefill

    def expand(self, pbegin: Any) -> beam.PCollection:
        """The graph."""
        tally = self._tally
        return (
            pbegin
            | "Files" >> beam.Create(self._paths)
            | "ReadRows" >> beam.FlatMap(read_rows)
            | "SpreadRows" >> beam.Reshuffle()
            | IndexDocuments(self._settings, self._index)
            | "CountIndexed" >> beam.Map(_tell_indexed, tally)
            | "CommitRecords" >> beam.FlatMap(commit_messages)
            | "SpreadRecords" >> beam.Reshuffle()
            | PrefillDocuments(self._settings, self._prefill)
            | "CountPrefilled" >> beam.Map(_tell_prefilled, tally)
        )


def _tell_indexed(batch: Batch[Work], tally: Handle[Tally]) -> Batch[Work]:
    tally().indexed(batch)
    return batch


def _tell_prefilled(batch: Batch[Work], tally: Handle[Tally]) -> None:
    tally().prefilled(batch)


def commit_messages(batch: Batch[IndexWork]) -> Iterator[Message]:
    """The commit records of a batch as PREFILL reads them from the topic."""
    for work in batch:
        if work.active and work.head is not None:
            key = canonical_bytes([work.head.tenant, work.head.doc_id])
            record = CommitRecord.of(work.head)
            yield Message("backfill", 0, work.message.offset, record.event_ms, key, record.to_bytes())


def count_rows(path: Path) -> int:
    """How many rows a file has.

    Raises:
        InputError: the file is missing, unreadable or of another kind.
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(path).num_rows)
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    raise InputError(f"{path} is neither .jsonl nor .parquet; those two can be read")


def read_rows(file: str) -> Iterator[Message]:
    """The rows of a file as messages: topic is the file's name, offset the row's number, key its `doc_id`."""
    path = Path(file)
    changed_ms = path.stat().st_mtime_ns // 1_000_000
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    for number, (doc_id, value) in enumerate(rows):
        yield Message(path.name, 0, number, changed_ms, doc_id, value)


def _json_rows(path: Path) -> Iterator[tuple[bytes | None, bytes]]:
    with path.open("rb") as lines:
        for line in lines:
            if line.strip():
                yield _doc_id(line), line.rstrip(b"\r\n")


def _doc_id(line: bytes) -> bytes | None:
    """The row's own key; None where the row is broken: parsing says how."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return b"?"
    doc_id = row.get("doc_id") if isinstance(row, dict) else None
    return doc_id.encode("utf-8", "surrogatepass") if isinstance(doc_id, str) else None


def _parquet_rows(path: Path) -> Iterator[tuple[bytes | None, bytes]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_READ):
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                value = json.dumps(_without_nulls(row), default=str, ensure_ascii=False).encode()
                yield _doc_id(value), value


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A column that is null in this row is a field that the event does not have."""
    return {name: value for name, value in row.items() if value is not None}
