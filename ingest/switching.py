"""Which generation is live: `promote` and `rollback`. Vectors and KV change places by one write of the record.

Before it, the heads of both generations are compared document by document. What is on its way may arrive: so what
differs is looked at again for a while. A generation that is not caught up is refused, or promoted by force; then the
result says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ingest.parts import Stores
from ingest.siblings import carry_tombstones
from schemas.errors import InputError
from schemas.generations import Generations, GenerationState, KnownGeneration
from schemas.settings import Settings
from stores.gaps import Gap, compare, compare_again
from stores.generations import GenerationStore

_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True)
class Switched:
    """What was live, what is, and what that one lacked when it was compared."""

    before: str
    live: str
    gap: Gap


def open_generations(settings: Settings) -> GenerationStore:
    """The record of the object store that the settings name.

    Raises:
        BlobError: it cannot be used.
    """
    from stores.blobs import open_blobs

    blobs = open_blobs(settings.blobs_url, settings.blobs.options)
    blobs.ready()
    return GenerationStore(blobs, lease_s=settings.generations.lease_s)


@contextmanager
def open_stores(settings: Settings, generations: GenerationStore, entry: KnownGeneration) -> Iterator[Stores]:
    """The stores of any generation of the record, without a model and without a claim.

    Raises:
        StoreError: they cannot be used.
        InputError: the generation has no index: its building was interrupted before it had one.
    """
    from stores.kv_store import KvStore
    from stores.topics import Publisher
    from stores.vectors import open_index

    name = entry.name
    with open_index(settings.qdrant, settings.qdrant_location, name, entry.generation.embedding_dim) as index:
        if not index.exists():
            raise InputError(f"generation {name} has no index yet; run `kvquilt reindex` with its settings again")
        kv = KvStore(generations.blobs, name)
        publisher = Publisher(settings.kafka)  # connects when it is used, which is not here
        yield Stores(entry.bind(settings), entry.generation, index, kv, publisher, generations.clock, generations)


def candidate(record: Generations) -> KnownGeneration:
    """What `promote` means where it is told no name: the one generation that was built and never was live.

    Raises:
        InputError: there is none, or there are several.
    """
    wanted = (GenerationState.BUILT, GenerationState.BUILDING)
    found = [one for one in record.known if one.state in wanted]
    if len(found) != 1:
        have = ", ".join(one.name for one in found) or "none"
        raise InputError(f"name the generation to promote; there are {len(found)} that were built ({have})")
    return found[0]


def promote(
    settings: Settings, generations: GenerationStore, target: KnownGeneration, *, force: bool, wait_s: float
) -> Switched:
    """Make `target` live, and what is live stand by.

    Args:
        force: also where it is not caught up.
        wait_s: how long what is on its way is waited for.

    Raises:
        InputError: it is live, is not caught up, or another one became live meanwhile.
        StoreError: a store did not answer; the record is as it was, or switched: `kvquilt generations` shows it.
    """
    live = generations.read().live
    if live is None or live.name == target.name:
        raise InputError(f"generation {target.name} is live" if live else "no generation is live; run the ingest first")
    with open_stores(settings, generations, live) as old, open_stores(settings, generations, target) as new:
        gap = _gap(old, new, 0.0 if force else wait_s)
    if gap and not force:
        raise InputError(
            f"generation {target.name} is not caught up with the live one: {gap}. Feed it: `kvquilt ingest index` and "
            "`ingest prefill` with its settings, or `kvquilt reindex`; --force takes it as it is"
        )

    def switch(now: Generations) -> Generations:
        if now.live is None or now.live.name != live.name:
            raise InputError("another generation became live meanwhile; `kvquilt generations` shows which")
        return now.promote(target.name, generations.clock.now_ms())

    generations.change(switch)
    return Switched(live.name, target.name, gap)


def _gap(old: Stores, new: Stores, wait_s: float) -> Gap:
    carry_tombstones(old, new)
    gap = compare(old.index, new.index)
    end_ms = new.clock.now_ms() + wait_s * 1000
    while gap and new.clock.now_ms() < end_ms:
        new.clock.sleep(_LOOK_AGAIN_S)
        gap = compare_again(old.index, new.index, gap)
    return gap
