"""A new generation from reindex to gc, on real parts in one process: broker, models, pipelines, a replica."""

import threading
import time
from contextlib import ExitStack

import httpx
import pytest

from engine import resolve_generation
from engine.models import embedder_folder
from ingest import run_index, run_prefill, run_reindex
from ingest.switching import open_generations, open_stores, promote
from schemas.ids import DocumentKey
from schemas.settings import load_settings
from serve import BackgroundServer, build_parts
from stores import ensure_topics, open_index
from stores.reclaim import reclaim
from tests.ingest.tiny import make_tiny_model, text
from tests.services.fixtures import kafka_settings

pytestmark = pytest.mark.slow
LEASE_S = 2.0


def until(condition, what, timeout_s=120):
    end_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return found


class Running:
    """Pipelines in threads; a fault of one is raised when they are stopped."""

    def __init__(self):
        self.stop_event, self.threads, self.faults = threading.Event(), [], []

    def start(self, run, *args, **how):
        def work():
            try:
                run(*args, **how)
            except BaseException as fault:
                self.faults.append(fault)

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()

    def stop(self):
        self.stop_event.set()
        for thread in self.threads:
            thread.join()
        assert self.faults == []


@pytest.fixture
def settings(memory_broker, request, tmp_path):
    """Those of the old generation, and of the new one: another embedder, other chunks."""
    kafka = kafka_settings(memory_broker.bootstrap, request.node.nodeid).model_dump()
    common = {
        "data_dir": str(tmp_path / "data"),
        "cache_dir": str(tmp_path / "cache"),
        "kafka": kafka,
        "model": {"name": str(make_tiny_model(tmp_path / "model")), "dtype": "float32", "device": "cpu"},
        "generations": {"check_s": 0.1, "lease_s": LEASE_S},
        "serve": {"port": 0},
    }
    other = tmp_path / "other-embedder"
    other.symlink_to(embedder_folder("minilm"))
    return [
        load_settings({**common, "chunker": {"max_tokens": n}, "embedder": {"name": str(embedder)}})
        for n, embedder in ((32, "minilm"), (64, other))
    ]


def test_emb_03_reindex_events_to_both_promote_rollback_gc(settings):
    """Bug: a deleted document survived in the generation that was not served, and a rollback answered from it."""
    old, new = settings
    names = [resolve_generation(one).generation.name for one in settings]
    ensure_topics(old.kafka)
    with ExitStack() as stack:
        feeding, building = Running(), Running()
        stack.callback(feeding.stop)
        feeding.start(run_index, old, feeding.stop_event)
        feeding.start(run_prefill, old, feeding.stop_event)
        server = stack.enter_context(BackgroundServer(old, lambda: build_parts(old)))
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        until(lambda: client.get("/readyz").is_success, "the service is ready")

        def put(doc_id, seed):
            assert client.put(f"/v1/documents/{doc_id}", json={"content": text(seed, 6)}).status_code == 202

        def servable(doc_id):
            body = client.get(f"/v1/documents/{doc_id}").json()
            return "chunks" in body and body["chunks"] == body["kv_ready"] > 0 and body

        def live():
            body = client.get("/version").json()
            return client.get("/readyz").is_success and body["generation"]

        def answer(seed):
            body = client.post("/v1/answer", json={"question": text(seed, 1), "k": 8, "max_tokens": 2}).json()
            assert body["fallback"] == {}
            return {citation["doc_id"] for citation in body["citations"]}

        for doc_id, seed in (("a", 1), ("b", 2), ("doomed", 3)):
            put(doc_id, seed)
        for doc_id in ("a", "b", "doomed"):
            until(lambda doc_id=doc_id: servable(doc_id), f"{doc_id} is servable")
        assert live() == names[0]

        built = threading.Event()
        stack.callback(building.stop)
        building.start(run_reindex, new, building.stop_event, follow=True, on_built=lambda done: built.set())
        until(lambda: built.is_set() or building.faults, "the new generation is built")
        assert building.faults == []
        assert live() == names[0], "the old one is served all the time"

        put("c", 4)
        store = open_generations(new)
        target = store.read().get(names[1])
        assert target.state == "built"
        until(lambda: servable("c"), "c is servable")
        done = promote(new, store, target, force=False, wait_s=60)
        assert not done.gap, "what came after it was built is in both"
        until(lambda: live() == names[1], "the replica serves the new one, without a restart")
        assert {"a", "b", "c", "doomed"} >= answer(1) >= {"a"}
        assert servable("a")["chunks"] < 4, "longer chunks"

        client.delete("/v1/documents/doomed")
        receipt = until(
            lambda: (got := client.get("/v1/documents/doomed/receipt").json()).get("state") == "COMPLETE" and got,
            "the receipt is complete",
        )
        assert receipt["missing"] == []
        with open_stores(old, store, store.read().get(names[0])) as kept:
            doomed = DocumentKey("default", "doomed")
            assert (kept.index.heads([doomed])[doomed].live, kept.index.count(doomed), kept.kv.keys(doomed)) == (
                False,
                0,
                [],
            )

        back = promote(new, store, store.read().to_roll_back_to(), force=False, wait_s=60)
        assert (back.live, bool(back.gap)) == (names[0], False)
        until(lambda: live() == names[0], "the replica is back on the old one")
        assert "doomed" not in answer(3)
        assert "a" in answer(1)

        def collect():
            def open_entry(entry):
                return open_index(new.qdrant, new.qdrant_location, entry.name, entry.generation.embedding_dim)

            (one,) = reclaim(store, open_entry, grace_s=0)
            return one

        assert "in use by" in collect().kept
        building.stop()
        gone = until(lambda: not (one := collect()).kept and one, "the replica's lease has run out")
        assert (gone.generation, gone.collections) == (names[1], 2)
        assert store.blobs.list(f"kv/{names[1]}") == []
        assert [one.name for one in store.read().known] == [names[0]]
        assert "a" in answer(1)
