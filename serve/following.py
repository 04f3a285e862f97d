"""A replica serves the generation that is live, and notices within seconds that another one is.

Where the model and the embedder that are loaded made the new one too (another chunker, prompt or prefill variant), the
replica goes over to it between two requests; answers that are under way end on the old one, whose lease runs out after
them. Where they did not, every request is refused with the reason, until the replica is restarted or the switch undone:
an answer from a generation that is no longer live could be stale.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from schemas.errors import KvquiltError, StoreError
from schemas.fingerprint import Generation
from schemas.settings import Settings
from serve import threads
from serve.parts import Parts
from serve.readiness import LOOKING, Readiness
from stores.generations import Claim, GenerationStore

_log = logging.getLogger("kvquilt.serve")


class Following:
    """Looks at the record again and again, and says to `readiness` which parts to use, or why none.

    While it uses a generation it holds a lease on it. Used by one thread at a time.
    """

    def __init__(self, settings: Settings, readiness: Readiness, generations: GenerationStore) -> None:
        self._settings, self._readiness, self._generations = settings, readiness, generations
        self._claim: Claim | None = None
        self._unfit: str | None = None  # the live generation that was refused: looking closer again would not help

    async def watch(self, pool: Executor) -> None:
        """Look, until cancelled. While the object store is away, what was found last holds."""
        while True:
            try:
                await threads.call(pool, self.look)
            except StoreError as error:
                _log.warning("which generation is live could not be looked up: %s", error)
                if self._readiness.refusal is not None and self._claim is None:
                    self._readiness.refusal = f"{LOOKING}; an outside system did not answer: {error}"
            except Exception:
                _log.exception("looking up which generation is live failed")
            await asyncio.sleep(self._settings.generations.check_s)

    def look(self) -> None:
        """Look once.

        Raises:
            StoreError: the object store did not answer; nothing is changed.
        """
        parts = self._readiness.built
        assert parts is not None
        live = self._generations.read().live
        if live is None:  # nothing was ever used: what these settings make is the first
            self._use(parts, parts.generation)
            return
        if live.name == parts.generation.name:
            self._use(parts, live.generation)
            return
        if live.name == self._unfit:
            return
        try:
            if parts.beside is None:
                raise KvquiltError(f"generation {live.name} is live, and this service has {parts.generation.name}")
            other = parts.beside(parts, live)
        except StoreError:
            raise
        except KvquiltError as error:
            self._unfit = live.name
            self._refuse(str(error))
            return
        self._use(other, live.generation)

    def close(self) -> None:
        """Give the lease back."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _use(self, parts: Parts, generation: Generation) -> None:
        if self._claim is None or self._claim.entry.name != generation.name:
            try:
                claim = self._generations.claim(generation, self._settings, "serve")
            except StoreError:
                raise
            except KvquiltError as error:  # it came to be reclaimed, or another one was the first
                self._refuse(str(error))
                return
            self._leave()
            self._claim, self._unfit = claim, None
        if self._readiness.refusal is not None or self._readiness.built is not parts:
            _log.info("serving generation %s", generation.name)
            self._readiness.adopt(parts)

    def _refuse(self, reason: str) -> None:
        if self._readiness.refusal != reason:
            _log.warning("questions are refused: %s", reason)
        self._readiness.refusal = reason
        self._leave()

    def _leave(self) -> None:
        if self._claim is not None:
            self._claim.expire()
            self._claim = None
