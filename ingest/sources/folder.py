"""A folder of files, with the folders in it: which of them hold documents, and what is left out."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ingest.sources.base import LeftOut, Why
from ingest.sources.document import longest
from ingest.sources.kinds import CONTENT_TYPES, READABLE, is_utf8, shown
from schemas.errors import InputError


def files_in(folder: Path, ids: str) -> Iterator[tuple[Path, str] | LeftOut]:
    """The files to read, each with the id of its document, and what is left out; sorted by name.

    Hidden files and folders are left out, links to folders are not followed (they may lead in circles), links to files
    are. `_SUCCESS`, `.crc` and the like, which tools put beside their output, are of another kind or hidden.

    Args:
        ids: what all ids begin with; empty, or ends in a slash.

    Raises:
        InputError: a folder cannot be listed: what is in it cannot be told from what is not there.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"folder {folder} cannot be listed: {error.strerror}") from error
    for entry in entries:
        path, doc_id = folder / entry.name, ids + entry.name
        if entry.name.startswith("."):
            yield LeftOut(shown(path), doc_id, Why.HIDDEN)
        elif entry.is_dir(follow_symlinks=False):
            yield from files_in(path, doc_id + "/")
        elif (why := _refused(path)) is not None:
            yield LeftOut(shown(path), doc_id, why)
        else:
            yield path, doc_id


def _refused(path: Path) -> Why | None:
    if path.is_dir():
        return Why.FOLDER_LINK
    suffix = path.suffix.lower()
    if suffix not in READABLE:
        return Why.KIND
    try:
        found = path.stat()
    except OSError:
        return Why.ACCESS
    if not is_utf8(str(path)):
        return Why.NAME
    if not stat.S_ISREG(found.st_mode):
        return Why.SPECIAL  # reading a pipe would wait for ever
    if not os.access(path, os.R_OK):
        return Why.ACCESS
    content_type = CONTENT_TYPES.get(suffix)
    return Why.SIZE if content_type is not None and found.st_size > longest(content_type) else None
