"""The app: wiring and lifespan only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version as installed_version

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from engine.models import display_name
from schemas.errors import KvquiltError
from schemas.settings import Settings
from serve import errors, introspection, routes
from serve.auth import Authenticator
from serve.middleware import Gate, RequestScope
from serve.parts import Parts, build_parts
from serve.service import State
from serve.telemetry import Telemetry

_log = logging.getLogger("kvquilt.serve")


def create_app(
    settings: Settings,
    parts: Parts | Callable[[], Parts] | None = None,
    *,
    registry: CollectorRegistry | None = None,
    on_failure: Callable[[], None] | None = None,
) -> FastAPI:
    """The HTTP service as an ASGI app.

    Args:
        parts: ready-made ones, which stay the caller's to close; or how to make them, in the background while
            `/readyz` says why it waits, and closed with the app. By default they are built from the settings.
        registry: where the metrics go, to share `/metrics` with the rest of the process.
        on_failure: called when the parts cannot be built and trying again will not help.
    """
    state = State(settings, Telemetry(display_name(settings.model.name), registry))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        if isinstance(parts, Parts):
            await state.readiness.build(lambda: parts, state.pools.model)
            state.start()
            building = None
        else:
            building = asyncio.create_task(_build(state, parts or (lambda: build_parts(settings)), on_failure))
        try:
            yield
        finally:
            await state.stop()
            if building is not None:
                building.cancel()
                with suppress(asyncio.CancelledError):
                    await building
                if state.readiness.built is not None:
                    await asyncio.to_thread(state.readiness.built.close)
            state.pools.shutdown()

    app = FastAPI(
        title="kvquilt",
        version=installed_version("kvquilt"),
        summary="Answers over documents that keep changing",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.kvquilt = state
    app.include_router(routes.router)
    app.include_router(introspection.router)
    errors.install(app)
    # the last one added is the outermost
    app.add_middleware(Gate, authenticator=Authenticator(settings.serve.api_keys))
    app.add_middleware(RequestScope, telemetry=state.telemetry)
    return app


async def _build(state: State, make: Callable[[], Parts], on_failure: Callable[[], None] | None) -> None:
    try:
        await state.readiness.build(make, state.pools.model)
    except KvquiltError as error:
        _log.error("the service cannot start: %s", error)
    except Exception:
        _log.exception("the service cannot start")
    else:
        state.start()
        return
    if on_failure is not None:
        on_failure()
