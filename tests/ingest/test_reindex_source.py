"""Reindex from a source (`--source`), as where the topic has forgotten: live events win over it by version."""

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.context import Context, Format
from cli.generations import reindex
from engine import resolve_generation
from ingest import run_backfill, run_index, run_reindex
from ingest.sources import survey
from ingest.switching import open_generations, open_stores, promote
from schemas.events import EventBody
from schemas.head import DocumentState
from schemas.ids import DocumentKey
from schemas.settings import Settings, load_settings
from stores.topics import Publisher, ensure_topics
from tests.ingest.backfilling import file
from tests.ingest.tiny import make_tiny_model, text
from tests.services.fixtures import kafka_settings

NAMES = ("changed.txt", "deleted.txt", "gone.txt", "late.txt", "only-here.txt")


def key(doc_id):
    return DocumentKey("default", doc_id)


@dataclass
class Deployment:
    """A generation that was built from a folder and is live, the settings of another one, and the folder."""

    old: Settings
    new: Settings
    folder: Path

    def source(self):
        return survey([self.folder], root=self.folder)

    def state(self, settings):
        """Version, state and text of every document, and whether all of its chunks have their KV."""
        store = open_generations(settings)
        entry = store.read().get(resolve_generation(settings).generation.name)
        with open_stores(settings, store, entry) as stores:
            found = {}
            for head in stores.index.documents():
                points = stores.index.chunks(head.document, head.version)
                kv = {point.kv_key for point in points} == set(stores.kv.keys(head.document))
                found[head.doc_id] = (head.version, head.live, " ".join(point.chunk.text for point in points), kv)
            return found

    def delete_in_old(self, doc_id):
        """A deletion that the topic has forgotten."""
        store = open_generations(self.old)
        with open_stores(self.old, store, store.read().live) as stores:
            head = stores.index.heads([key(doc_id)])[key(doc_id)]
            gone = {"version": head.version + 1, "state": DocumentState.DELETED, "n_chunks": 0}
            stores.index.flip(head.model_copy(update=gone))

    def publish(self, doc_id, content, version=None):
        body = None if content is None else EventBody(content=content, version=version).to_bytes()
        with Publisher(self.old.kafka) as publisher:
            publisher.publish(self.old.kafka.documents_topic, doc_id.encode(), body)


@pytest.fixture
def deployment(memory_broker, request, tmp_path):
    common = {
        "data_dir": str(tmp_path / "data"),
        "cache_dir": str(tmp_path / "cache"),
        "kafka": kafka_settings(memory_broker.bootstrap, request.node.nodeid).model_dump(),
        "model": {"name": str(make_tiny_model(tmp_path / "model")), "dtype": "float32", "device": "cpu"},
        "ingest": {"batch_documents": 1},
    }
    old, new = (load_settings({**common, "chunker": {"max_tokens": n}}) for n in (32, 64))
    ensure_topics(old.kafka)
    folder = tmp_path / "files"
    for seed, name in enumerate(NAMES):
        file(folder / name, text(seed, 6))
    made = Deployment(old, new, folder)
    assert run_backfill(old, made.source()).committed == len(NAMES)
    made.delete_in_old("gone.txt")
    return made


def test_a_generation_is_built_from_a_folder_and_live_events_win_over_it_by_version(deployment, capsys):
    """Bug: rows of the source, which are read late, brought back what had been changed or deleted meanwhile."""
    before = deployment.state(deployment.old)
    stop, events = threading.Event(), threading.Event()

    def meanwhile(now):
        """When the first rows are in: three events, which reach the live generation before the other rows are read."""
        if now.indexed and not events.is_set():
            events.set()
            deployment.publish("changed.txt", "The lamp is red.")
            deployment.publish("late.txt", "An event that is older than the file.", version=1)
            deployment.publish("deleted.txt", None)
            end_s = time.monotonic() + 60
            while deployment.state(deployment.old)["deleted.txt"][1]:
                assert time.monotonic() < end_s
                time.sleep(0.02)

    feeding = threading.Thread(target=run_index, args=(deployment.old, stop))
    feeding.start()
    try:
        done = run_reindex(deployment.new, threading.Event(), source=deployment.source(), backfilled=meanwhile)
    finally:
        stop.set()
        feeding.join()
    assert events.is_set()
    assert (done.built, str(done.gap)) == (True, "nothing is missing (documents compared: 5)")
    state = deployment.state(deployment.new)
    assert state["only-here.txt"] == (before["only-here.txt"][0], True, text(4, 6), True)
    assert state["late.txt"] == (before["late.txt"][0], True, text(3, 6), True)
    assert state["changed.txt"][0] > before["changed.txt"][0]
    assert state["changed.txt"][1:] == (True, "The lamp is red.", True)
    for doc_id in ("deleted.txt", "gone.txt"):
        assert state[doc_id][0] > before["deleted.txt"][0]
        assert state[doc_id][1:] == (False, "", True), "no point and no artifact is left"

    context = Context(deployment.new, Format.JSON, quiet=True)
    reindex(context, [deployment.folder], root=deployment.folder, tenant="default", follow=False)
    again = json.loads(capsys.readouterr().out)
    assert again == {"generation": done.generation, "built": True, "carried": 0, "gap": str(done.gap)}
    assert deployment.state(deployment.new) == state, "the source is read behind the newer versions now: they stay"
    store = open_generations(deployment.new)
    switched = promote(deployment.new, store, store.read().get(done.generation), force=False, wait_s=0)
    assert switched.live == done.generation


def test_what_only_the_source_has_is_missing_without_it(deployment):
    """So that the source is what made it there, and promote refuses what was built without."""
    done = run_reindex(deployment.new, threading.Event())
    assert done.built
    assert str(done.gap).startswith("documents missing: 4 ")
    assert [name for name, (_, live, *_) in deployment.state(deployment.new).items() if live] == []
