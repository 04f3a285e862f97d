"""A client of the HTTP service, as the commands `ask`, `doc` and `publish --wait` need it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from cli.running import service_url
from schemas.errors import KvquiltError, RequestError
from schemas.settings import Settings


class Service:
    """One connection to one service. Errors come back as `RequestError` with the service's own sentence."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)

    @classmethod
    def of(cls, settings: Settings) -> Service:
        """The service that the settings name."""
        key = settings.client.api_key
        return cls(service_url(settings), key.get_secret_value() if key else None, settings.client.timeout_s)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def check_ready(self) -> None:
        """Return if the service can answer questions; else raise with its reason."""
        self._answer("GET", "/readyz")

    def get(self, path: str) -> Any:
        """The JSON of a GET."""
        return self._json("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a POST."""
        return self._json("POST", path, json=body)

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a PUT."""
        return self._json("PUT", path, json=body)

    def delete(self, path: str) -> Any:
        """The JSON of a DELETE."""
        return self._json("DELETE", path)

    def status(self, doc_id: str) -> dict[str, Any] | None:
        """What the service knows of a document; None where it was never seen."""
        try:
            found: dict[str, Any] = self.get(document_path(doc_id))
        except RequestError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise
        return found

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Server-sent events of a POST: (event name, its JSON), until the stream ends."""
        with self._reachable(), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            name, data = "message", ""
            for line in response.iter_lines():
                if line.startswith("event:"):
                    name = line[6:].strip()
                elif line.startswith("data:"):
                    data += line[5:].removeprefix(" ")
                elif not line and data:
                    if data != "[DONE]":
                        yield name, json.loads(data)
                    name, data = "message", ""

    def _json(self, method: str, path: str, **options: Any) -> Any:
        return self._answer(method, path, **options).json()

    def _answer(self, method: str, path: str, **options: Any) -> httpx.Response:
        with self._reachable():
            response = self._http.request(method, path, **options)
        if response.is_error:
            raise _refusal(response)
        return response

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise KvquiltError(
                f"the service at {self.url} did not answer in time; it may be busy (client.timeout_s is the limit)"
            ) from error
        except httpx.TransportError as error:
            raise KvquiltError(
                f"no service at {self.url} ({error}); start `kvquilt up`, or name one with --url"
            ) from error


def document_path(doc_id: str) -> str:
    """The path of a document; slashes in its id are escaped, so that none is taken for the path's own."""
    from urllib.parse import quote

    return f"/v1/documents/{quote(doc_id, safe='')}"


def _refusal(response: httpx.Response) -> RequestError:
    try:
        error = response.json()["error"]
        return RequestError(error["message"], response.status_code, error.get("code") or "error", error.get("param"))
    except (ValueError, KeyError, TypeError):
        return RequestError(
            f"{response.url} answered {response.status_code}: {response.text[:200]}", response.status_code
        )
