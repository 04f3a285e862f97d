"""A replica serves the live generation: it goes over to another one, or says why it cannot."""

from dataclasses import replace

import httpx
import pytest

from schemas.errors import BlobError
from schemas.generations import GenerationState
from serve import BackgroundServer
from serve.errors import NotReadyError
from serve.following import Following
from serve.parts import parts_beside
from serve.readiness import LOOKING, Readiness
from stores import KvStore
from stores.clock import MovableClock
from stores.fakes import CrashPoint, with_faults
from stores.generations import GenerationStore
from tests.serve.fakes import until
from tests.serve.scripted import DIM, GENERATION
from tests.serve.test_tiers import of_tier

OTHER = GENERATION.model_copy(update={"chunk_max_tokens": 64})
FOREIGN = GENERATION.model_copy(
    update={"fingerprint": GENERATION.fingerprint.model_copy(update={"model": "another", "weights_sha256": "x"})}
)


class Replica:
    """A readiness, and what follows the record for it; `look` is one turn of its loop."""

    def __init__(self, settings, bench):
        self.settings, self.clock = settings, MovableClock()
        self.store = GenerationStore(bench.blobs, self.clock, 60.0)
        self.parts = replace(bench.parts, generations=self.store, beside=self.beside)
        self.readiness = Readiness()
        self.readiness.adopt(self.parts)
        self.readiness.refusal = LOOKING
        self.following = Following(settings, self.readiness, self.store)
        self.look = self.following.look

    def beside(self, parts, entry):
        """Without real models: what they made is told by the fingerprint."""
        if entry.generation.fingerprint != parts.model.fingerprint:
            return parts_beside(self.settings, parts, entry)  # says why not
        index = parts.index.beside(entry.name, DIM)
        index.ensure()
        kv = KvStore(parts.blobs, entry.name)
        return replace(parts, generation=entry.generation, index=index, kv=kv, closers=(index.close, *parts.closers))

    def promote(self, generation):
        self.store.change(lambda now: now.add(generation, self.settings, 1))
        self.store.change(lambda now: now.promote(generation.name, 2))

    def held(self, generation):
        return [lease.role for lease in self.store.leases.held(generation.name)]

    @property
    def served(self):
        return self.readiness.parts.generation


@pytest.fixture
def replica(settings, bench):
    replica = Replica(settings, bench)
    yield replica
    replica.following.close()
    if replica.readiness.built is not replica.parts:
        replica.readiness.built.index.close()


def test_nothing_is_served_before_it_is_known_what_is_live(replica):
    """Bug: a replica that was started late answered from the generation of its settings, which stood by."""
    with pytest.raises(NotReadyError, match="it is being looked up which generation is live"):
        _ = replica.readiness.parts
    replica.look()
    assert replica.served == GENERATION
    assert replica.store.read().live.name == GENERATION.name, "the first that is used is live"
    assert replica.held(GENERATION) == ["serve"]


def test_a_replica_goes_over_to_a_generation_that_its_model_made(replica):
    replica.look()
    replica.promote(OTHER)
    replica.look()
    assert replica.served == OTHER
    assert replica.readiness.parts.kv.generation == OTHER.name
    assert OTHER.name in replica.readiness.parts.index.collection
    assert (replica.held(OTHER), replica.held(GENERATION)) == (["serve"], ["serve"])
    replica.clock.advance(61)
    assert replica.held(GENERATION) == [], "answers that were under way are over: nothing keeps it any more"
    replica.promote(GENERATION)
    replica.look()
    assert (replica.served, replica.held(GENERATION)) == (GENERATION, ["serve"])


def test_a_replica_with_another_model_refuses_says_why_and_comes_back_after_a_rollback(replica):
    """Bug: rows of another model would have been stitched into the prompt, or the old generation served for ever."""
    replica.look()
    replica.promote(FOREIGN)
    for _ in range(2):
        replica.look()
        with pytest.raises(NotReadyError) as refused:
            _ = replica.readiness.parts
    said = str(refused.value)
    assert f"generation {FOREIGN.name} is live, and it was not made by what is loaded here" in said
    assert "model model another there, scripted here" in said
    assert "run `kvquilt rollback`" in said
    assert "chunk_max_tokens" not in said
    replica.promote(GENERATION)
    replica.look()
    assert replica.served == GENERATION


def test_while_the_object_store_is_away_what_was_found_last_is_served(replica):
    replica.look()
    faulty = with_faults(replica.store.blobs, CrashPoint("list", fault=BlobError("away"), times=9))
    following = Following(replica.settings, replica.readiness, GenerationStore(faulty, replica.clock))
    with pytest.raises(BlobError, match="away"):
        following.look()
    assert replica.served == GENERATION


def test_a_running_service_refuses_every_request_with_the_reason_and_follows_within_seconds(settings, bench):
    """On /readyz and on the request itself; /version and /healthz go on answering."""
    quick = settings.model_copy(
        update={"generations": settings.generations.model_copy(update={"check_s": 0.02, "lease_s": 5.0})}
    )
    replica = Replica(quick, bench)
    bench.corpus.put("d", "the lamp is green")
    with BackgroundServer(quick, replica.parts) as server, httpx.Client(base_url=server.url, timeout=30) as client:

        def ask():
            return client.post("/v1/answer", json={"question": "what is the lamp", "max_tokens": 2})

        until(lambda: ask().is_success, "the first look")
        assert ask().json()["citations"][0]["doc_id"] == "d"
        replica.promote(FOREIGN)
        until(lambda: ask().status_code == 503, "it noticed")
        for refused in (ask(), client.get("/readyz"), client.get("/v1/documents/d")):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            assert "was not made by what is loaded here" in refused.json()["error"]["message"]
        assert client.get("/healthz").is_success
        assert client.get("/version").json()["generation"] == GENERATION.name
        replica.promote(OTHER)
        until(lambda: ask().is_success, "it followed")
        assert ask().json()["citations"] == [], "the other generation is empty"
        assert client.get("/version").json()["generation"] == OTHER.name
        misses = [of_tier(client, "tier_misses_total", "host", one) for one in (GENERATION, OTHER)]
        assert (misses[0] > 0, misses[1]) == (True, 0), "each generation has tiers, and metrics of them, of its own"
        until(lambda: of_tier(client, "kv_bytes", "host") == 0, "nothing is kept of what is not served")
        replica.promote(GENERATION)
        until(lambda: client.get("/version").json()["generation"] == GENERATION.name, "back again")
        assert ask().json()["citations"][0]["doc_id"] == "d"
        server.app.state.kvquilt.readiness.built.closers[0]()
        holding = len(replica.held(GENERATION))
    assert len(replica.held(GENERATION)) == holding - 1, "a replica that stops gives its lease back"
    states = {one.name: one.state for one in replica.store.read().known}
    assert states[GENERATION.name] is GenerationState.LIVE
