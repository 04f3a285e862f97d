"""A closed socket stops the work, before and after the first byte, streaming or not; so does the end of the drain.

One reader waits for `http.disconnect` while the work runs. Polling `is_disconnected()` would race with the
response, and the server's own check sees a closed socket only when it writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from serve.errors import StoppingError

T = TypeVar("T")


async def or_disconnect(receive: Receive, work: Coroutine[Any, Any, T], stopped: asyncio.Event) -> T:
    """Run `work` and return its result; the request's body must have been read.

    Args:
        stopped: set when the server stops and has waited long enough.

    Raises:
        ClientDisconnect: the client went away; `work` was cancelled and has ended.
        StoppingError: the same for a server that stops.
    """
    working = asyncio.ensure_future(work)
    watching, waiting = asyncio.ensure_future(_disconnected(receive)), asyncio.ensure_future(stopped.wait())
    try:
        await asyncio.wait([working, watching, waiting], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect if watching.done() else StoppingError
    finally:
        await _end(watching)
        await _end(waiting)
        await _end(working)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    interrupted = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            interrupted = True
    if not task.cancelled():
        task.exception()
    if interrupted:
        raise asyncio.CancelledError
