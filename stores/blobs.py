"""The object store: whole objects under slash-separated keys, in a folder, a bucket or memory.

Objects are written whole and create-only, never overwritten: a reader sees all of an object or none of it, and who
loses a race to create one is told so. Keys are plain ASCII path segments; a key is never a prefix folder of another.
"""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from schemas.errors import BlobError, SettingsError
from schemas.kv_artifact import Buffer
from schemas.places import without_userinfo

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_KEY = re.compile(r"[A-Za-z0-9_.=@+-]{1,250}(/[A-Za-z0-9_.=@+-]{1,250})*")
_STAGED = re.compile(r".*#\d+")  # what a killed writer leaves in a folder store, beside the object it was writing
_CLIENT_OPTIONS = frozenset({"allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_url", "timeout"})
_CLOUD_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "abfs", "abfss"})

_FOLDER_TRIES = 20  # a put in a folder that a delete is just removing; each loses the race with a small chance

_memory: dict[str, ObjectStore] = {}  # one per URL and process
_memory_lock = threading.Lock()


def open_blobs(url: str, options: Mapping[str, str] | None = None) -> Blobs:
    """The store at `url`: `file:///folder`, `s3://bucket/prefix`, `gs://…`, `az://…` or `memory://NAME`.

    Args:
        options: given to obstore as they are: `endpoint`, `region`, `access_key_id`, `allow_http`, `timeout`, …
            A folder is made where it is missing. `memory://` URLs are one store per process and URL.

    Raises:
        SettingsError: the URL or an option is not one that obstore knows.
        BlobError: the folder cannot be made.
    """
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        from obstore.store import MemoryStore

        with _memory_lock:
            return Blobs(url, _memory.setdefault(url, MemoryStore()))
    if scheme == "file":
        return _open_folder(url)
    if scheme in _CLOUD_SCHEMES:
        return Blobs(url, _cloud_store(url, dict(options or {})))
    raise SettingsError(
        f"blobs.url {url!r} names no object store; expected file:///folder, s3://bucket, gs://bucket or memory://name"
    )


class Blobs:
    """Objects of one store. Safe to use from several threads; every failure is `BlobError`."""

    def __init__(self, url: str, store: ObjectStore, folder: Path | None = None) -> None:
        self.url, self.place = url, without_userinfo(url)  # the latter in errors
        self._store = store
        self._folder = folder

    def put_new(self, key: str, data: Buffer) -> bool:
        """Write an object that does not exist yet, whole or not at all.

        Returns:
            False where the object exists already; it is left as it is.

        Raises:
            BlobError: it was not written.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        _check_key(key)
        tries_left = _FOLDER_TRIES
        while True:
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
                return True
            except AlreadyExistsError:
                if self.size(key) is None:  # a folder of that name, not an object
                    raise BlobError(f"{self.place}: {key} is the folder of other objects") from None
                return False
            except (BaseError, OSError) as error:
                if self._surely_there(key):  # a conflict can surface as a generic error
                    return False
                if self._folder is not None and _folder_went(error) and tries_left:
                    tries_left -= 1
                    continue
                raise BlobError(f"{self.place}: {key} was not written: {_reason(error)}") from error

    def get(self, key: str) -> bytes | None:
        """The object's bytes; None where there is none."""
        view = self.view(key)
        return None if view is None else bytes(view)

    def view(self, key: str) -> memoryview | None:
        """The object's bytes without a second copy of them; None where there is none."""
        import obstore

        with self._failures("read", key):
            try:
                return memoryview(obstore.get(self._store, _check_key(key)).bytes())
            except FileNotFoundError:
                return None

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes `[start, end)`, as far as the object goes; None where there is no object."""
        import obstore

        if not 0 <= start < end:
            raise ValueError(f"range must be 0 <= start < end (got {start}, {end})")
        size = self.size(key)
        if size is None or start >= size:
            return None if size is None else b""
        with self._failures("read", key):
            try:
                return bytes(obstore.get_range(self._store, key, start=start, end=min(end, size)))
            except FileNotFoundError:
                return None

    def size(self, key: str) -> int | None:
        """Bytes of the object; None where there is none."""
        import obstore

        with self._failures("looked up", key):
            try:
                return int(obstore.head(self._store, _check_key(key))["size"])
            except FileNotFoundError:
                return None

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """`(key, bytes)` of every object below the folder `prefix`, by key; an empty prefix lists the store."""
        import obstore

        with self._failures("listed", prefix):
            try:
                found = [
                    (str(meta["path"]), int(meta["size"]))
                    for page in obstore.list(self._store, prefix=prefix.rstrip("/") or None)
                    for meta in page
                ]
            except FileNotFoundError:  # a folder that went meanwhile
                return []
        return sorted(found)

    def delete(self, keys: Iterable[str]) -> int:
        """Delete these objects; a key that is not there is fine. Returns how many were there."""
        by_folder: dict[str, set[str]] = defaultdict(set)
        for key in keys:
            by_folder[_check_key(key).rpartition("/")[0]].add(key)
        deleted = 0
        for folder, wanted in by_folder.items():
            present = sorted(wanted & {key for key, _ in self.list(folder)})
            with self._failures("deleted", folder):
                deleted += self._delete_present(present)
        return deleted

    def sweep(self, prefix: str) -> int:
        """Remove what killed writers left below `prefix` in a folder store: invisible, but bytes of a document.

        A put that is running there at the same moment fails with `BlobError` and can be done again. Returns how many
        files were removed; other stores keep no such thing.
        """
        swept = 0
        for staged in self._staged(prefix):
            with self._failures("swept", prefix):
                staged.unlink(missing_ok=True)
                swept += 1
        return swept

    def staged(self, prefix: str) -> int:
        """How many files killed writers left below `prefix`, as `sweep` would remove them; `list` shows none."""
        return len(self._staged(prefix))

    def ready(self) -> None:
        """Raise `BlobError` with the reason where the store cannot be used now."""
        import obstore

        if self._folder is not None:
            if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
                raise BlobError(f"{self.place}: the folder is missing or may not be written to")
            return
        with self._failures("listed", ""):
            next(iter(obstore.list(self._store, prefix="kv", chunk_size=1)), None)

    def _staged(self, prefix: str) -> Sequence[Path]:
        if self._folder is None:
            return []
        return [path for path in (self._folder / prefix).rglob("*#*") if _STAGED.fullmatch(path.name)]

    def _surely_there(self, key: str) -> bool:
        try:
            return self.size(key) is not None
        except BlobError:
            return False

    def _delete_present(self, keys: Sequence[str]) -> int:
        import obstore

        if self._folder is None:  # one request for many
            if keys:
                obstore.delete(self._store, [*keys])
            return len(keys)
        deleted = 0
        for key in keys:
            try:
                obstore.delete(self._store, key)
                deleted += 1
            except FileNotFoundError:  # somebody else was faster
                continue
        return deleted

    @contextmanager
    def _failures(self, done: str, key: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            raise BlobError(f"{self.place}: {key or 'the store'} could not be {done}: {_reason(error)}") from error


def _open_folder(url: str) -> Blobs:
    from obstore.store import LocalStore

    parts = urlsplit(url)
    folder = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not folder.is_absolute():
        raise SettingsError(f"blobs.url {url!r} must have three slashes and an absolute folder: file:///data/blobs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Blobs(url, LocalStore(prefix=folder, automatic_cleanup=True), folder)
    except OSError as error:
        raise BlobError(f"{without_userinfo(url)}: the folder cannot be made: {error}") from error


def _cloud_store(url: str, options: dict[str, str]) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    client: dict[str, Any] = {"connect_timeout": "5 seconds", "timeout": "60 seconds"}
    client |= {name: options.pop(name) for name in _CLIENT_OPTIONS & options.keys()}
    if any(value.startswith("http://") for name, value in options.items() if "endpoint" in name):
        client.setdefault("allow_http", True)  # the endpoint says so in words
    retry: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
    try:
        return from_url(url, config=options or None, client_options=client, retry_config=retry)  # type: ignore[call-overload,no-any-return]
    except (BaseError, ValueError, TypeError) as error:
        raise SettingsError(f"blobs.url {url!r} or blobs.options is wrong: {_reason(error)}") from error


def _check_key(key: str) -> str:
    if not _KEY.fullmatch(key) or any(segment in (".", "..") for segment in key.split("/")):
        raise ValueError(f"key {key!r} must be segments of 1 to 250 of A-Z a-z 0-9 _ . = @ + - with slashes between")
    return key


def _folder_went(error: BaseException) -> bool:
    """A delete emptied the folder and took it away: before the file was opened, or while the folder was being made."""
    return any(number in str(error) for number in ("(os error 2)", "(os error 17)"))


def _reason(error: BaseException) -> str:
    told = str(error).split("Debug source:")[0]  # what follows repeats it as a dump of Rust values
    return " ".join(told.split())[:500] or type(error).__name__
