"""A world for schedules: the stores of `World`, shared by actors that each reach them through wires of their own."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache, partial

from bench.chaos import audit
from bench.chaos.truth import HeadLog, Truth
from ingest.batching import Waves
from ingest.chunking import Chunker
from ingest.fakes import DIM, FakeEmbedder, FakePrefiller, WordTokenizer, fake_generation
from ingest.formats import EventReader
from ingest.parts import IndexParts, PrefillParts, Stores
from ingest.pipeline import _LAST_STEPS, INDEX_STEPS, PREFILL_STEPS
from ingest.planning import parse
from ingest.prefill import in_passes, parse_record
from ingest.reconcile import Reconciler
from schemas.errors import ArtifactMiss, StoreError
from schemas.events import VERSION_HEADER, EventBody
from schemas.ids import DocumentKey
from schemas.receipt import Receipt
from schemas.settings import IngestSettings, KafkaSettings, PrefillSettings, QdrantSettings, Settings
from serve.forms import neighbours_visible
from stores.blobs import open_blobs
from stores.clock import MovableClock
from stores.fakes import SimulatedCrash
from stores.kv_store import KvStore
from stores.memory_topics import MemoryTopics
from stores.points import read_head
from stores.qdrant import connect
from stores.vectors import VectorIndex
from tests.ingest.schedules_faults import Actor, Strand, WiredBlobs, WiredPublisher, WiredQdrant

TENANT = "default"
ACTORS = ("index", "prefill", "question", "reconcile")
_worlds = itertools.count()


@cache
def shared_settings():
    """One for all worlds: making settings and a Qdrant client takes longer than a schedule."""
    return Settings(
        kafka=KafkaSettings(bootstrap="nowhere:1"),
        ingest=IngestSettings(batch_documents=8, batch_tokens=64, max_attempts=3, backoff_s=0.01),
        prefill=PrefillSettings(max_changes_per_day=32),
    )


@cache
def shared_qdrant():
    return connect(QdrantSettings(), ":memory:schedules")


class LoggedQdrant:
    """The store itself: notes every move of a head while nobody else can read it."""

    def __init__(self, connection, world):
        self._connection, self._world = connection, world
        self.place, self.local = connection.place, connection.local

    def call(self, method, **arguments):
        result = self._connection.call(method, **arguments)
        if method == "upsert" and arguments["collection_name"].endswith("_heads"):
            self._world.note_heads([str(point.id) for point in arguments["points"]])
        return result

    def close(self):
        pass


class LoggedBlobs:
    """The store itself: looks whether a complete receipt is true at the moment when it is written."""

    def __init__(self, blobs, world):
        self._blobs, self._world = blobs, world
        self.url = blobs.url

    def __getattr__(self, name):
        return getattr(self._blobs, name)

    def put_new(self, key, data):
        if key.startswith("receipts/") and key.count(".") == 2:
            self._world.check_receipt(bytes(data))
        return self._blobs.put_new(key, data)


class ScheduleWorld:
    """Stores, topics, actors, and what is known of them.

    Attributes:
        faults: what was found wrong while the schedule ran.
        done: deeds that were done.
        stays: the run of each pipeline that has the partitions.
        n_cut_off: how many runs died after another had taken the partitions over.
    """

    def __init__(self, neighbours=0):
        number = next(_worlds)
        self.settings, self.kafka = shared_settings(), shared_settings().kafka
        self.clock = MovableClock()
        self.topics = MemoryTopics(clock=self.clock)
        fused = {"prefill_variant": "fused", "neighbours": neighbours} if neighbours else {}
        self.generation = fake_generation(**fused)
        self.name = f"schedule{number}_{self.generation.name}"
        self.truth, self.log, self.faults, self.done = Truth(), HeadLog(), [], Counter()
        self.ticks, self.stays, self.n_cut_off = itertools.count(1), {}, 0
        self.qdrant = self.make_qdrant(LoggedQdrant(shared_qdrant(), self))
        self.blobs = self.make_blobs(LoggedBlobs(open_blobs(f"memory://schedule-{number}", {}), self))
        self.embedder, self.model = FakeEmbedder(), FakePrefiller()
        VectorIndex(shared_qdrant(), self.name, DIM).ensure()
        self.actors = {name: Actor(name) for name in ACTORS}
        publisher = self.topics.publisher()
        self.stores = Stores(**self.shared(self.make_index(self.qdrant, "audit"), self.blobs, publisher))
        wired = {
            name: self.shared(
                self.make_index(WiredQdrant(self.qdrant, actor), name),
                WiredBlobs(self.blobs, actor),
                WiredPublisher(publisher, actor),
            )
            for name, actor in self.actors.items()
        }
        self.index_parts = IndexParts(**wired["index"], embedder=self.embedder, chunker=self.make_chunker())
        self.prefill_parts = PrefillParts(
            **wired["prefill"], model=self.model, prefix_ids=(1, 2, 3), read_rows=lambda artifact: artifact
        )
        self.question_parts, self.reconcile_parts = Stores(**wired["question"]), Stores(**wired["reconcile"])
        self.index_steps, self.prefill_steps = INDEX_STEPS, PREFILL_STEPS

    def make_qdrant(self, qdrant):
        """Broken on purpose by the tests of the audit; as the next three."""
        return qdrant

    def make_blobs(self, blobs):
        return blobs

    def make_index(self, qdrant, actor):
        return VectorIndex(qdrant, self.name, DIM)

    def make_chunker(self):
        return Chunker(WordTokenizer(), self.generation.chunk_max_tokens)

    def shared(self, index, blobs, publisher):
        return {
            "settings": self.settings,
            "generation": self.generation,
            "index": index,
            "kv": KvStore(blobs, self.generation.name),
            "publisher": publisher,
            "clock": self.clock,
        }

    def publish(self, doc_id, version, content):
        """Write an event to the documents topic; a deletion where there is no content."""
        self.truth.publish(DocumentKey(TENANT, doc_id), version, content)
        self.clock.advance(1)
        headers = () if content is not None else ((VERSION_HEADER, str(version).encode()),)
        value = None if content is None else EventBody(content=content, version=version).to_bytes()
        self.topics.append(self.kafka.documents_topic, doc_id.encode(), value, headers)

    def run(self, actor, deeds, body):
        """Run an actor until it is done, dies or gives up; either way what it did not commit is read again."""
        outer, self.actors[actor].strand = self.actors[actor].strand, Strand(actor, deeds, self.done)
        try:
            body()
            return True
        except (SimulatedCrash, StoreError):
            return False
        finally:
            self.actors[actor].strand = outer

    def run_index(self, deeds=()):
        """INDEX over what its group has not committed, as its pipeline runs."""
        read = partial(parse, self.index_parts)
        return self.run("index", dict(deeds), lambda: self._pipeline("index", read, self._index))

    def run_prefill(self, deeds=()):
        """PREFILL, likewise."""
        return self.run("prefill", dict(deeds), lambda: self._pipeline("prefill", parse_record, self._prefill))

    def ask(self, text, deeds=(), k=4):
        """A question, as `serve.retrieve` and `serve.loading` go about it; whatever is stale about it is a fault."""
        return self.run("question", dict(deeds), lambda: self._ask(text, k))

    def reconcile(self, deeds=()):
        """One run of reconcile that waits for nobody."""
        return self.run("reconcile", dict(deeds), self._reconcile)

    def lag(self, pipeline):
        return self._reader(pipeline).lag()

    def drain(self):
        """Everything that was published is done, without further faults."""
        for _ in range(12):
            assert self.run_index(), "INDEX does not get through"
            assert self.run_prefill(), "PREFILL does not get through"
            if not (self.lag("index") or self.lag("prefill")):
                return
        raise AssertionError("the pipelines announce for ever")

    def audit(self):
        return audit.audit(self.stores, self.truth)

    def dead_letters(self):
        return self.topics.messages(self.kafka.dead_letter_topic)

    def note_heads(self, ids):
        for record in shared_qdrant().call("retrieve", collection_name=self.collection("heads"), ids=ids):
            self.log.note(read_head(record), next(self.ticks))

    def check_receipt(self, data):
        receipt = Receipt.from_bytes(data)
        self.faults += audit.untrue(self.stores, receipt.document, receipt.version)

    def close(self):
        for name in ("chunks", "heads"):
            shared_qdrant().call("delete_collection", collection_name=self.collection(name))

    def collection(self, name):
        return f"{self.name}_{name}"

    def _reader(self, pipeline):
        topic = self.kafka.documents_topic if pipeline == "index" else self.kafka.commits_topic
        return self.topics.reader(topic, self.kafka.group_of(pipeline))

    def _pipeline(self, name, parse_message, effects):
        reader, stay = self._reader(name), next(self.ticks)
        self.stays[name] = stay
        try:
            self._read_on(name, stay, reader, parse_message, effects)
        except BaseException:
            self.n_cut_off += self.stays[name] != stay
            raise

    def _read_on(self, name, stay, reader, parse_message, effects):
        while messages := reader.poll(self.settings.ingest.batch_documents, 0):
            waves = Waves()
            for message in messages:
                waves.add(parse_message(message))
            effects(waves.drain())
            if self.stays[name] != stay:
                return  # another process has the partitions by now, and the broker takes no commits from this one
            reader.commit(reader.position())

    def _index(self, waves):
        for batch in waves:
            for step in self.index_steps:
                batch = step(self.index_parts, batch)

    def _prefill(self, waves):
        """As the graph of `ingest.pipeline` has it: in passes, and the last steps over the whole bundle."""
        plan, *middle = self.prefill_steps[:-_LAST_STEPS]
        bundle = Waves()
        for wave in waves:
            for batch in in_passes(plan(self.prefill_parts, wave), self.settings.ingest.batch_tokens):
                for step in middle:
                    batch = step(self.prefill_parts, batch)
                for work in batch:
                    bundle.add(work)
        for batch in bundle.drain():
            for step in self.prefill_steps[-_LAST_STEPS:]:
                batch = step(self.prefill_parts, batch)

    def _ask(self, text, k):
        parts, begin = self.question_parts, next(self.ticks)
        (vector,) = self.embedder.embed([text])[0]
        hits = parts.index.search_visible(TENANT, vector, k)
        neighbours = {one.document for hit in hits if hit.chunk.fusion for one in hit.chunk.fusion.neighbours}
        heads = parts.index.heads(list(neighbours)) if neighbours else {}
        end = next(self.ticks)
        for hit in hits:
            chunk = hit.chunk.chunk
            self._judge(chunk.document, chunk.version, chunk.text, begin, end)
            fusion = hit.chunk.fusion
            if fusion is not None and fusion.ready and neighbours_visible(fusion, heads):
                if self._load(hit.chunk, fusion.kv_key, tuple(one.kv_key for one in fusion.neighbours)):
                    for one in fusion.neighbours:
                        self._judge(one.document, one.version, None, begin, end)
            elif hit.chunk.kv_ready:
                self._load(hit.chunk, hit.chunk.kv_key, ())

    def _judge(self, document, version, text, begin, end):
        self.faults += audit.stale(self.log, self.truth, document, version, text, begin, end)

    def _load(self, indexed, key, neighbours):
        """Whether there is KV that may be used; a miss makes the chunk fresh, which is no fault."""
        chunk = indexed.chunk
        try:
            self.question_parts.kv.get(
                chunk.document,
                key,
                fingerprint=self.generation.fingerprint.digest,
                token_sha256=chunk.token_digest,
                neighbours=neighbours,
            )
        except ArtifactMiss:
            return False
        return True

    def _reconcile(self):
        Reconciler(
            self.reconcile_parts,
            lag=self.lag,
            events=lambda: self.topics.messages(self.kafka.documents_topic),
            read=EventReader(),
        ).run(grace_s=0)
