"""A closed socket stops the work, before and after the first byte, streaming or not.

One reader waits for `http.disconnect` while the work runs. Polling `is_disconnected()` would race with the
response, and the server's own check sees a closed socket only when it writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def or_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result; the request's body must have been read.

    Raises:
        ClientDisconnect: the client went away; `work` was cancelled and has ended.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await _end(watching)
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
