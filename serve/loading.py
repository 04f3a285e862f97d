"""KV artifacts, concurrently and against the clock. What does not come in time or whole makes its chunk fresh."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from schemas.chunk import IndexedChunk
from schemas.errors import ArtifactMiss, MissReason, StoreError
from schemas.kv_artifact import KvArtifact
from schemas.receipt import Tier
from serve.forms import Form, Wanted
from serve.patience import Patience
from serve.telemetry import OBJECT, Telemetry
from serve.tiers import Tiers
from stores import KvStore
from stores.tiers import Name, Owner

LOAD_THREADS = 8
_Pins = list[tuple[Name, KvArtifact]]
_Result = KvArtifact | MissReason


@dataclass(frozen=True)
class Loaded:
    """What came of one request's loads.

    Attributes:
        artifacts: one per chunk, in their order; `None` where the chunk has to be computed fresh.
        fused: whether those are fused artifacts.
        fallback: reason -> chunks; `neighbour`, and any reason of a chunk that has an artifact, stand for rows of pass
            1 in place of fused ones.
        tiers: tier -> chunks whose artifact came from it.
        release: to be called when the artifacts are not needed any more; until then they stay in their tier.
    """

    artifacts: list[KvArtifact | None] = field(default_factory=list)
    fused: list[bool] = field(default_factory=list)
    fallback: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Wait:
    """Until when a request waits, on the monotonic clock.

    Attributes:
        longest_s: for what was fused, which cannot be computed here.
        worth_s: for the rest, no longer than computing it would take; None: not at all.
    """

    longest_s: float
    worth_s: float | None

    def until_s(self, form: Form) -> float | None:
        """For one form of a chunk."""
        return self.longest_s if form.neighbours else self.worth_s


@dataclass
class _Flight:
    result: Future[_Result]
    waiters: int = 0


class KvLoader:
    """Loads the artifacts of a request's chunks from memory or, once however many wait for one, from the store.

    A fetch that no longer has a waiter is dropped if it has not started. One that runs goes on, and is joined by
    whoever asks next: a hung store is asked once per artifact, not once per request.

    Used on one event loop.

    Args:
        store: where the artifacts are.
        tiers: what is kept of them in memory.
        fingerprint: digest of the fingerprint in use.
        pool: threads for the fetches; as many run at a time.
        patience: how long a request waits for all its artifacts.
    """

    def __init__(
        self, store: KvStore, tiers: Tiers, fingerprint: str, pool: Executor, patience: Patience, telemetry: Telemetry
    ) -> None:
        self._store, self._tiers, self._fingerprint, self._pool = store, tiers, fingerprint, pool
        self._patience, self._telemetry = patience, telemetry
        self._flights: dict[Name, _Flight] = {}

    async def load(self, chunks: Sequence[Wanted]) -> Loaded:
        """Load what exists. Never raises for a missing, late or damaged artifact.

        Its chunk is counted, and served by its next form, or fresh.
        """
        wait, pins, tiers = self._wait(chunks), _Pins(), Counter[str]()

        def release() -> None:
            while pins:
                self._tiers.host.unpin(*pins.pop())

        tasks = [asyncio.ensure_future(self._first_of(chunk, wait, pins, tiers)) for chunk in chunks]
        try:
            results = await asyncio.gather(*tasks)
        except BaseException:
            release()
            raise
        finally:
            for task in tasks:
                task.cancel()
        fallback = Counter(str(reason) for _, reason in results if reason is not None)
        self._telemetry.missed(fallback)
        artifacts = [artifact for artifact, _ in results]
        fused = [artifact is not None and bool(artifact.header.neighbours) for artifact in artifacts]
        self._tiers.looked_up(Tier.HOST, tiers[Tier.HOST], len(chunks) - tiers[Tier.HOST])
        return Loaded(artifacts, fused, dict(fallback), dict(tiers), release)

    def _wait(self, chunks: Sequence[Wanted]) -> _Wait:
        """For a request that begins now."""
        sizes = [  # of what can be computed, if only for want of a better form
            len(one.chunk.chunk.token_ids)
            for one in chunks
            if one.chunk.kv_ready and not any(_name(one, form) in self._tiers.host for form in one.forms)
        ]
        now_s, worth_s = time.monotonic(), self._patience.for_chunks(sizes)
        return _Wait(now_s + self._patience.timeout_s, now_s + worth_s if worth_s else None)

    async def _first_of(
        self, wanted: Wanted, wait: _Wait, pins: _Pins, tiers: Counter[str]
    ) -> tuple[KvArtifact | None, MissReason | None]:
        """The first form that is there, and why it is not a better one."""
        reason = wanted.passed_over
        for form in wanted.forms:
            name = _name(wanted, form)
            kept = self._tiers.host.pin(name)
            result = kept or await self._one(name, wanted.chunk, form, wait)
            if isinstance(result, KvArtifact):
                tiers[OBJECT if kept is None else Tier.HOST] += 1
                kept = kept or self._tiers.host.pin(name)  # what was just read stays while it is used, too
                if kept is not None:
                    pins.append((name, kept))
                return result, reason
            reason = result
        return None, reason

    async def _one(self, name: Name, chunk: IndexedChunk, form: Form, wait: _Wait) -> _Result:
        if not chunk.kv_ready:  # ingest has not confirmed it: asking the store would only cost time
            return MissReason.MISSING
        flight = self._flights.get(name)
        until_s = wait.until_s(form)
        if until_s is None:
            if flight is None and len(self._flights) < LOAD_THREADS:
                self._take_off(name, chunk, form)  # for the next question
            return MissReason.SLOWER
        if flight is None:
            flight = self._take_off(name, chunk, form)
        flight.waiters += 1
        try:
            # shielded: the others' wait must not end with this one's
            waited = asyncio.shield(asyncio.wrap_future(flight.result))
            with self._telemetry.kv_waiters.track_inprogress():
                return await asyncio.wait_for(waited, max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            return MissReason.TIMEOUT if until_s == wait.longest_s else MissReason.SLOWER
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                flight.result.cancel()  # of effect only where it has not started

    def _take_off(self, name: Name, chunk: IndexedChunk, form: Form) -> _Flight:
        flight = self._flights[name] = _Flight(self._pool.submit(self._fetch, name, chunk, form))
        # also for a fetch whose waiters have all left: its rows must not stay in memory
        flight.result.add_done_callback(lambda _: self._flights.pop(name, None))
        return flight

    def _fetch(self, name: Name, chunk: IndexedChunk, form: Form) -> _Result:
        started_s = time.perf_counter()
        try:
            artifact = self._store.get(
                chunk.chunk.document,
                form.kv_key,
                fingerprint=self._fingerprint,
                token_sha256=chunk.chunk.token_digest,
                neighbours=form.neighbours,
            )
        except ArtifactMiss as miss:
            return miss.reason
        except StoreError:
            return MissReason.STORE
        seconds = time.perf_counter() - started_s
        self._telemetry.loaded(artifact.nbytes, seconds)
        self._patience.loaded(seconds)
        self._tiers.keep(name, artifact, _owners(chunk, form), seconds)
        return artifact


def _name(wanted: Wanted, form: Form) -> Name:
    return Name(wanted.chunk.chunk.document, wanted.chunk.chunk.version, form.kv_key)


def _owners(chunk: IndexedChunk, form: Form) -> tuple[Owner, ...]:
    """The versions of documents that speak through an artifact: its own, and those that it was fused with."""
    own = chunk.chunk.document, chunk.chunk.version
    if not form.neighbours or chunk.fusion is None:
        return (own,)
    return tuple(dict.fromkeys([own, *((one.document, one.version) for one in chunk.fusion.neighbours)]))
