"""What surrounds the pipelines: runner, parts, handles, metrics."""

import pickle
import sys

import apache_beam as beam
import pytest
from prometheus_client import REGISTRY

from ingest.batching import Waves
from ingest.connect import ConnectIndex, connected
from ingest.handles import held
from ingest.pipeline import IndexDocuments, PrefillDocuments
from ingest.run import run_pipeline
from schemas.settings import Settings


def test_ing_04_the_runner_is_named_here_and_not_on_the_command_line(monkeypatch):
    """Beam reads `sys.argv` and picks a runner by itself: one that downloads a binary, or one that cannot stream."""
    monkeypatch.setattr(sys, "argv", ["kvquilt", "--runner=NoSuchRunner", "--direct_num_workers=2"])
    seen = []
    with held(seen) as handle:
        run_pipeline(lambda p: p | beam.Create([1, 2]) | beam.Map(lambda n, to: to().append(n), handle))
    assert sorted(seen) == [1, 2]


def test_a_handle_survives_pickling_and_ends_with_its_block():
    thing = object()
    with held(thing) as handle:
        copy = pickle.loads(pickle.dumps(handle))
        assert copy() is thing
    with pytest.raises(RuntimeError, match="works in-process only"):
        copy()


def test_connects_travel_by_their_settings():
    """The graph is pickled with its settings; a client in it could not be."""
    connect = ConnectIndex(Settings())
    assert pickle.loads(pickle.dumps(connect)) == connect


def test_parts_that_somebody_else_made_stay_open(world):
    with held(world.index_parts) as handle, connected(handle):
        pass
    world.change("a text", 1)
    world.index()
    assert world.texts() == "a text"


def sample(name, **labels):
    return REGISTRY.get_sample_value(f"kvquilt_{name}", labels) or 0


def test_outcomes_freshness_and_stages_are_measured(world):
    def figures():
        return {
            "committed": sample("events_total", pipeline="index", outcome="committed"),
            "dead": sample("events_total", pipeline="index", outcome="dead"),
            "letters": sample("dlq_total", stage="parse"),
            "confirmed": sample("events_total", pipeline="prefill", outcome="confirmed"),
            "text": sample("freshness_seconds_count", kind="text"),
            "kv": sample("freshness_seconds_count", kind="kv"),
            "seconds": sample("freshness_seconds_sum", kind="kv"),
            "chunks": sample("prefilled_chunks_total"),
        }

    before = figures()
    world.change("a text", 1)
    world.raw(b"{")
    messages = world.topics.messages(world.kafka.documents_topic)
    with held(world.index_parts) as index, held(world.prefill_parts) as prefill:
        run_pipeline(lambda p: p | beam.Create(messages) | IndexDocuments(world.settings.ingest, index))
        records = world.topics.messages(world.kafka.commits_topic)
        world.clock.advance(5)
        run_pipeline(lambda p: p | beam.Create(records) | PrefillDocuments(world.settings.ingest, prefill))
    grown = {name: value - before[name] for name, value in figures().items()}
    assert grown == {
        "committed": 1, "dead": 1, "letters": 1, "confirmed": 1, "text": 1, "kv": 1, "seconds": 5, "chunks": 1
    }  # fmt: skip


def test_waves_start_empty():
    assert Waves().drain() == []
