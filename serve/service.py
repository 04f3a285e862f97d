"""What the routes call: the parts' users, put together once the parts are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass

from schemas.api import AnswerResponse
from schemas.settings import Settings
from serve.admission import Admission
from serve.answer import Answerer, Done, Event
from serve.documents import Documents
from serve.following import Following
from serve.loading import LOAD_THREADS, KvLoader
from serve.parts import Parts
from serve.patience import Patience
from serve.prefixes import ExactPrefixes
from serve.readiness import Readiness
from serve.retrieve import Found, Retriever
from serve.staleness import StaleWatch
from serve.tail import CommitTail
from serve.telemetry import Telemetry
from serve.tiers import Tiers
from stores.tiers import Floors, HostTier

STORE_THREADS = 8  # for Qdrant calls, and as many for Kafka's


class Pools:
    """The threads that blocking work runs in; apart, so that slow stores cannot keep answers from being decoded."""

    def __init__(self, settings: Settings) -> None:
        self.model = ThreadPoolExecutor(settings.serve.max_concurrent, "model")
        self.index = ThreadPoolExecutor(STORE_THREADS, "index")
        self.topics = ThreadPoolExecutor(STORE_THREADS, "topics")
        self.loads = ThreadPoolExecutor(LOAD_THREADS, "kv-load")
        self.probes = ThreadPoolExecutor(1, "probes")

    def shutdown(self) -> None:
        """Start nothing more; what runs ends on its own."""
        for pool in (self.model, self.index, self.topics, self.loads, self.probes):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Service:
    """Everything that needs the parts."""

    parts: Parts
    retriever: Retriever
    searches: Admission
    answerer: Answerer
    documents: Documents
    tiers: Tiers
    patience: Patience
    tail: CommitTail

    @classmethod
    def of(cls, settings: Settings, parts: Parts, pools: Pools, telemetry: Telemetry) -> Service:
        """Wire it."""
        retriever = Retriever(parts, pools.index)
        floors, serve = Floors(), settings.serve
        prefixes = ExactPrefixes(serve.prefix_cache_bytes, parts.model.exact_rows_last, floors)
        host = HostTier(serve.host_tier_bytes, floors)
        tiers = Tiers(parts.generation.name, host, prefixes, floors, parts.index, telemetry)
        fingerprint = parts.model.fingerprint.digest
        patience = Patience(serve.load_timeout_s, lambda: parts.model.prefill_pace_s, LOAD_THREADS)
        loader = KvLoader(parts.kv, tiers, fingerprint, pools.loads, patience, telemetry)
        answerer = Answerer(
            settings,
            parts,
            retriever=retriever,
            loader=loader,
            admission=Admission(settings.serve.max_concurrent, settings.serve.max_queue, telemetry),
            tiers=tiers,
            pool=pools.model,
            telemetry=telemetry,
            stale=StaleWatch(parts.index, pools.index, telemetry),
        )
        documents = Documents(parts, settings.kafka, reads=pools.index, writes=pools.topics)
        searches = Admission(STORE_THREADS, settings.serve.max_queue, telemetry)
        tail = CommitTail(parts, tiers, telemetry, settings.serve.tier_check_s)
        return cls(parts, retriever, searches, answerer, documents, tiers, patience, tail)

    async def retrieve(self, tenant: str, question: str, k: int) -> list[Found]:
        """A search on its own, as `Retriever.visible`, with its own slots and queue.

        Raises:
            BusyError: no slot and no place in the queue.
        """
        async with self.searches.slot():
            return await self.retriever.visible(tenant, question, k)


class State:
    """What an app holds: settings, metrics, threads, and the service once it is ready.

    Attributes:
        stopped: set by a server that stops, when open answers have had their time; they end then.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self.settings, self.telemetry = settings, telemetry
        self.readiness = Readiness()
        self.pools = Pools(settings)
        self.stopped = asyncio.Event()
        self._service: Service | None = None
        self._following: Following | None = None
        self._follow: asyncio.Task[None] | None = None

    @property
    def service(self) -> Service:
        """The service.

        Raises:
            NotReadyError: the parts are not there yet, or do not fit the live generation.
        """
        parts = self.readiness.parts
        if self._service is None or self._service.parts is not parts:  # the first request, or of a new generation
            if self._service is not None:
                self._service.tail.stop()
            self._service = Service.of(self.settings, parts, self.pools, self.telemetry)
            self._service.tail.start()
        return self._service

    def start(self) -> None:
        """Follow the live generation, where the parts know which that is."""
        if self.readiness.built is not None and self.readiness.built.generations is not None:
            self._following = Following(self.settings, self.readiness, self.readiness.built.generations)
            self._follow = asyncio.create_task(self._following.watch(self.pools.probes))

    async def stop(self) -> None:
        """End what runs beside the requests."""
        if self._follow is not None:
            self._follow.cancel()
            with suppress(asyncio.CancelledError):
                await self._follow
        if self._service is not None:
            await asyncio.to_thread(self._service.tail.close)
        if self._following is not None:
            await asyncio.to_thread(self._following.close)


async def whole(events: AsyncGenerator[Event, None]) -> AnswerResponse:
    """Read the events to their end and keep the answer."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Done):
                return event.response
    raise AssertionError("the events of an answer end with Done")
