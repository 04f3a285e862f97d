"""Reclaiming a generation that is not used any more: its collections, KV artifacts, open receipts, certificates.

    record: RECLAIMING   nobody may begin to use it
    leases looked at     a reader: the record as it was
    collections, objects deleted
    record: gone

Each step can be done again, and what was begun is finished by the next run. Who claims a generation writes his lease
first and reads the record then, so one of the two sees the other.

Complete receipts stay: they prove deletions, and speak of no content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from schemas.generations import GenerationState, KnownGeneration
from stores.generations import GenerationStore
from stores.receipts import Receipts
from stores.vectors import VectorIndex


@dataclass(frozen=True)
class Reclaimed:
    """What became of one generation.

    Attributes:
        kept: why it is still there; empty where it is gone, or would be in a dry run.
        collections, objects, parts: how much was deleted: Qdrant collections; KV artifacts and certificates; parts of
            receipts that were never closed.
    """

    generation: str
    kept: str = ""
    collections: int = 0
    objects: int = 0
    parts: int = 0


def reclaim(
    store: GenerationStore,
    open_index: Callable[[KnownGeneration], VectorIndex],
    *,
    grace_s: float,
    dry_run: bool = False,
) -> list[Reclaimed]:
    """Look at every generation that is not live, and reclaim those that nobody holds and whose grace is over.

    Args:
        open_index: the index of a generation; closed here.
        grace_s: how long a generation is kept after its last change of state: time to roll back.

    Raises:
        StoreError: a store did not answer; what was begun is finished by the next run.
    """
    return [
        _one(store, open_index, entry, grace_s, dry_run)
        for entry in store.read().known
        if entry.state is not GenerationState.LIVE
    ]


def _one(
    store: GenerationStore,
    open_index: Callable[[KnownGeneration], VectorIndex],
    entry: KnownGeneration,
    grace_s: float,
    dry_run: bool,
) -> Reclaimed:
    begun = entry.state is GenerationState.RECLAIMING
    kept = _held(store, entry.name) or ("" if begun else _grace(store, entry, grace_s))
    if kept or dry_run:
        return Reclaimed(entry.name, kept)
    if not begun:
        now_ms = store.clock.now_ms()
        record = store.change(lambda now: now.reclaiming(entry.name, now_ms) if now.get(entry.name) == entry else now)
        marked = record.get(entry.name)
        if marked is None or marked.state is not GenerationState.RECLAIMING:
            return Reclaimed(entry.name, "its state changed meanwhile")
        kept = _held(store, entry.name)
        if kept:  # it came between
            store.change(lambda now: now.spared(entry))
            return Reclaimed(entry.name, kept)
    with open_index(entry) as index:
        collections = index.drop()
    folders = (f"kv/{entry.name}", f"certificates/{entry.name}")
    objects = 0
    for folder in folders:
        store.blobs.sweep(folder)
        objects += store.blobs.delete([path for path, _ in store.blobs.list(folder)])
    parts = [name.path for name in Receipts(store.blobs).all() if name.generation == entry.name and name.stage]
    n_parts = store.blobs.delete(parts)
    store.leases.forget(entry.name)
    store.change(lambda now: now.without(entry.name) if now.get(entry.name) else now)
    return Reclaimed(entry.name, "", collections, objects, n_parts)


def _held(store: GenerationStore, name: str) -> str:
    holders = ", ".join(f"{lease.role} of {lease.holder}" for lease in store.leases.held(name))
    return f"in use by {holders}" if holders else ""


def _grace(store: GenerationStore, entry: KnownGeneration, grace_s: float) -> str:
    left_s = grace_s - (store.clock.now_ms() - entry.since_ms) / 1000
    return f"{entry.state} for less than its grace; {left_s:.0f} s are left" if left_s > 0 else ""
