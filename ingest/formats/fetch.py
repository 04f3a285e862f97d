"""Content by reference: from where it is allowed, no more than is allowed, and only what its digest says."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from ingest.formats.fetch_http import HttpSource
from ingest.formats.fetch_objects import ObjectSource
from ingest.formats.limits import check_length
from schemas.errors import EventError, FetchError
from schemas.places import HTTP_PORTS, Place, split_place
from schemas.settings import FetchSettings


class Fetcher:
    """Fetches what events refer to. Safe to use from several threads; makes no connection before it must."""

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._allowed = [split_place(place) for place in settings.allow]
        self._http = HttpSource(settings, self.permitted)
        self._objects = ObjectSource(settings)

    def fetch(self, uri: str, sha256: str) -> bytes:
        """The bytes at `uri`.

        Args:
            sha256: what they must digest to, in lower-case hex.

        Raises:
            EventError: the place is not allowed, there is nothing, it is too large or not what the digest says.
            FetchError: the server cannot be reached now, or refuses.
        """
        place = self.permitted(uri)
        if place.scheme in HTTP_PORTS:
            content = self._http.read(place)
        elif place.scheme == "file":
            content = self._file(place)
        else:
            content = self._objects.read(place)
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise EventError(f"the content of {uri:.200} has SHA-256 {found}; the event says {sha256}")
        return content

    def permitted(self, uri: str) -> Place:
        """The place that a URI names; raises `EventError` where it is not on the list."""
        try:
            place = split_place(uri)
        except ValueError as error:
            raise EventError(f"uri {uri!r:.200} cannot be fetched: {error}") from error
        if not any(allowed.holds(place) for allowed in self._allowed):
            raise EventError(f"uri {uri!r:.200} may not be fetched: events.fetch.allow does not list its place")
        return place

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _file(self, place: Place) -> bytes:
        """A regular file; links are followed first, and what they lead to must be allowed as well."""
        uri = f"file://{place.path}"
        try:
            path = Path(place.plain_path).resolve(strict=True)
            folders = [Path(allowed.plain_path).resolve() for allowed in self._allowed if allowed.scheme == "file"]
            if not any(path.is_relative_to(folder) for folder in folders):
                raise EventError(f"{uri} is a link to a place that events.fetch.allow does not list")
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            with os.fdopen(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise EventError(f"{uri} is no regular file")
                content = file.read(self._settings.max_bytes + 1)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise EventError(f"{uri} does not exist") from error
        except (OSError, ValueError, RuntimeError) as error:
            raise FetchError(f"{uri} cannot be read: {error}") from error
        check_length(len(content), self._settings, uri)
        return content
