"""The schema registry, as far as it is read: schemas by id, over Confluent's REST API.

One GET; docs/decisions tells why that is not worth a second Kafka client. A schema of an id never changes, so each is
asked for once.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ingest.formats.decoders import DECODERS, Decoder
from schemas.errors import EventError, RegistryError
from schemas.places import without_userinfo
from schemas.settings import RegistrySettings

if TYPE_CHECKING:
    import httpx

_UNKNOWN_SCHEMA = (40403, 40402, 40401)  # no such schema, version, subject: the registry's own words
_MAX_REFERENCES = 64


class Registry:
    """Decoders by schema id, kept for good. Safe to use from several threads; makes no connection before it must."""

    def __init__(self, settings: RegistrySettings) -> None:
        self._settings = settings
        self._decoders: dict[int, Decoder] = {}
        self._http: httpx.Client | None = None
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it is; empty where there is none."""
        return self._settings.url.rstrip("/")

    @property
    def place(self) -> str:
        """The same for errors: without a password."""
        return without_userinfo(self.url)

    def decoder(self, schema_id: int) -> Decoder:
        """What decodes values of a schema.

        Raises:
            EventError: the registry does not know the id, or the schema is of a kind that cannot be read.
            RegistryError: the registry does not answer, refuses, or answers with something else.
        """
        decoder = self._decoders.get(schema_id)
        if decoder is None:
            decoder = self._decoders[schema_id] = self._make(schema_id)
        return decoder

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._lock:
            if self._http is not None:
                self._http.close()
                self._http = None

    def _make(self, schema_id: int) -> Decoder:
        answer = self._get(f"/schemas/ids/{schema_id}", f"schema {schema_id}")
        kind = answer.get("schemaType") or "AVRO"
        if kind not in DECODERS:
            raise EventError(f"schema {schema_id} is of type {kind!r:.40}; expected {', '.join(DECODERS)}")
        params = {"format": "serialized"} if kind == "PROTOBUF" else {}
        if params:
            answer = self._get(f"/schemas/ids/{schema_id}", f"schema {schema_id}", params)
        references: dict[str, str] = {}
        try:
            self._collect(answer, references, params, depth=0)
            return DECODERS[kind](answer["schema"], references)
        except (EventError, RegistryError):
            raise
        except Exception as error:  # the registry should have refused such a schema
            raise RegistryError(f"schema {schema_id} of {self.place} cannot be used: {error}") from error

    def _collect(self, answer: dict[str, Any], found: dict[str, str], params: dict[str, str], depth: int) -> None:
        """Add what a schema refers to, the deepest first."""
        for reference in answer.get("references") or []:
            name, subject, version = reference["name"], reference["subject"], reference["version"]
            if name in found or name.startswith("google/protobuf/"):
                continue
            if depth > _MAX_REFERENCES or len(found) > _MAX_REFERENCES:
                raise RegistryError(f"schemas of {self.place} refer to more than {_MAX_REFERENCES} others")
            path = f"/subjects/{quote(subject, safe='')}/versions/{version}"
            referred = self._get(path, f"{subject} version {version}", params)
            self._collect(referred, found, params, depth + 1)
            found[name] = referred["schema"]

    def _get(self, path: str, what: str, params: dict[str, str] | None = None) -> dict[str, Any]:
        import httpx

        try:
            response = self._client().get(self.url + path, params=params)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise RegistryError(f"the schema registry {self.place} cannot be reached: {reason}") from error
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            answer = None
        told = answer if isinstance(answer, dict) else {}
        if response.status_code == 404 and told.get("error_code") in _UNKNOWN_SCHEMA:
            raise EventError(f"the schema registry does not know {what}: {told.get('message', '')!s:.200}")
        if response.status_code != 200 or not isinstance(told.get("schema"), str):
            said = str(told.get("message") or response.text)[:200]
            raise RegistryError(
                f"the schema registry {self.place} answered {response.status_code} when asked for {what}: {said}"
            )
        return told

    def _client(self) -> httpx.Client:
        import httpx

        with self._lock:
            if self._http is None:
                settings = self._settings
                headers = {"Accept": "application/vnd.schemaregistry.v1+json"}
                if settings.token is not None:
                    headers["Authorization"] = f"Bearer {settings.token.get_secret_value()}"
                password = settings.password.get_secret_value() if settings.password is not None else ""
                auth = httpx.BasicAuth(settings.username, password) if settings.username else None
                self._http = httpx.Client(headers=headers, auth=auth, timeout=settings.timeout_s)
            return self._http
