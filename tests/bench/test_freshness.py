"""bench.freshness measures what it says: a stream, a burst behind it, and every document looked for in the end."""

from contextlib import ExitStack

import pytest

from bench.freshness import _not_found, _options, measure
from schemas.settings import load_settings
from tests.ingest.tiny import make_tiny_model
from tests.ingest.world import World
from tests.services.fixtures import kafka_settings

AT = ("p50", "p95")
SECONDS = [*(f"text_{at}_s" for at in AT), *(f"kv_{at}_s" for at in AT), *(f"prefill_s_per_document_{at}" for at in AT)]


@pytest.fixture
def settings(memory_broker, request, tmp_path):
    return load_settings(
        {
            "data_dir": str(tmp_path / "data"),
            "cache_dir": str(tmp_path / "cache"),
            "kafka": kafka_settings(memory_broker.bootstrap, request.node.nodeid).model_dump(),
            "model": {"name": str(make_tiny_model(tmp_path / "model")), "dtype": "float32", "device": "cpu"},
        }
    )


def test_a_stream_and_a_burst_are_measured_and_every_document_is_found(settings):
    """Bug: a figure of documents that no question finds, or that were never sent."""
    options = _options(["--rate", "10", "--seconds", "0.3", "--burst", "3"])
    with ExitStack() as stack:
        result = measure(settings, options, stack)
    assert (result["documents"], result["not_found"]) == (6, 0)
    assert sum(result["chunks"].values()) == 6, "each document is counted once, by its chunks"
    assert all(0 < result[name] < 60 for name in SECONDS)
    assert result["text_p50_s"] <= result["text_p95_s"] < result["kv_p95_s"], "KV is made of what is committed"
    assert result["prefill_s_per_document_p95"] < result["kv_p95_s"], "and not before its passes are done"
    assert result["kv_over_prefill_p95"] > 1
    assert result["prefill_load"] > 0
    assert result["burst_text_last_s"] > 0
    assert 0 <= result["burst_kv_behind"] <= 3
    assert (result["broker"], result["rate"], result["dtype"]) == ("embedded", 10, "float32")
    assert {"tokens_mean", "nice"} <= result.keys()


def test_a_document_that_a_search_for_its_own_text_does_not_give_is_not_found():
    """The count can be other than 0: here five documents say the same, and four are found."""
    world, names = World(), [f"d{n}" for n in range(5)]
    for name in names:
        world.change("All of them say this.", 1, doc_id=name)
    world.index()
    assert len(_not_found(world.index_parts, names)) == 1
    assert _not_found(world.index_parts, []) == []
    world.close()
