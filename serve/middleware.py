"""What holds for every request before its route runs; pure ASGI.

`BaseHTTPMiddleware` is not used on purpose: it hides the client's disconnect from the route.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import unicodedata
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from schemas.errors import RequestError
from schemas.events import MAX_CONTENT_BYTES
from serve.auth import Authenticator
from serve.errors import StoppingError, error_response
from serve.telemetry import Telemetry

REQUEST_ID = "x-request-id"
MAX_BODY_BYTES = 256 * 1024
MAX_DOCUMENT_BODY_BYTES = 4 * MAX_CONTENT_BYTES  # JSON escapes make UTF-8 up to three times longer
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,128}")
_log = logging.getLogger("kvquilt.serve")


class RequestScope:
    """Gives each request its id and its start time, counts it, and turns what nobody caught into a 500.

    `scope["state"]` gets `request_id` and `received_s` (`time.perf_counter`).
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self.app, self._telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _PRINTABLE.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, received_s=time.perf_counter())
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # by the server alone, which stops and has waited long enough for this one
            _log.warning("request %s: %s %s was cut off", request_id, scope["method"], scope["path"])
            if status == 0:
                await error_response(StoppingError())(scope, receive, send_with_id)
        except Exception as error:
            _log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if status == 0:  # nothing was sent: there is room for an error object
                await error_response(error)(scope, receive, send_with_id)
        finally:
            self._telemetry.answered(_route(scope), status)


class Gate:
    """Decides, before a byte of the body is read, whether a request may go on: its key, type and size.

    `scope["state"]` gets `tenant`.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self.app, self._authenticator = app, authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or not (scope["path"].startswith("/v1/") or scope["path"] == "/config"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit = MAX_DOCUMENT_BODY_BYTES if scope["path"].startswith("/v1/documents/") else MAX_BODY_BYTES
        try:
            scope["state"]["tenant"] = self._authenticator.tenant(headers.get("authorization"))
            _check_path(scope)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                _check_type(headers)
            if (length := headers.get("content-length", "0")).isdigit() and int(length) > limit:
                raise RequestError(_too_large(limit), status=413, code="body_too_large")
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, _limited(receive, limit), send)


def _limited(receive: Receive, limit: int) -> Receive:
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:  # an HTTPException, for FastAPI turns every other one into "error parsing the body"
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(limit))
        return message

    return counted


def _too_large(limit: int) -> str:
    return f"the body has more than {limit:,} bytes, the most that is accepted here"


def _check_type(headers: Headers) -> None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise RequestError(
            f"content-type must be application/json (got {media_type[:60] or 'none'!r})",
            status=415,
            code="unsupported_media_type",
        )


def _check_path(scope: Mapping[str, object]) -> None:
    raw = scope.get("raw_path")
    try:
        path = unquote_to_bytes(raw if isinstance(raw, bytes) else b"").decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the path is not UTF-8: {error.reason} at byte {error.start}", param="doc_id") from error
    # a route's pattern ends with `$`, which lets a last line feed go: the path would name another document
    if any(unicodedata.category(character) == "Cc" for character in path):
        raise RequestError("the path holds a control character; no document id may", param="doc_id")


def _route(scope: Scope) -> str:
    # the template, never the path: document ids would make a time series each
    return str(getattr(scope.get("route"), "path", "none"))
