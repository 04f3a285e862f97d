"""An answer as server-sent events: `citations`, `token`…, `done`; or `error`, after which nothing comes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serve.answer import Cited, Done, Event
from serve.disconnect import or_disconnect
from serve.errors import StoppingError, error_body

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must pass each event on at once
_log = logging.getLogger("kvquilt.serve")


class EventStream(Response):
    """Sends events as they come. A fault before the first event is an ordinary error response, not an event.

    A client that goes away closes `events`, also while nothing is being sent; so does a server that stops. One that
    does not read what is sent counts as gone: it would hold its slot for as long as it likes.

    Args:
        stopped: as in `or_disconnect`.
        send_timeout_s: how long a client may take to read, so that more can be sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Event, None], stopped: asyncio.Event, send_timeout_s: float) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._stopped, self._started = events, stopped, False
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_soon(message: Message) -> None:
            try:
                async with asyncio.timeout(self._send_timeout_s):
                    await send(message)
            except TimeoutError:
                name = scope["state"]["request_id"]
                _log.warning("request %s: nothing was read for %g s; it was cut off", name, self._send_timeout_s)
                raise ClientDisconnect from None

        with suppress(ClientDisconnect):  # nobody is left to be told
            try:
                await or_disconnect(receive, self._send(scope, send_soon), self._stopped)
            except StoppingError as error:
                if not self._started:
                    raise
                await send_soon(_message(_frame("error", error_body(error)[1])))
            await send_soon(_message(b"", more=False))

    async def _send(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    if not self._started:
                        self._started = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await send(_message(_encode(event)))
            except ClientDisconnect:
                raise
            except Exception as error:
                if not self._started:
                    raise
                _log.exception("request %s failed in its stream", scope["state"]["request_id"])
                await send(_message(_frame("error", error_body(error)[1])))


def _message(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _encode(event: Event) -> bytes:
    if isinstance(event, Cited):
        return _frame("citations", {"citations": [citation.model_dump() for citation in event.citations]})
    if isinstance(event, Done):
        return _frame("done", event.response)
    return _frame("token", {"text": event.text})


def _frame(name: str, data: BaseModel | dict[str, object]) -> bytes:
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n".encode()
