"""Whether questions can be answered yet, and if not, why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

from schemas.errors import KvquiltError, StoreError
from serve import threads
from serve.errors import NotReadyError
from serve.parts import Parts

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
LOADING = "the model is being loaded"
LOOKING = "it is being looked up which generation is live"
_log = logging.getLogger("kvquilt.serve")


class Readiness:
    """Holds the parts once they are there, and checks that what they depend on answers.

    Attributes:
        failure: why the parts cannot be built, once it is certain that trying again will not help.
        refusal: why the parts may not be used now: they do not fit the live generation.
    """

    def __init__(self) -> None:
        self._parts: Parts | None = None
        self._reason = LOADING
        self.failure: KvquiltError | None = None
        self.refusal: str | None = None

    @property
    def built(self) -> Parts | None:
        """The parts, whether they may be used or not; None: they are not there yet."""
        return self._parts

    @property
    def parts(self) -> Parts:
        """The parts.

        Raises:
            NotReadyError: they are not there yet, or may not be used, with the reason.
        """
        if self._parts is None:
            raise NotReadyError(self._reason)
        if self.refusal is not None:
            raise NotReadyError(self.refusal)
        return self._parts

    def adopt(self, parts: Parts) -> None:
        """Use these parts from the next request on."""
        self._parts, self.refusal = parts, None

    async def build(self, make: Callable[[], Parts], pool: Executor) -> Parts:
        """Build the parts in a thread; while a store is down, try again with growing pauses.

        Raises:
            KvquiltError: something is wrong that will not pass; `failure` and the reason say what.
        """
        pause_s = FIRST_RETRY_S
        while True:
            try:
                built = await threads.call(pool, make)
            except StoreError as error:
                self._reason = f"an outside system did not answer: {error}; trying again"
                _log.warning("%s in %.0f s", self._reason, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            except KvquiltError as error:
                self.failure, self._reason = error, str(error)
                raise
            except Exception as error:
                self._reason = f"loading failed ({type(error).__name__}); the log has it"
                raise
            else:
                self.refusal = LOOKING if built.generations is not None else None
                self._parts = built
                return built

    async def check(self, pool: Executor) -> None:
        """Ask the index and the object store, and compare generations.

        Raises:
            NotReadyError: with the reason.
        """
        await threads.call(pool, _check, self.parts)


def _check(parts: Parts) -> None:
    if parts.model.fingerprint.digest != parts.generation.fingerprint.digest:
        raise NotReadyError(
            f"generation {parts.generation.name} was made by another model than {parts.model.fingerprint.model!r} as "
            "it is loaded; restart the service with the settings that ingest has"
        )
    if parts.kv.generation != parts.generation.name or parts.generation.name not in parts.index.collection:
        raise NotReadyError(
            f"the settings name generation {parts.generation.name}; KV store and index were opened for "
            f"{parts.kv.generation} and {parts.index.collection}"
        )
    try:
        parts.index.ready()
    except StoreError as error:  # the service never creates an index: an empty new one would hide a mismatch
        raise NotReadyError(
            f"no index of generation {parts.generation.name} answers: {error}. It exists once `ingest index` has run "
            "with the same embedder, model and chunker"
        ) from error
    try:
        parts.blobs.ready()
    except StoreError as error:
        raise NotReadyError(f"the object store does not answer: {error}") from error
