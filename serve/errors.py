"""Every response that is not a 2xx carries OpenAI's error object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from schemas.api import ErrorBody, ErrorDetail
from schemas.errors import InputError, KvquiltError, RequestError, StoreError, UnsupportedModelError
from schemas.places import without_userinfo

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; access logs do
_VALIDATION_CODES = {"json_invalid": "invalid_json", "extra_forbidden": "unknown_field", "missing": "missing_field"}


class NotReadyError(KvquiltError):
    """The service is up and cannot answer yet; the message is the reason. Becomes a 503."""


class StoppingError(KvquiltError):
    """The server stops, and this request was not done when its time was over. Becomes a 503."""

    def __init__(self) -> None:
        super().__init__("the server is stopping, and the answer was cut off; ask again")


class BusyError(RequestError):
    """All slots and all places in the queue are taken. Becomes a 429 with `Retry-After`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, status=429, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """Status and body for an error that was raised on purpose; anything else is a 500 that tells no internals."""
    if isinstance(error, RequestError):
        return error.status, _body(error.status, str(error), error.code, error.param)
    if isinstance(error, InputError):
        return 400, _body(400, str(error), "invalid_request")
    if isinstance(error, NotReadyError):
        return 503, _body(503, without_userinfo(str(error)), "not_ready")
    if isinstance(error, StoppingError):
        return 503, _body(503, str(error), "server_stopping")
    if isinstance(error, StoreError):
        said = without_userinfo(str(error))  # it may name the URL of the settings
        return 503, _body(503, f"an outside system did not answer: {said}", "store_unavailable")
    if isinstance(error, UnsupportedModelError):
        return 500, _body(500, str(error), "unsupported_model")
    return 500, _body(500, "internal error; the log has it under this x-request-id", "internal_error")


def error_response(error: Exception) -> JSONResponse:
    """The response for `error_body(error)`, with `Retry-After` where trying again may help."""
    status, body = error_body(error)
    headers = {}
    if isinstance(error, BusyError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = "2"
    elif status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body.model_dump(), status, headers)


def install(app: FastAPI) -> None:
    """Make `app` answer all its errors with the error object."""

    @app.exception_handler(KvquiltError)
    async def kvquilt_error(request: Request, error: Exception) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _framework_error(request, error)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def _body(status: int, message: str, code: str, param: str | None = None) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=message, type=_kind(status), param=param, code=code))


def _kind(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")


def _validation_error(faults: Sequence[Any]) -> RequestError:
    fault: Mapping[str, Any] = faults[0]
    code = _VALIDATION_CODES.get(fault["type"], "invalid_value")
    if code == "invalid_json":
        return RequestError(f"the body is not JSON: {fault['ctx']['error']} at character {fault['loc'][-1]}", code=code)
    param = ".".join(str(part) for part in fault["loc"][1:]) or None
    where = param or "the body"
    if code == "missing_field":
        return RequestError(f"{where} is missing", code=code, param=param)
    if code == "unknown_field":
        return RequestError(f"{where} is not a field of this request", code=code, param=param)
    found = repr(fault.get("input"))
    found = found if len(found) <= 60 else found[:57] + "..."
    return RequestError(f"{where}: {fault['msg']} (got {found})", code=code, param=param)


def _framework_error(request: Request, error: HTTPException) -> JSONResponse:
    if error.status_code == HTTPStatus.NOT_FOUND:
        code, message = "not_found", f"{request.method} {request.url.path} does not exist; /docs lists what does"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        code, message = "method_not_allowed", f"{request.url.path} does not take {request.method}"
    elif error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        code, message = "body_too_large", str(error.detail)
    else:
        code, message = "invalid_request", str(error.detail)
    body = _body(error.status_code, message, code)
    return JSONResponse(body.model_dump(), error.status_code, error.headers)
