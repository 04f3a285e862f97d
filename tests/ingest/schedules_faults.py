"""Deeds at store calls: every call of every store that an actor makes can be its last, fail, lie, or take so long that
something else happens meanwhile. One level below `stores.fakes.with_faults`: Qdrant's and the object store's own calls,
so also in the middle of what the product's classes make of several of them (a flip and its reading back, a search and
the heads that are read for it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import BlobError, TopicError, VectorIndexError
from stores.fakes import SimulatedCrash

CRASH, CRASH_AFTER, ERROR, NO_REPLY, TORN, MEANWHILE = "crash", "crash after", "error", "no reply", "torn", "meanwhile"
BLOB_CALLS = ("put_new", "get", "view", "get_range", "size", "list", "delete", "sweep", "staged")
TOPIC_CALLS = ("publish", "publish_many", "dead_letter")

# Every call that has an effect, and the reads that a decision hangs on, by actor.
CALLS = {
    "index": (
        *("heads.retrieve", "heads.upsert", "chunks.upsert", "chunks.scroll", "chunks.count", "chunks.delete"),
        *("list", "delete", "staged", "put_new", "get", "publish_many"),
    ),
    "prefill": (
        *("heads.retrieve", "chunks.scroll", "chunks.retrieve", "chunks.set_payload", "chunks.delete"),
        *("list", "delete", "staged", "put_new", "view", "get", "publish_many", "chunks.query_points"),
    ),
    "question": ("heads.retrieve", "chunks.query_points", "view"),
    "reconcile": (
        *("heads.retrieve", "heads.scroll", "chunks.scroll", "chunks.delete"),
        *("list", "delete", "get", "put_new"),
    ),
}


@dataclass(frozen=True)
class Deed:
    """What happens at a call.

    Attributes:
        kind: the process dies before the call or after its effect; the call fails before or after its effect; a write
            leaves half of itself and fails; or something else happens first.
        meanwhile: that.
    """

    kind: str
    meanwhile: Callable[[], None] | None = None


@dataclass
class Strand:
    """One run of an actor: counts its store calls by name and does what is due at them.

    Attributes:
        deeds: by the name of a call and which of that name it is, from 1.
        done: `(actor, call, kind)` of deeds that were done.
    """

    actor: str
    deeds: Mapping[tuple[str, int], Deed]
    done: Counter[tuple[str, str, str]]
    calls: Counter[str] = field(default_factory=Counter)

    def call(self, name: str, effect: Callable[[], Any], error: type[Exception], torn: Callable[[], None]) -> Any:
        """Make the call, or what the deed makes of it."""
        self.calls[name] += 1
        deed = self.deeds.get((name, self.calls[name]))
        if deed is None:
            return effect()
        self.done[self.actor, name, deed.kind] += 1
        if deed.kind == CRASH:
            raise SimulatedCrash
        if deed.kind == ERROR:
            raise error(f"{name}: refused")
        if deed.kind == TORN:
            self.deeds = {}  # stores write whole: one that tears a write for a process that dies is beyond the promise
            torn()
            raise error(f"{name}: torn")
        if deed.kind == MEANWHILE:
            assert deed.meanwhile is not None
            deed.meanwhile()
            return effect()
        result = effect()
        if deed.kind == CRASH_AFTER:
            raise SimulatedCrash
        if deed.kind == NO_REPLY:
            raise error(f"{name}: timed out, and had its effect")
        return result


@dataclass
class Actor:
    """A pipeline, a question or reconcile, with stores of its own over the shared ones. Runs may be nested."""

    name: str
    strand: Strand = field(init=False)

    def __post_init__(self) -> None:
        self.strand = Strand(self.name, {}, Counter())


class WiredQdrant:
    """A `Connection` whose calls are an actor's."""

    def __init__(self, connection: Any, actor: Actor) -> None:
        self._connection, self._actor = connection, actor
        self.place, self.local = connection.place, connection.local

    def call(self, method: str, **arguments: Any) -> Any:
        name = f"{arguments.get('collection_name', '').rpartition('_')[2]}.{method}"
        run = lambda: self._connection.call(method, **arguments)  # noqa: E731
        return self._actor.strand.call(name, run, VectorIndexError, lambda: None)

    def close(self) -> None:
        """The connection is the world's."""


class WiredBlobs:
    """`Blobs` whose calls are an actor's. A torn write leaves half of an artifact, as no store of ours should."""

    def __init__(self, blobs: Any, actor: Actor) -> None:
        self._blobs, self._actor = blobs, actor
        self.url = blobs.url

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._blobs, name)
        if name not in BLOB_CALLS:
            return found

        def call(*arguments: Any) -> Any:
            def torn() -> None:
                if name == "put_new" and arguments[0].endswith(".safetensors"):
                    found(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])

            run = lambda: found(*arguments)  # noqa: E731
            return self._actor.strand.call(name, run, BlobError, torn)

        return call


class WiredPublisher:
    """A publisher whose calls are an actor's."""

    def __init__(self, publisher: Any, actor: Actor) -> None:
        self._publisher, self._actor = publisher, actor

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._publisher, name)
        if name not in TOPIC_CALLS:
            return found

        def call(*arguments: Any) -> Any:
            run = lambda: found(*arguments)  # noqa: E731
            return self._actor.strand.call(name, run, TopicError, lambda: None)

        return call
