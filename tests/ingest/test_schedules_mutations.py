"""The audit of the schedules must be able to fail: broken stores and steps, each caught as what it breaks."""

import logging
from typing import ClassVar

import pytest

from bench.chaos.audit import Kind
from ingest.chunking import Chunker
from ingest.fakes import DIM, WordTokenizer
from ingest.prefill import confirm
from stores.vectors import VectorIndex
from tests.ingest.schedules_make import Schedule, judged
from tests.ingest.schedules_world import ScheduleWorld

ENOUGH = 200  # schedules; each of these is caught far earlier
ZOMBIES = 3  # every third schedule: what only matters while two processes do the same is looked for there


class Passing:
    """A store that does as the one below it."""

    def __init__(self, below):
        self._below = below
        self.url, self.place, self.local = (getattr(below, name, None) for name in ("url", "place", "local"))

    def __getattr__(self, name):
        return getattr(self._below, name)


class NoCompareAndSet(Passing):
    def call(self, method, **arguments):
        return self._below.call(method, **arguments | ({"update_filter": None} if "update_filter" in arguments else {}))


class WithoutCompareAndSet(ScheduleWorld):
    """A Qdrant that is too old ignores the condition of an upsert without a word."""

    def make_qdrant(self, qdrant):
        return NoCompareAndSet(qdrant)


class TombstonesExpire(Passing):
    """Keeps a deleted head until the next head is written."""

    deleted = ()

    def call(self, method, **arguments):
        collection = arguments.get("collection_name", "")
        if method == "upsert" and collection.endswith("_heads"):
            if self.deleted:
                self._below.call("delete", collection_name=collection, points_selector=list(self.deleted))
            self.deleted = [point.id for point in arguments["points"] if point.payload["state"] == "deleted"]
        return self._below.call(method, **arguments)


class WithExpiringTombstones(ScheduleWorld):
    def make_qdrant(self, qdrant):
        return TombstonesExpire(qdrant)


class Fickle(Chunker):
    """Cuts otherwise each time: ids that depend on more than document, version and place (haystack#1116)."""

    times: ClassVar = []

    def chunks(self, event):
        self.times.append(event)
        return Chunker(self.tokenizer, (16, 9)[len(self.times) % 2]).chunks(event)


class WithFickleChunker(ScheduleWorld):
    def make_chunker(self):
        return Fickle(WordTokenizer(), 16)


class HeadsOnce(VectorIndex):
    """Remembers heads."""

    def heads(self, documents):
        self.known = getattr(self, "known", {})
        unknown = [document for document in documents if document not in self.known]
        self.known |= super().heads(unknown)
        return {document: self.known[document] for document in documents if document in self.known}


class WithHeadsFromACache(ScheduleWorld):
    """A time-to-live on what is visible (messkan/prompt-cache#8)."""

    def make_index(self, qdrant, actor):
        if actor != "question":
            return super().make_index(qdrant, actor)
        return HeadsOnce(qdrant, self.name, DIM)


class WithoutConfirm(ScheduleWorld):
    """A PREFILL that does not read the head again after its put: a late one outlives its document."""

    def __init__(self, neighbours=0):
        super().__init__(neighbours)
        self.prefill_steps = tuple(step for step in self.prefill_steps if step is not confirm)


class KeepsObjects(Passing):
    def delete(self, keys):
        return len(list(keys))


class WithAStoreThatKeepsObjects(ScheduleWorld):
    def make_blobs(self, blobs):
        return KeepsObjects(blobs)


class SeesNoOldPoints(VectorIndex):
    def stale_chunk_ids(self, document, below_version):
        return []


class WithARecountThatFindsNothing(ScheduleWorld):
    """A receipt that says COMPLETE because it did not look."""

    def make_index(self, qdrant, actor):
        if actor == "audit":
            return super().make_index(qdrant, actor)
        return SeesNoOldPoints(qdrant, self.name, DIM)


@pytest.mark.parametrize(
    ("world", "kind", "says", "step"),
    [
        (WithoutCompareAndSet, Kind.LOST, "it ends in version", ZOMBIES),
        (WithFickleChunker, Kind.DUPLICATE, "beyond its", 1),
        (WithHeadsFromACache, Kind.STALE, "an answer used version", 1),
        (WithoutConfirm, Kind.ORPHAN, "that no live point names", ZOMBIES),
        (WithAStoreThatKeepsObjects, Kind.ORPHAN, "that no live point names", 1),
        (WithExpiringTombstones, Kind.RESURRECTED, "is live", 1),
        (WithARecountThatFindsNothing, Kind.RECEIPT, "says COMPLETE, left are", 1),
    ],
)
def test_what_is_broken_is_caught_as_what_it_breaks(world, kind, says, step):
    """An audit that has never failed may be one that cannot."""
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(0, ENOUGH * step, step):
            if Schedule.of(seed).neighbours and world is WithoutConfirm:
                continue  # without it nothing is fused either
            try:
                faults, _ = judged(seed, world)
            except AssertionError:  # a broken store may keep the pipelines from getting through
                continue
            if any(fault.kind is kind and says in fault.what for fault in faults):
                return
        pytest.fail(f"{world.__name__}: {ENOUGH} schedules, and no {kind} that {says!r}")
    finally:
        logging.disable(logging.NOTSET)
