"""Replicas that answer all the time while another generation is promoted, and rolled back to: no answer is mixed.

Both generations have the same documents at the same versions, with one chunk in common, so that artifacts, rows and
citations of the one would fit into an answer of the other; the numbers in the artifacts say whose they are.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import httpx
import numpy as np
import pytest

from schemas.kv_artifact import KvArtifact, payload_sha256
from serve import BackgroundServer
from stores import KvStore
from tests.serve.fakes import Corpus, events, until
from tests.serve.scripted import GENERATION, ScriptedModel
from tests.serve.test_following import OTHER, Replica

COMMON = "The lamp in the hall is lit."
OLD, NEW = GENERATION.name, OTHER.name
OWN = {OLD: "The lamp is old and green.", NEW: "The lamp is new and red."}
NUMBERS = {OLD: 1.0, NEW: 5.0}  # in the artifacts
QUESTION = "what is the lamp"


class CorpusOf(Corpus):
    """Writes documents of any generation."""

    def __init__(self, generation, index, kv):
        super().__init__(index, kv)
        self.generation = generation

    def artifact(self, chunk):
        made = super().artifact(chunk)
        k = np.full((1, 1, len(chunk.token_ids), 2), NUMBERS[self.generation.name], np.float32).tobytes()
        sha256 = payload_sha256(k, made.v, made.token_ids)
        update = {"generation": self.generation.name, "payload_sha256": sha256}
        return KvArtifact(made.header.model_copy(update=update), k, made.v, made.token_ids)


@dataclass
class Witness(ScriptedModel):
    """Notes, of each prompt with KV, what the chunks say and whose rows were stitched; in the order of the calls."""

    seen: list[tuple[str, set[float]]] = field(default_factory=list)

    def stitch(self, plan, rows, **how):
        ids = [plan.token_ids[chunk.start : chunk.end] for chunk in plan.chunks]
        text = " ".join(bytes(id - 10 for id in chunk).decode() for chunk in ids)
        self.seen.append((text, {float(row.k[0, 0, 0, 0]) for row in rows if row is not None}))
        return super().stitch(plan, rows, **how)


@dataclass
class Asking:
    """Questions to one replica, one behind the other: when each was asked, and what it was answered from."""

    client: httpx.Client
    stop: threading.Event
    answers: list[tuple[float, float, set[str]]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def run(self):
        n = 0
        while not self.stop.is_set():
            n += 1
            began = time.monotonic()
            body = {"question": QUESTION, "max_tokens": 2, "k": 8, "stream": n % 3 == 0}
            response = self.client.post("/v1/answer", json=body | {"cache_mode": ("reuse", "exact")[n % 2]})
            if response.status_code != 200:
                self.faults.append(response.text)
                return
            done = events(response)[-1][1] if body["stream"] else response.json()
            texts = {citation["text"] for citation in done["citations"]}
            self.answers.append((began, time.monotonic(), texts))

    def since(self, at_s):
        return sum(began > at_s for began, *_ in self.answers)


@pytest.fixture
def quick(settings):
    """Settings of replicas that look every 20 ms."""
    generations = settings.generations.model_copy(update={"check_s": 0.02, "lease_s": 5.0})
    return settings.model_copy(update={"generations": generations})


@pytest.fixture
def replicas(quick, bench):
    """Two servers over the same stores, each following the record; both generations are filled.

    One keeps exact rows, after which it loads no artifact; the other one keeps artifacts only.
    """
    bench.model = Witness()
    bench.parts = replace(bench.parts, model=bench.model)
    other = bench.parts.index.beside(OTHER.name, GENERATION.embedding_dim)
    other.ensure()
    for name in ("d", "e"):
        CorpusOf(GENERATION, bench.parts.index, bench.parts.kv).put(name, COMMON, OWN[OLD])
        CorpusOf(OTHER, other, KvStore(bench.blobs, OTHER.name)).put(name, COMMON, OWN[NEW])
    other.close()
    with ExitStack() as stack:
        found = []
        for nbytes in (quick.serve.prefix_cache_bytes, 0):
            serve = quick.serve.model_copy(update={"prefix_cache_bytes": nbytes})
            replica = Replica(quick.model_copy(update={"serve": serve}), bench)
            server = stack.enter_context(BackgroundServer(replica.settings, replica.parts))
            stack.callback(bench.model.hold.set)
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=30))
            until(lambda client=client: client.get("/readyz").is_success, "the first look")
            found.append((replica, client))
        yield found


def serves(client, generation):
    return client.get("/version").json()["generation"] == generation.name


def test_no_answer_is_of_the_wrong_generation_or_of_two_while_replicas_go_over(replicas, bench):
    """Bug: an answer found its chunks in one generation and took KV from memory that the other one had filled."""
    stop, record = threading.Event(), replicas[0][0]
    asking = [Asking(client, stop) for _, client in replicas]
    threads = [threading.Thread(target=one.run) for one in asking]
    switches = []  # when it was promoted, when every replica had followed, what
    for thread in threads:
        thread.start()
    try:
        until(lambda: all(len(one.answers) >= 3 for one in asking), "answers before")
        for generation in (OTHER, GENERATION, OTHER):
            promoted = time.monotonic()
            record.promote(generation)
            until(lambda g=generation: all(serves(client, g) for _, client in replicas), "all have followed")
            followed = time.monotonic()
            switches.append((promoted, followed, generation.name))
            until(lambda at=followed: all(one.since(at) >= 6 or one.faults for one in asking), "answers behind it")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert [one.faults for one in asking] == [[], []], "no request is refused: the model made both"

    own = {generation: {COMMON, text} for generation, text in OWN.items()}
    counts = {generation: 0 for generation in OWN}
    for began, ended, texts in (answer for one in asking for answer in one.answers):
        assert texts in own.values(), "an answer is of one generation"
        (generation,) = (one for one, both in own.items() if texts == both)
        before = [to for _, followed, to in switches if followed < began][-1:] or [OLD]
        during = [to for promoted, followed, to in switches if promoted < ended and followed >= began]
        assert generation in (*before, *during), "of the one that was live, or became so while it was made"
        counts[generation] += 1
    assert min(counts.values()) >= 6
    for text, numbers in bench.model.seen:
        generation = NEW if OWN[NEW] in text else OLD
        assert numbers <= {NUMBERS[generation]}, "the KV is of the generation that the chunks are of"
    assert {number for _, numbers in bench.model.seen for number in numbers} == set(NUMBERS.values())


def test_an_answer_that_is_under_way_ends_on_the_generation_that_it_began_with(replicas, bench):
    """The replica has gone over; what was retrieved and loaded before is of the old one to its last token."""
    (record, client), _ = replicas
    bench.model.hold_at = 1
    answers = []
    body = {"question": QUESTION, "k": 8, "cache_mode": "reuse", "stream": True}
    asking = threading.Thread(target=lambda: answers.append(events(client.post("/v1/answer", json=body))))
    asking.start()
    assert bench.model.held.acquire(timeout=20), "it has said its first word"
    bench.model.hold_at = None
    record.promote(OTHER)
    with httpx.Client(base_url=client.base_url, timeout=30) as other:
        until(lambda: serves(other, OTHER), "the replica has gone over")
        new = other.post("/v1/answer", json=body | {"stream": False}).json()
    assert {citation["text"] for citation in new["citations"]} == {COMMON, OWN[NEW]}
    bench.model.hold.set()
    asking.join()
    (name, done) = answers[0][-1]
    assert name == "done"
    assert {citation["text"] for citation in done["citations"]} == {COMMON, OWN[OLD]}
    assert done["answer"] == "It is so."
    assert [numbers for _, numbers in bench.model.seen] == [{NUMBERS[OLD]}, {NUMBERS[NEW]}]
