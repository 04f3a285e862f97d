"""A world of two generations: one is live, the other is built beside it, each read by groups of its own."""

from dataclasses import replace

from ingest.chunking import Chunker
from ingest.fakes import DIM, FakePrefiller, WordTokenizer, fake_generation
from ingest.siblings import carry_tombstones
from ingest.switching import promote
from schemas.settings import ChunkerSettings, QdrantSettings
from serve.parts import Parts
from serve.receipts import receipt_of
from stores.generations import GenerationStore
from stores.kv_store import KvStore
from tests.ingest.world import World, document, run_steps

NEW = fake_generation(chunk_max_tokens=32)


class TwoGenerations(World):
    """`index`/`prefill` feed the old one, `index_new`/`prefill_new` the new one, once it was added by `build`."""

    def __init__(self):
        super().__init__()
        self.store = GenerationStore(self.kv.blobs, self.clock)
        self.old = self.index_parts.generation
        self.settings = self.settings.model_copy(
            update={"qdrant": QdrantSettings(url=self.qdrant._connection.place, prefix="kvquilt")}
        )
        self.index_parts = replace(self.index_parts, generations=self.store, settings=self.settings)
        self.prefill_parts = replace(self.prefill_parts, generations=self.store, settings=self.settings)
        self.store.change(lambda now: now.add(self.old, self.settings, self.clock.now_ms()))
        self.new_index = self.qdrant.beside(NEW.name, DIM)
        self.new_kv = KvStore(self.kv.blobs, NEW.name)
        changed = {"generation": NEW, "index": self.new_index, "kv": self.new_kv}
        chunker = Chunker(WordTokenizer(), NEW.chunk_max_tokens)
        self.new_index_parts = replace(self.index_parts, **changed, chunker=chunker)
        self.new_prefill_parts = replace(self.prefill_parts, **changed, model=FakePrefiller())
        self.leases = []

    def build(self):
        """Register the new generation, as reindex does before it reads anything."""
        self.new_index.ensure()
        new = self.settings.model_copy(update={"chunker": ChunkerSettings(max_tokens=32)})
        self.store.change(lambda now: now.add(NEW, new, self.clock.now_ms()))
        carry_tombstones(self.prefill_parts, self.new_prefill_parts)

    def catch_up(self):
        """The new generation's pipelines read both topics to their ends."""
        self.index(self.new_index_parts)
        self.prefill(self.new_prefill_parts)

    def ingest_into_both(self, text):
        """Version 1 of document `d`, with KV: fed to the old generation, then the new one is built and catches up."""
        self.change(text, 1)
        self.index()
        self.prefill()
        self.build()
        self.catch_up()

    def feed_new(self):
        """From now on a PREFILL of the new generation runs somewhere, as its lease says."""
        self.leases.append(self.store.leases.hold(NEW.name, "prefill"))

    def promote(self, name=NEW.name, **how):
        target = self.store.read().named(name)
        return promote(self.settings, self.store, target, **({"force": False, "wait_s": 0.0} | how))

    def stored(self, index, kv, doc_id="d"):
        """How many points and artifacts there are of a document."""
        return index.count(document(doc_id)), len(kv.keys(document(doc_id)))

    def everything(self, doc_id="d"):
        """The same of both generations."""
        return self.stored(self.qdrant, self.kv, doc_id), self.stored(self.new_index, self.new_kv, doc_id)

    def receipt(self, version=None, doc_id="d"):
        """What a replica that serves the live generation says of a deletion."""
        live = self.store.read().live.name
        index, kv = (self.qdrant, self.kv) if live == self.old.name else (self.new_index, self.new_kv)
        generation = self.old if live == self.old.name else NEW
        parts = Parts(
            generation=generation, index=index, kv=kv, blobs=self.kv.blobs, generations=self.store,
            template=None, model=None, embedder=None, publisher=None, certificates=None,
        )  # fmt: skip
        return receipt_of(parts, document(doc_id), version)

    def _run(self, topic, parse_message, steps, parts, repeat):
        reader = self.topics.reader(topic, f"pipeline of {parts.generation.name}")
        if repeat:
            reader.seek({})
        return run_steps(reader, parse_message, steps, parts, self.settings.ingest.batch_documents)

    def close(self):
        for lease in self.leases:
            lease.close()
        self.new_index.close()
        super().close()
