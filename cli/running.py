"""Who uses a data folder: one `kvquilt up` at a time, and where the other commands find it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.errors import InputError, SettingsError
from schemas.settings import Settings

DEFAULT_URL = "http://127.0.0.1:8080"


@dataclass(frozen=True)
class Running:
    """A `kvquilt up` that is alive: where its service and its broker listen."""

    pid: int
    url: str
    bootstrap: str


class DataFolder:
    """The lock on a data folder, held by the process that uses it. The system frees it however that process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        self._lock = self.folder / "lock"
        self._file = self.folder / "running.json"

    @contextmanager
    def hold(self) -> Iterator[DataFolder]:
        """Make the folder, and hold it.

        Raises:
            InputError: another process holds it, or it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = self._lock.open("a+")
        except OSError as error:
            raise InputError(f"data_dir {self.folder} cannot be used: {error.strerror}") from error
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                raise InputError(
                    f"data_dir {self.folder} is in use by process {handle.read().strip() or 'unknown'}; "
                    "stop it, or name another folder with --data-dir"
                ) from None
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            try:
                yield self
            finally:
                self._file.unlink(missing_ok=True)

    def announce(self, url: str, bootstrap: str) -> None:
        """Tell other commands where the service and the broker are; only while the folder is held."""
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(asdict(Running(os.getpid(), url, bootstrap))))
        part.replace(self._file)

    def running(self) -> Running | None:
        """The `kvquilt up` that holds the folder now and has announced itself."""
        try:
            with self._lock.open() as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return Running(**json.loads(self._file.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return None  # nobody holds it: what is announced was left by a process that was killed


def service_url(settings: Settings) -> str:
    """Where the HTTP service is: `client.url`, the `kvquilt up` of the data folder, or the default port."""
    running = DataFolder(settings.data_dir).running()
    return (settings.client.url or (running.url if running else DEFAULT_URL)).rstrip("/")


def with_broker(settings: Settings) -> Settings:
    """The settings with the address of a broker: the one they name, or that of the `kvquilt up` of the data folder.

    Raises:
        SettingsError: there is neither.
    """
    if settings.kafka.bootstrap:
        return settings
    running = DataFolder(settings.data_dir).running()
    if running is None:
        raise SettingsError(
            f"no broker: kafka.bootstrap is empty and no `kvquilt up` runs with data_dir {settings.data_dir}; "
            "start one, or name a broker with --set kafka.bootstrap=host:port"
        )
    return settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"bootstrap": running.bootstrap})})
