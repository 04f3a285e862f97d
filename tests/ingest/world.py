"""A small world of real stores (Qdrant and objects in memory), topics in memory and fake models."""

import itertools
from dataclasses import replace
from functools import partial

from ingest.batching import Waves
from ingest.chunking import Chunker
from ingest.fakes import DIM, FakeEmbedder, FakePrefiller, WordTokenizer, fake_generation
from ingest.parts import IndexParts, PrefillParts
from ingest.pipeline import INDEX_STEPS, PREFILL_STEPS
from ingest.planning import parse
from ingest.prefill import parse_record
from schemas.events import VERSION_HEADER, EventBody
from schemas.ids import DocumentKey
from schemas.settings import IngestSettings, KafkaSettings, PrefillSettings, QdrantSettings, Settings
from stores.blobs import open_blobs
from stores.clock import MovableClock, SystemClock
from stores.kv_store import KvStore
from stores.memory_topics import MemoryTopics
from stores.topics import Publisher
from stores.vectors import open_index

PARAGRAPHS = [
    f"Paragraph {n} says that the thing called {n * 7919} has the colour number {n * 31} today." for n in range(12)
]
TEXT = "\n\n".join(PARAGRAPHS)

_worlds = itertools.count()


def document(doc_id="d", tenant="default"):
    return DocumentKey(tenant, doc_id)


def run_steps(reader, parse_message, steps, parts, limit):
    """What the runner does with a pipeline's steps, batch by batch until the topic is empty; the works that ended."""
    ended = []
    while messages := reader.poll(limit, 0):
        waves = Waves()
        for message in messages:
            waves.add(parse_message(message))
        for batch in waves.drain():
            for step in steps:
                batch = step(parts, batch)
            ended += batch
        reader.commit(reader.position())
    return ended


class World:
    """Everything outside the pipelines; `index()` and `prefill()` do what one run of each does."""

    def __init__(self, neighbours=0, max_changes_per_day=4):
        """With `neighbours`, chunks are fused with so many."""
        number = next(_worlds)
        self.settings = Settings(
            kafka=KafkaSettings(bootstrap="nowhere:1"),
            ingest=IngestSettings(batch_documents=8, batch_tokens=64, max_attempts=3, backoff_s=0.01),
            prefill=PrefillSettings(max_changes_per_day=max_changes_per_day),
        )
        self.kafka = self.settings.kafka
        self.clock = MovableClock()
        self.topics = MemoryTopics(clock=self.clock)
        self.publisher = self.topics.publisher()
        fused = {"prefill_variant": "fused", "neighbours": neighbours} if neighbours else {}
        generation = fake_generation(**fused)
        self.qdrant = open_index(QdrantSettings(), f":memory:{number}", generation.name, DIM)
        self.qdrant.ensure()
        self.kv = KvStore(open_blobs(f"memory://world-{number}", {}), generation.name)
        self.embedder, self.model = FakeEmbedder(), FakePrefiller()
        shared = {"settings": self.settings, "generation": generation, "index": self.qdrant, "kv": self.kv}
        shared |= {"publisher": self.publisher, "clock": self.clock}
        chunker = Chunker(WordTokenizer(), generation.chunk_max_tokens)
        self.index_parts = IndexParts(**shared, embedder=self.embedder, chunker=chunker)
        self.prefill_parts = PrefillParts(
            **shared, model=self.model, prefix_ids=(1, 2, 3), read_rows=lambda artifact: artifact
        )

    def connect(self, kafka):
        """Use a real broker instead of topics in memory."""
        self.kafka = kafka
        self.settings = self.settings.model_copy(update={"kafka": kafka})
        self.publisher = Publisher(kafka)
        real = {"settings": self.settings, "publisher": self.publisher, "clock": SystemClock()}
        self.index_parts = replace(self.index_parts, **real)
        self.prefill_parts = replace(self.prefill_parts, **real)

    def change(self, text, version=None, doc_id="d", **fields):
        """Publish a new version, or a deletion where `text` is None."""
        if text is None:
            headers = () if version is None else ((VERSION_HEADER, str(version).encode()),)
            return self.publisher.publish(self.kafka.documents_topic, doc_id.encode(), None, headers)
        body = EventBody(content=text, version=version, **fields)
        return self.publisher.publish(self.kafka.documents_topic, doc_id.encode(), body.to_bytes())

    def raw(self, value, key=b"d", headers=()):
        """Publish bytes as they are."""
        return self.publisher.publish(self.kafka.documents_topic, key, value, headers)

    def index(self, parts=None, repeat=False):
        """Run INDEX over what its group has not committed (with `repeat` over everything); commit after the effects."""
        parts = parts or self.index_parts
        return self._run(self.kafka.documents_topic, partial(parse, parts), INDEX_STEPS, parts, repeat)

    def prefill(self, parts=None, repeat=False):
        """Run PREFILL over what its group has not committed (with `repeat` over everything)."""
        return self._run(self.kafka.commits_topic, parse_record, PREFILL_STEPS, parts or self.prefill_parts, repeat)

    def _run(self, topic, parse_message, steps, parts, repeat):
        reader = self.topics.reader(topic, "pipeline")
        if repeat:
            reader.seek({})
        return run_steps(reader, parse_message, steps, parts, self.settings.ingest.batch_documents)

    def dead_letters(self):
        return [
            {
                name.removeprefix("kvquilt.error."): (value or b"").decode("utf-8", "replace")
                for name, value in message.headers
            }
            for message in self.topics.messages(self.kafka.dead_letter_topic)
        ]

    def state(self):
        """Everything that is stored, as plain values: two equal states serve equally."""
        heads = {head.document: head for head in self.qdrant.documents()}
        return {
            key: (
                head.version,
                head.state.value,
                [(c.chunk.version, c.chunk.ordinal, c.chunk.text, c.kv_ready) for c in self.qdrant.chunks(key)],
                sorted(self.kv.keys(key)),
            )
            for key, head in heads.items()
        }

    def texts(self, doc_id="d"):
        """What the document is answered from."""
        key = document(doc_id)
        head = self.qdrant.heads([key]).get(key)
        if head is None or not head.live:
            return None
        return " ".join(c.chunk.text for c in self.qdrant.live_chunks(head))

    def assert_clean(self):
        """Every live document: exactly its live version's points, each with its artifact, and nothing else."""
        for head in self.qdrant.documents():
            points = self.qdrant.chunks(head.document)
            assert len(points) == head.n_chunks
            assert all(point.chunk.version == head.version and point.kv_ready for point in points)
            assert set(self.kv.keys(head.document)) == {key for point in points for key in point.kv_keys}

    def close(self):
        self.qdrant.close()
