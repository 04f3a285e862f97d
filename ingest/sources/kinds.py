"""Which files hold documents, by the end of their names; what a document in a file is called."""

from __future__ import annotations

from pathlib import Path

from schemas.errors import InputError
from schemas.events import MAX_LABEL_CHARACTERS, ContentType

CONTENT_TYPES = {
    ".md": ContentType.MARKDOWN,
    ".markdown": ContentType.MARKDOWN,
    ".txt": ContentType.TEXT,
    ".html": ContentType.HTML,
    ".htm": ContentType.HTML,
    ".pdf": ContentType.PDF,
}
LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
READABLE = (*CONTENT_TYPES, *LINES, *PARQUET)


def relative_id(path: Path, root: Path) -> str:
    """The id of the document in a file, or what the ids in a folder begin with: the path relative to `root`.

    The last part of `path` may be a link; the folders before it are followed.

    Raises:
        InputError: it lies outside, or its name is not UTF-8: no document can have such an id.
    """
    try:
        inside = (path.parent.resolve() / path.name).relative_to(root.resolve()).as_posix()
    except ValueError:
        raise InputError(
            f"{shown(path)} lies outside {root}, which document ids are relative to; name another folder with --root"
        ) from None
    if not is_utf8(inside):
        raise InputError(f"{shown(path)}: the name is not UTF-8; rename it")
    return inside


def is_utf8(name: str) -> bool:
    """Whether a file's name is text; the system takes any bytes for one."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(path: Path) -> str:
    """A path as it can be printed: bytes that are no text as escapes."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def title_of(content: str, content_type: ContentType, stem: str) -> str | None:
    """The title of a document that has no field for one: of markdown the first heading, else the file's name."""
    if content_type is ContentType.HTML:  # a page has a title of its own
        return None
    heading = _heading(content) if content_type is ContentType.MARKDOWN else None
    return (heading or stem)[:MAX_LABEL_CHARACTERS]


def _heading(content: str) -> str | None:
    for line in content.splitlines():
        if line.startswith("# "):
            return line[2:].strip() or None
    return None
