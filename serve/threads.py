"""Blocking work off the event loop, and its cancellation.

Qdrant, Kafka, the object store and the model block. Each runs in a thread; what is here carries results back to
the loop and the wish to stop to the thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Executor
from contextlib import closing
from typing import TypeVar

T = TypeVar("T")
Cancelled = Callable[[], bool]


async def call(pool: Executor, function: Callable[..., T], *args: object) -> T:
    """Run `function(*args)` in `pool`. A caller that is cancelled leaves at once; a call that runs is not stopped."""
    return await asyncio.get_running_loop().run_in_executor(pool, function, *args)


async def stream(pool: Executor, produce: Callable[[Cancelled], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
    """Run a generator in a thread of `pool` and yield what it yields.

    Closing the stream, or cancelling the task that reads it, makes `cancelled()` true for the producer and waits
    until its thread has come back: whoever holds a slot for the work may give it up only then.

    Args:
        pool: where the generator runs, from start to end.
        produce: gets `cancelled`, to be asked between steps.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[T | None] = asyncio.Queue()  # None: the thread is done
    stop = threading.Event()

    def work() -> None:
        try:
            with closing(produce(stop.is_set)) as generator:
                for item in generator:
                    if stop.is_set():
                        break
                    loop.call_soon_threadsafe(items.put_nowait, item)
        finally:
            loop.call_soon_threadsafe(items.put_nowait, None)

    worker = loop.run_in_executor(pool, work)
    try:
        while (item := await items.get()) is not None:
            yield item
        await worker  # raises what the producer raised
    finally:
        stop.set()
        await _settled(worker)


async def _settled(worker: asyncio.Future[None]) -> None:
    interrupted = False
    while not worker.done():
        try:
            await asyncio.wait([worker])
        except asyncio.CancelledError:  # asked a second time: still not before the thread is back
            interrupted = True
    if not worker.cancelled():
        worker.exception()  # raised above where anybody still listens
    if interrupted:
        raise asyncio.CancelledError
