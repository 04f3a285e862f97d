"""One way to talk to Qdrant: a server by URL, a folder (local mode) or memory, behind the same `call`.

Local mode allows one client per folder and none of its calls may overlap. So all handles of one process to one
folder share one client and one lock, and count references: the last `close` closes the client. A second process is
refused. Local mode also commits every point on its own, with an fsync each; `_BatchedCommits` makes that one per call,
and keeps the promise that a write that returned is on the disk.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import VectorIndexError
from schemas.settings import QdrantSettings

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

MEMORY = ":memory:"
MIN_SERVER = (1, 16)  # the first with conditional upserts; an older one would ignore the condition without a word
_SERVER_SCHEMES = ("http://", "https://")
_WRITES = frozenset({"upsert", "delete", "set_payload", "delete_payload", "overwrite_payload", "update_vectors"})

_shared: dict[str, Connection] = {}  # local places of this process
_shared_lock = threading.Lock()


def connect(settings: QdrantSettings, location: str) -> Connection:
    """A connection to `location`: a URL, a folder, or `:memory:` (also `:memory:NAME`, for a space of its own).

    Every call for the same folder or memory space of one process gives the same connection; each is closed once.

    Raises:
        VectorIndexError: another process holds the folder, or it cannot be opened.
    """
    if location.startswith(_SERVER_SCHEMES):
        return Connection(location, _server_client(settings, location), lock=None)
    place = location if location.startswith(MEMORY) else str(Path(location).expanduser().resolve())
    with _shared_lock:
        connection = _shared.get(place)
        if connection is None:
            _close_at_exit()
            connection = _shared[place] = _open_local(place)
        connection.references += 1
        return connection


class Connection:
    """A Qdrant client whose failures are `VectorIndexError` and whose local calls never overlap."""

    def __init__(self, place: str, client: QdrantClient, lock: threading.RLock | None, folder_lock: Any = None) -> None:
        self.place = place
        self.client = client
        self.local = lock is not None
        self.references = 0 if self.local else 1
        self._lock: contextlib.AbstractContextManager[Any] = lock if lock is not None else contextlib.nullcontext()
        self._commits = _BatchedCommits(client) if self.local else None
        self._folder_lock = folder_lock

    def call(self, method: str, **arguments: Any) -> Any:
        """`client.method(**arguments)`.

        Raises:
            VectorIndexError: it failed, whatever the reason; `status` of the cause is kept in `__cause__`.
        """
        with self._lock, _named_failures(self.place, method, arguments.get("collection_name")):
            run = getattr(self.client, method)
            if self._commits is None or method not in _WRITES:
                return run(**arguments)
            with self._commits.one(arguments["collection_name"]):
                return run(**arguments)

    def check_server(self) -> None:
        """Refuse a server without conditional upserts, on which a head could move backwards."""
        if self.local:
            return
        version = str(self.call("info").version)
        numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:2] if part.isdigit())
        if numbers < MIN_SERVER:
            wanted = ".".join(map(str, MIN_SERVER))
            raise VectorIndexError(
                f"Qdrant at {self.place} is version {version}; {wanted} or newer is needed, for conditional upserts"
            )

    def share(self) -> Connection:
        """The same connection for one more user, who closes it too."""
        with _shared_lock:
            self.references += 1
        return self

    def close(self) -> None:
        """Give the handle back; the client is closed with the last one."""
        with _shared_lock:
            self.references -= 1
            if self.references == 0:
                self._close()

    def _close(self) -> None:
        if self.local:
            _shared.pop(self.place, None)
        with self._lock, _named_failures(self.place, "close", None):
            self.client.close()
        if self._folder_lock is not None:
            self._folder_lock.close()


class _BatchedCommits:
    """Local mode keeps each collection in an SQLite file and commits after every point.

    With a write-ahead log and `synchronous=NORMAL` a commit does not wait for the disk; a checkpoint after each call
    does, once. Seen: 170 points/s before, 3,000 after, in batches of 64. Where another release of the client keeps its
    points in another way, nothing is changed.
    """

    def __init__(self, client: QdrantClient) -> None:
        self._client = client
        self._ready: dict[str, sqlite3.Connection] = {}

    @contextlib.contextmanager
    def one(self, collection: str) -> Iterator[None]:
        """All points written inside are on the disk when it ends, also when it ends with an error."""
        database = self._database(collection)
        try:
            yield
        finally:
            if database is not None:
                database.execute("PRAGMA wal_checkpoint(FULL)").fetchall()

    def _database(self, collection: str) -> sqlite3.Connection | None:
        local = getattr(self._client, "_client", None)
        held = getattr(local, "collections", {}).get(collection)
        database = getattr(getattr(held, "storage", None), "storage", None)
        if not isinstance(database, sqlite3.Connection):
            return None
        if self._ready.get(collection) is not database:
            database.execute("PRAGMA journal_mode=WAL").fetchall()
            database.execute("PRAGMA synchronous=NORMAL")
            self._ready[collection] = database
        return database


def _server_client(settings: QdrantSettings, url: str) -> QdrantClient:
    from qdrant_client import QdrantClient

    return QdrantClient(
        url=url,
        api_key=settings.api_key.get_secret_value() if settings.api_key else None,
        timeout=math.ceil(settings.timeout_s),
        check_compatibility=False,  # it would print to stderr; `check_server` raises
    )


def _open_local(place: str) -> Connection:
    from qdrant_client import QdrantClient

    lock = threading.RLock()
    if place.startswith(MEMORY):
        return Connection(place, QdrantClient(location=MEMORY), lock)
    folder_lock = _lock_folder(Path(place))
    try:
        with _named_failures(place, "open", None):
            return Connection(place, QdrantClient(path=place), lock, folder_lock)
    except VectorIndexError:
        folder_lock.close()
        raise


@functools.cache
def _close_at_exit() -> None:
    # left to itself, the client closes when modules are gone already, and prints a traceback
    atexit.register(_close_all)


def _close_all() -> None:
    with _shared_lock:
        for connection in list(_shared.values()):
            connection.references = 0
            connection._close()


def _lock_folder(folder: Path) -> Any:
    # The client reads the folder first and locks it then: a writer that leaves in between would be missed, and its
    # last points with it. So a lock of ours is held before the client looks at anything.
    import portalocker

    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".kvquilt.lock").open("a")
    except OSError as error:
        raise VectorIndexError(f"the folder {folder} for Qdrant's local mode cannot be used: {error}") from error
    try:
        portalocker.lock(handle, portalocker.LockFlags.EXCLUSIVE | portalocker.LockFlags.NON_BLOCKING)
    except portalocker.exceptions.LockException as error:
        handle.close()
        raise VectorIndexError(
            f"the folder {folder} is in use by another process; Qdrant's local mode allows one. Stop the other "
            "process, or set qdrant.url to a Qdrant server"
        ) from error
    return handle


@contextlib.contextmanager
def _named_failures(place: str, method: str, collection: str | None) -> Iterator[None]:
    from httpx import HTTPError
    from qdrant_client.common.client_exceptions import QdrantException
    from qdrant_client.http.exceptions import ApiException

    try:
        yield
    except (ApiException, QdrantException, HTTPError, sqlite3.Error, OSError, ValueError, KeyError, RuntimeError) as e:
        where = f" on collection {collection}" if collection else ""
        cause = getattr(e, "source", e)
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise VectorIndexError(f"Qdrant at {place} failed: {method}{where}: {reason}") from e
