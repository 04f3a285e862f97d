"""From what somebody named to one `Source`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ingest.sources.base import LeftOut, Piece, Source
from ingest.sources.document import DocumentFile, longest
from ingest.sources.folder import files_in
from ingest.sources.kinds import CONTENT_TYPES, LINES, PARQUET, READABLE, is_utf8, relative_id, shown
from ingest.sources.lines import line_pieces
from ingest.sources.parquet import row_groups
from ingest.sources.topic import topic_span
from schemas.errors import InputError
from schemas.events import DEFAULT_TENANT
from schemas.settings import KafkaSettings
from stores.clock import Clock, SystemClock


def survey(
    paths: Sequence[Path],
    *,
    root: Path = Path(),
    tenant: str = DEFAULT_TENANT,
    topic: str | None = None,
    kafka: KafkaSettings | None = None,
    clock: Clock | None = None,
) -> Source:
    """Look at files, folders and a topic; nothing but names, sizes and the places of rows is read.

    Args:
        root: ids of documents that are files are their paths relative to this folder.
        tenant: of files, and of rows that name none.
        topic: read from its beginning to its end now, with `kafka`.

    Raises:
        InputError: a path does not exist, is of another kind, lies outside `root` or cannot be read.
        TopicError: the topic does not exist, or the broker does not answer.
    """
    pieces: list[Piece] = []
    left_out: list[LeftOut] = []
    owns: list[str] = []
    as_of_ms = [(clock or SystemClock()).now_ms()]
    for path in paths:
        if path.is_dir():
            inside = relative_id(path.resolve(), root)
            ids = "" if inside == "." else f"{inside}/"
            owns.append(ids)
            for found in files_in(path, ids):
                if isinstance(found, LeftOut):
                    left_out.append(found)
                else:
                    pieces += _pieces(*found, tenant)
        else:
            pieces += _named(path, root, tenant)
            as_of_ms.append(path.stat().st_mtime_ns // 1_000_000)
    if topic is not None:
        assert kafka is not None
        pieces.append(topic_span(kafka, topic))
    return Source(tuple(pieces), tuple(left_out), tuple(owns), min(as_of_ms))


def _named(path: Path, root: Path, tenant: str) -> Iterator[Piece]:
    """The pieces of a file that was named itself: what a folder would leave out is refused."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise InputError(f"{path} does not exist")
    if not is_utf8(path.name):
        raise InputError(f"{shown(path)}: the name is not UTF-8; rename it")
    if suffix not in READABLE:
        raise InputError(f"{path} ends in {suffix or 'nothing'}; a backfill reads {', '.join(READABLE)}")
    content_type = CONTENT_TYPES.get(suffix)
    if content_type is None:
        return _pieces(path, "", tenant)
    if (nbytes := path.stat().st_size) > longest(content_type):
        raise InputError(f"{path} has {nbytes:,} bytes; at most {longest(content_type):,} are accepted. Split it")
    return _pieces(path, relative_id(path, root), tenant)


def _pieces(path: Path, doc_id: str, tenant: str) -> Iterator[Piece]:
    suffix = path.suffix.lower()
    if suffix in LINES:
        yield from line_pieces(path, tenant)
    elif suffix in PARQUET:
        yield from row_groups(path, tenant)
    else:
        yield DocumentFile(path, doc_id, tenant)
