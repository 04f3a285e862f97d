"""Any order, any repetition, any crash: the highest version wins, and nothing else is left."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stores.fakes import CrashPoint, SimulatedCrash, with_faults
from tests.ingest.world import World, document

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def content_of(doc_id, version):
    """The text of a version; versions share paragraphs, and some versions are deletions."""
    if (version + len(doc_id)) % 4 == 3:
        return None
    shared = [f"{word} is in every version of {doc_id} that is even or odd {version % 2}." for word in WORDS[:3]]
    return "\n\n".join([*shared, f"{WORDS[version]} belongs to version {version} alone, and it is long enough."])


events = st.tuples(st.just("event"), st.sampled_from(["a", "bb"]), st.integers(0, 7))
runs = st.tuples(st.sampled_from(["index", "prefill"]), st.just(""), st.just(0))
calls = {
    "index": ["heads", "count_live", "chunks", "live_chunks", "upsert", "flip", "stale_chunk_ids", "delete"],
    "prefill": ["heads", "live_chunks", "mark_kv"],
}
crashes = st.sampled_from(["index", "prefill"]).flatmap(
    lambda pipeline: st.tuples(st.just(f"crash {pipeline}"), st.sampled_from(calls[pipeline]), st.integers(1, 3))
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(actions=st.lists(st.one_of(events, events, runs, crashes), min_size=1, max_size=24))
def test_ing_05_any_interleaving_ends_in_the_highest_version(actions):
    """Where arrival or a timer decides, a late event or a crash between two writes brings back an old version."""
    world, highest = World(), {}
    try:
        for action, name, number in actions:
            if action == "event":
                world.change(content_of(name, number), number, doc_id=name)
                highest[name] = max(highest.get(name, 0), number)
            elif action in ("index", "prefill"):
                getattr(world, action)()
            else:
                pipeline = action.removeprefix("crash ")
                parts = getattr(world, f"{pipeline}_parts")
                faulty = with_faults(parts.index, CrashPoint(name, at=number, fault=SimulatedCrash()))
                with contextlib.suppress(SimulatedCrash):
                    getattr(world, pipeline)(replace(parts, index=faulty))
        world.index()
        world.prefill()
        for name, version in highest.items():
            head = world.qdrant.heads([document(name)])[document(name)]
            text = content_of(name, version)
            assert (head.version, head.live) == (version, text is not None)
            assert (world.texts(name) or "").split() == (text or "").split()
        world.assert_clean()
        assert world.dead_letters() == []
        before = world.state(), len(world.model.prefilled), len(world.embedder.embedded)
        world.index(repeat=True)
        world.prefill(repeat=True)
        assert (world.state(), len(world.model.prefilled), len(world.embedder.embedded)) == before
    finally:
        world.close()


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_ing_05_versions_in_one_bundle_and_across_bundles_end_the_same(batch):
    world = World()
    ingest = world.settings.ingest.model_copy(update={"batch_documents": batch})
    world.settings = world.settings.model_copy(update={"ingest": ingest})
    for version in (2, 1, 3, 3, 2):
        world.change(content_of("a", version + 2), version, doc_id="a")
    world.index()
    assert world.texts("a").split() == content_of("a", 5).split()
    world.close()
