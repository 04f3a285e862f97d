"""Reindex: a new generation built beside the live one, which goes on being fed and served.

    registered -> deletions of the live one carried over -> the source, if there is one -> both topics, by the new
    generation's own consumer groups, from their beginning to where they ended when it was looked -> built

The topics are read by the streaming pipelines themselves. So what comes meanwhile reaches both generations, each by its
own groups; a run that was interrupted goes on where it was; and once it is built, `ingest index` and `ingest prefill`
with the new settings go on from there. Offsets only say where to go on, so gaps that compaction left do no harm.

A source (files, folders) is for a topic that has forgotten; it is read first, and the topics after it, whole: versions
decide, not the order of reading.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ingest.backfill import BackfillProgress, run_backfill
from ingest.connect import ConnectStores, connected
from ingest.run import run_index, run_prefill
from ingest.siblings import carry_tombstones, stores_beside
from ingest.sources import Source
from ingest.switching import open_generations
from schemas.errors import InputError, KvquiltError, TopicError, UnsupportedModelError
from schemas.fingerprint import Generation
from schemas.generations import KnownGeneration
from schemas.settings import KafkaSettings, Settings
from stores.gaps import Gap, compare
from stores.generations import GenerationStore
from stores.topics import PartitionReader, ensure_topics

LOOK_S = 1.0
_SILENT_POLLS = 60  # of half a second

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReindexProgress:
    """Offsets that are still to be read, of those that there were; None: that topic's turn has not come."""

    index_left: int | None = None
    index_total: int | None = None
    prefill_left: int | None = None
    prefill_total: int | None = None


@dataclass(frozen=True)
class Reindexed:
    """What a reindex came to.

    Attributes:
        built: everything that was in the source and the topics is in the generation; False where it was stopped.
        gap: what it lacks of the live one, by their heads; None where it was stopped.
    """

    generation: str
    built: bool
    carried: int = 0
    gap: Gap | None = None


def run_reindex(
    settings: Settings,
    stop: threading.Event,
    *,
    source: Source | None = None,
    follow: bool = False,
    progress: Callable[[ReindexProgress], None] = lambda now: None,
    backfilled: Callable[[BackfillProgress], None] | None = None,
    on_built: Callable[[Reindexed], None] = lambda done: None,
) -> Reindexed:
    """Build the generation of `settings` beside the live one; returns when it is built, or when `stop` was set.

    Args:
        source: read before the topics.
        follow: go on feeding it until `stop` is set.
        progress, backfilled: told how far it is.
        on_built: told once, when it is built.

    Raises:
        InputError: nothing is live yet, or the settings make the live generation.
        StoreError: an outside system kept failing. Run it again: it goes on where it was.
        UnsupportedModelError: a model cannot be used.
    """
    generations = open_generations(settings)
    ensure_topics(settings.kafka)
    live, entry = _register(settings, generations)
    stores = ConnectStores(settings)
    with connected(stores), stores_beside(stores(), live) as old:
        new = stores()
        carried = carry_tombstones(old, new)
        if source is not None:
            run_backfill(settings, source, backfilled)
        with _fed(settings, entry) as feeding:
            if not _caught_up(new.settings.kafka, feeding, stop, progress):
                return Reindexed(entry.name, built=False, carried=carried)
            carried += carry_tombstones(old, new)
            generations.change(lambda now: now.built(entry.name, generations.clock.now_ms()))
            done = Reindexed(entry.name, True, carried, compare(old.index, new.index))
            on_built(done)
            while follow and not stop.wait(LOOK_S):
                feeding.check()
    return done


def _register(settings: Settings, generations: GenerationStore) -> tuple[KnownGeneration, KnownGeneration]:
    """The live generation and the new one. Its collections are made first: whoever sees it in the record finds them."""
    from engine import resolve_generation
    from stores.vectors import open_index

    generation = resolve_generation(settings).generation
    live = _live(generations, generation)
    with open_index(settings.qdrant, settings.qdrant_location, generation.name, generation.embedding_dim) as index:
        index.ensure()
    record = generations.change(lambda now: now.add(generation, settings, generations.clock.now_ms()))
    entry = record.get(generation.name)
    assert entry is not None
    return live, entry


def _live(generations: GenerationStore, generation: Generation) -> KnownGeneration:
    record = generations.read()
    if record.live is None:
        raise InputError(
            "no generation is live, so there is nothing to build another one beside; start the ingest with these "
            "settings: the first generation is live at once"
        )
    if record.live.name == generation.name:
        raise InputError(
            f"these settings make generation {generation.name}, which is live; a new one needs another embedder, "
            "chunker, model, prompt or prefill variant (--set chunker.max_tokens=…)"
        )
    if record.get(generation.name) is not None:
        record.admit(generation)
    return record.live


class _Feeding:
    """Both streaming pipelines of a generation, in threads."""

    def __init__(self, index: Future[None], prefill: Future[None]) -> None:
        self._index, self._prefill = index, prefill

    @property
    def without_kv(self) -> bool:
        """Whether the model has no reuse, so that there is no KV to wait for."""
        return self._prefill.done() and isinstance(self._prefill.exception(), UnsupportedModelError)

    def check(self) -> None:
        """Raise what ended a pipeline."""
        for future in (self._index, self._prefill):
            if future.done() and not (future is self._prefill and self.without_kv):
                future.result()
                raise KvquiltError("a pipeline ended before it was asked to")


@contextmanager
def _fed(settings: Settings, entry: KnownGeneration) -> Iterator[_Feeding]:
    drain = threading.Event()
    with ThreadPoolExecutor(2, "reindex") as pool:
        index = pool.submit(run_index, settings, drain, None, entry.name)
        prefill = pool.submit(run_prefill, settings, drain, None, entry.name)
        try:
            yield _Feeding(index, prefill)
        finally:
            drain.set()


def _caught_up(
    kafka: KafkaSettings, feeding: _Feeding, stop: threading.Event, progress: Callable[[ReindexProgress], None]
) -> bool:
    """Wait until INDEX, then PREFILL, has done what its topic held when it was its turn; False: stopped."""
    index_total = 0

    def index(left: int, total: int) -> None:
        nonlocal index_total
        index_total = total
        progress(ReindexProgress(left, total))

    def prefill(left: int, total: int) -> None:
        progress(ReindexProgress(0, index_total, left, total))

    for name, topic, tell in (("index", kafka.documents_topic, index), ("prefill", kafka.commits_topic, prefill)):
        if not _passed(kafka, kafka.group_of(name), topic, feeding, stop, tell, needed=name == "index"):
            return False
    return True


def _passed(
    kafka: KafkaSettings,
    group: str,
    topic: str,
    feeding: _Feeding,
    stop: threading.Event,
    tell: Callable[[int, int], None],
    *,
    needed: bool,
) -> bool:
    ends = _ends(kafka, topic)
    total = _left(kafka, group, topic, ends)
    left = total
    while left and (needed or not feeding.without_kv):
        tell(left, total)
        feeding.check()
        if stop.wait(LOOK_S):
            return False
        left = _left(kafka, group, topic, ends)
    tell(left, total)
    return not stop.is_set()


def _left(kafka: KafkaSettings, group: str, topic: str, ends: Mapping[int, int]) -> int:
    with PartitionReader(kafka, topic, group) as reader:
        at = reader.position()
    return sum(max(0, end - at.get(partition, 0)) for partition, end in ends.items())


def _ends(kafka: KafkaSettings, topic: str) -> dict[int, int]:
    with PartitionReader(kafka, topic) as reader:
        for _ in range(_SILENT_POLLS):
            reader.poll(1, 0.5)
            ends = {partition: end for partition, end in reader.highwater().items() if end is not None}
            if len(ends) == len(reader.partitions):
                return ends
    raise TopicError(f"topic {topic}: the broker did not tell where it ends; is it up?")
