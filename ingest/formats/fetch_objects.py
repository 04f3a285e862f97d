"""Content in buckets, through obstore. Credentials and endpoints come from `events.fetch.options`."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ingest.formats.limits import check_length
from schemas.errors import EventError, FetchError
from schemas.places import Place
from schemas.settings import FetchSettings

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CLIENT_OPTIONS = frozenset({"allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_url", "timeout"})


class ObjectSource:
    """Reads objects; one store per bucket, made when it is first read from."""

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._stores: dict[str, ObjectStore] = {}
        self._lock = threading.Lock()

    def read(self, place: Place) -> bytes:
        """The object at a place that is allowed.

        Raises:
            EventError: there is none, or it is too large.
            FetchError: the store does not answer, or refuses.
        """
        import obstore
        from obstore.exceptions import BaseError

        bucket, key = f"{place.scheme}://{place.host}", place.plain_path.lstrip("/")
        uri = f"{bucket}/{key}"
        if not key:
            raise EventError(f"{uri} names a bucket, no object")
        try:
            answer = obstore.get(self._store(bucket), key)
            check_length(int(answer.meta["size"]), self._settings, uri)
            content = bytearray()
            for part in answer.stream():
                content += part
                check_length(len(content), self._settings, uri)
        except FileNotFoundError as error:
            raise EventError(f"{uri} does not exist") from error
        except (BaseError, OSError, ValueError, TypeError) as error:
            told = " ".join(str(error).split("Debug source:")[0].split())[:300]
            raise FetchError(f"{uri} cannot be read: {told}") from error
        return bytes(content)

    def _store(self, bucket: str) -> ObjectStore:
        from obstore.store import from_url

        with self._lock:
            if bucket not in self._stores:
                options = dict(self._settings.options.get(bucket, {}))
                client: dict[str, Any] = {"connect_timeout": "5 seconds"}
                client["timeout"] = f"{max(1, round(self._settings.timeout_s))} seconds"
                client |= {name: options.pop(name) for name in _CLIENT_OPTIONS & options.keys()}
                if any(value.startswith("http://") for name, value in options.items() if "endpoint" in name):
                    client.setdefault("allow_http", True)  # the endpoint says so in words
                retry: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=self._settings.timeout_s)}
                self._stores[bucket] = from_url(  # type: ignore[call-overload]
                    bucket, config=options or None, client_options=client, retry_config=retry
                )
            return self._stores[bucket]
