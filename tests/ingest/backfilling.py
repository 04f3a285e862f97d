"""Sources for the tests of backfill, and the job over the parts of a `World`."""

import json
import os

import pyarrow
import pyarrow.parquet

from ingest.backfill import backfill as run
from ingest.handles import held
from ingest.runners import Runner
from ingest.sources import survey

WRITTEN_S = 1_600_000_000  # when the files of these tests were changed


def jsonl(path, *rows):
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return written(path)


def parquet(path, *rows, **options):
    columns = {name: None for row in rows for name in row}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([columns | row for row in rows]), path, **options)
    return written(path)


def file(path, content, at_s=WRITTEN_S):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return written(path, at_s)


def written(path, at_s=WRITTEN_S):
    os.utime(path, (at_s, at_s))
    return path


def messages(source):
    return [message for piece in source.pieces for message in piece.read()]


def backfill(world, *paths, source=None, runner=None, progress=None, **options):
    """Backfill paths, or a source that was surveyed before, into a world; gives what became of the rows."""
    source = source or survey(paths, **options)
    with held(world.index_parts) as index, held(world.prefill_parts) as prefill:
        return run(world.settings.ingest, source.pieces, index, prefill, progress, runner or Runner())
