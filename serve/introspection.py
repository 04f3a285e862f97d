"""Health, metrics, version, settings and the page. No logic."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version as installed_version
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from engine.models import display_name
from schemas.api import ErrorBody
from serve.service import State

router = APIRouter(tags=["introspection"])
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """A page to ask a question and see what it was answered from."""
    return HTMLResponse(_page(), headers={"content-security-policy": _PAGE_POLICY, "cache-control": "no-cache"})


@router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """The process is alive; nothing else is looked at."""
    return "ok"


@router.get("/readyz", response_class=PlainTextResponse, responses={503: {"model": ErrorBody}})
async def readyz(request: Request) -> str:
    """Questions can be answered; 503 with the reason until the model is loaded and index and object store answer."""
    state = _state(request)
    await state.readiness.check(state.pools.probes)
    return "ready"


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(_state(request).telemetry.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version(request: Request) -> dict[str, Any]:
    """The release, and, once the model is loaded, what it serves."""
    state = _state(request)
    known: dict[str, Any] = {"version": installed_version("kvquilt"), "model": display_name(state.settings.model.name)}
    parts = state.readiness.built
    if parts is not None:
        known |= {"generation": parts.generation.name, "fingerprint": parts.model.fingerprint.digest}
        known |= {"reuse_refusal": parts.model.reuse_refusal}
    return known


@router.get("/config")
async def config(request: Request) -> dict[str, Any]:
    """The settings, merged and without secrets. Needs a key where `/v1` does."""
    return _state(request).settings.redacted()


@cache
def _page() -> str:
    return files("serve").joinpath("page.html").read_text("utf-8")


def _state(request: Request) -> State:
    state: State = request.app.state.kvquilt
    return state
