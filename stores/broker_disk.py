"""Objects in a folder, for the embedded broker: made once, compared and set, listed in order, on disk when told so.

It is no object store for anything else: `stores.blobs` is. One process per folder.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from xml.sax.saxutils import escape

PAGE = 20_000  # keys in one LIST answer; S3 has 1,000, which would be 20 round trips
UNFINISHED = ".put-"


class FolderBucket:
    """Keys are paths below `folder`. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()  # a compare-and-set is a read and a write
        self._keys: list[str] = []  # sorted
        self._entries: dict[str, str] = {}  # key -> its entry in a LIST answer
        folder.mkdir(parents=True, exist_ok=True)
        self._load()

    def path(self, key: str) -> Path | None:
        """The file of an object, or None for a key that would leave the folder."""
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") or "\x00" in part for part in parts):
            return None
        return self.folder.joinpath(*parts)

    def put(self, key: str, path: Path, data: bytes, only_if: Callable[[bytes | None], bool]) -> bool:
        """Replace an object, on disk before this returns, if `only_if` agrees with what it is now."""
        with self._lock:
            old = path.read_bytes() if path.is_file() else None
            if not only_if(old):
                return False
            _write(path, data)
            if old is None:
                bisect.insort(self._keys, key)
            self._entries[key] = _entry(key, path)
            return True

    def delete(self, key: str, path: Path) -> None:
        """Remove an object; one that is not there is fine."""
        with self._lock:
            path.unlink(missing_ok=True)
            if self._entries.pop(key, None) is not None:
                del self._keys[bisect.bisect_left(self._keys, key)]

    def entries(self, prefix: str, after: str) -> list[tuple[str, str]]:
        """Key and LIST entry of the objects that begin with `prefix` and follow `after`, in order, PAGE + 1 at most.

        From memory: the broker lists a partition's records on every fetch.
        """
        with self._lock:
            start = max(bisect.bisect_left(self._keys, prefix), bisect.bisect_right(self._keys, after))
            keys = self._keys[start : start + PAGE + 1]
            return [(key, self._entries[key]) for key in keys if key.startswith(prefix)]

    def _load(self) -> None:
        for parent, _, names in os.walk(self.folder):
            for name in names:
                path = Path(parent, name)
                if name.startswith(UNFINISHED):  # a write that kill -9 interrupted
                    path.unlink(missing_ok=True)
                    continue
                key = path.relative_to(self.folder).as_posix()
                self._entries[key] = _entry(key, path)
        self._keys = sorted(self._entries)


def _entry(key: str, path: Path) -> str:
    status = path.stat()
    modified = datetime.fromtimestamp(status.st_mtime, UTC)
    # the broker compares only ETags of GET and PUT; this one spares hashing every object at start
    return (
        f"<Contents><Key>{escape(key)}</Key><Size>{status.st_size}</Size><StorageClass>STANDARD</StorageClass>"
        f'<ETag>"{status.st_mtime_ns:x}-{status.st_size:x}"</ETag>'
        f"<LastModified>{modified:%Y-%m-%dT%H:%M:%S.000Z}</LastModified></Contents>"
    )


def etag(data: bytes) -> str:
    """The ETag of an object: equal for equal bytes."""
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"'


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
