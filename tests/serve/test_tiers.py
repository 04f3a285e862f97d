"""Tiers in memory: a second question costs no read, and nothing outlives the document that it came from.

That an answer is never stale does not depend on the tail: it is tried with the tail late, away, and absent.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from schemas.errors import BlobError
from schemas.head import DocumentState
from schemas.ids import DocumentKey
from schemas.receipt import ReceiptPart, Stage
from serve import BackgroundServer
from serve.tail import CommitTail
from stores.receipts import Receipts
from stores.replicas import LEASE_S, Replicas
from tests.serve.fakes import metric, until
from tests.serve.scripted import GENERATION

TEXTS = ("The lake is deep.", "The lake is deep and cold.", "The lake is deep and cold and blue.")
LAKE = DocumentKey("default", "lake")
NEVER_S = 3600.0


def ask(client, mode="reuse", question="How deep is the lake?", **fields):
    headers = fields.pop("headers", None)
    body = {"question": question, "cache_mode": mode, "k": 3} | fields
    return client.post("/v1/answer", json=body, headers=headers).json()


def of_tier(client, name, tier, generation=GENERATION):
    """A metric of a tier."""
    return metric(client, f'kvquilt_{name}{{generation="{generation.name}",tier="{tier}"}}')


def host(client):
    return client.kvquilt.service.tiers.host


def rows(client):
    return client.kvquilt.service.tiers.prefixes


def followed(client):
    """Wait until the tail reads: from then on records drop, and heads are not read for it."""
    until(lambda: client.kvquilt.service.tiers.followed, "the commits topic is followed")


@pytest.fixture
def lake(bench):
    bench.corpus.put("lake", *TEXTS)
    return bench


def test_a_second_question_costs_no_read_and_the_answer_says_where_its_kv_came_from(client, lake):
    """The checksum of a chunk takes as long as the read."""
    assert ask(client)["tiers"] == {"object": 3}
    again = ask(client, question="How cold is the lake?")
    assert again["tiers"] == {"host": 3}
    assert [citation["source"] for citation in again["citations"]] == ["cached"] * 3
    assert len(lake.blobs.reads) == 3
    assert host(client).nbytes == sum(lake.corpus.artifact(c.chunk).nbytes for c in lake.parts.index.chunks(LAKE))
    assert of_tier(client, "tier_hits_total", "host") == 3
    assert of_tier(client, "tier_misses_total", "host") == 3
    assert of_tier(client, "kv_bytes", "host") == host(client).nbytes


def test_exact_rows_are_a_tier_of_their_own(client, lake):
    ask(client, "exact")
    assert ask(client, "exact")["tiers"] == {"prefix": 3}
    assert of_tier(client, "tier_hits_total", "prefix") == 3


def test_without_bytes_nothing_is_kept(start, lake):
    client = start(host_tier_bytes=0)
    ask(client)
    assert ask(client)["tiers"] == {"object": 3}


def test_what_does_not_fit_makes_room_and_is_counted(start, lake):
    one = lake.corpus.artifact(lake.parts.index.chunks(LAKE)[2].chunk).nbytes
    client = start(host_tier_bytes=one + one // 2)
    for question in TEXTS:
        ask(client, question=question, k=1)
    assert 0 < host(client).nbytes <= one + one // 2
    until(lambda: of_tier(client, "kv_evictions_total", "host") >= 1, "evictions are counted")


@pytest.mark.parametrize("state", DocumentState)
def test_a_commit_that_passes_drops_the_document_from_both_tiers(start, lake, state):
    """The heads are not read for it: a service would ask for every document that it holds, again and again."""
    lake.corpus.put("hill", "The hill by the lake is deep in snow.")
    client = start(tier_check_s=NEVER_S)
    ask(client, k=4)
    followed(client)
    ask(client, "exact", k=4)
    assert host(client).owners() == rows(client).owners() == {(LAKE, 1), (DocumentKey("default", "hill"), 1)}
    lake.commits.publish("lake", 2, state)
    until(lambda: host(client).owners() == {(DocumentKey("default", "hill"), 1)}, "the host tier lets go")
    until(lambda: LAKE not in {document for document, _ in rows(client).owners()}, "the rows go")
    assert of_tier(client, "tier_drops_total", "host") == 3
    assert of_tier(client, "tier_drops_total", "prefix") >= 1


def test_every_replica_sees_every_record(start, lake):
    """Readers of one group would divide the records between them."""
    clients = [start(tier_check_s=NEVER_S) for _ in range(3)]
    for client in clients:
        ask(client)
        followed(client)
    lake.commits.publish("lake", 1, DocumentState.DELETED)
    for client in clients:
        until(lambda client=client: len(host(client)) == 0, "this replica lets go, too")


def test_a_record_of_another_generation_drops_nothing(client, lake):
    """While an index is rebuilt beside the live one, both generations commit the same documents."""
    ask(client)
    followed(client)
    other = GENERATION.model_copy(update={"chunk_max_tokens": 64})
    lake.commits.publish("lake", 9, generation=other.name)
    lake.commits.publish("hill", 2)
    tail = client.kvquilt.service.tail
    until(lambda: sum((tail._positions or {}).values()) == 2, "both records have passed")
    assert len(host(client)) == 3


def test_a_load_that_ends_after_its_documents_record_is_not_kept(start, lake):
    """The record has passed, so nothing would drop it again."""
    client = start(tier_check_s=NEVER_S)
    client.post("/v1/retrieve", json={"question": "lake"})
    followed(client)
    lake.blobs.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client)
        until(lambda: len(lake.blobs.reads) == 3, "the artifacts are being read")
        lake.commits.publish("lake", 2)
        tail = client.kvquilt.service.tail
        until(lambda: sum((tail._positions or {}).values()) == 1, "the record has passed")
        lake.blobs.gate.set()
        assert answer.result()["tiers"] == {"object": 3}
    assert len(host(client)) == 0


@pytest.mark.parametrize("away", [False, True])
def test_cap_03_a_stale_entry_is_never_served_however_late_the_tail_is(start, lake, away):
    """Visibility is decided by the heads at each question; the tail only frees memory."""
    lake.commits.away = away
    client = start(tier_check_s=NEVER_S)
    ask(client)
    ask(client, "exact")
    if not away:
        followed(client)
    lake.corpus.put("lake", *(text.replace("deep", "dry") for text in TEXTS), version=2)
    for mode in ("reuse", "exact"):
        body = ask(client, mode, question="How dry is the lake?")
        assert {citation["version"] for citation in body["citations"]} == {2}
        assert "host" not in body["tiers"]
        assert "prefix" not in body["tiers"]
    lake.corpus.flip("lake", 3, state=DocumentState.DELETED, n_chunks=0)
    assert ask(client)["citations"] == []
    assert away or (LAKE, 1) in host(client).owners(), "no record has passed"
    assert metric(client, 'kvquilt_stale_served_total{kind="kv"}') == 0


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("state", DocumentState)
def test_while_the_topic_cannot_be_read_the_heads_decide_what_stays(start, lake, absent, state):
    """A broker that is away must not keep a deleted document in memory."""
    lake.commits.away = True
    if absent:
        lake.parts = dataclasses.replace(lake.parts, commits=None)
    client = start(tier_check_s=0.02)
    ask(client)
    ask(client, "exact")
    assert len(host(client)) == 3
    lake.corpus.flip("lake", 2, state=state, n_chunks=0)
    until(lambda: host(client).owners() == rows(client).owners() == set(), "what is not live any more goes")
    assert not client.kvquilt.service.tiers.followed


def test_a_broker_that_comes_back_is_followed_after_the_heads_were_read(start, lake):
    """What was committed while it was away was not seen."""
    lake.commits.away = True
    client = start(tier_check_s=0.02)
    ask(client)
    lake.commits.away = False
    followed(client)
    assert len(host(client)) == 3
    lake.commits.publish("lake", 2)
    until(lambda: len(host(client)) == 0, "it reads again")
    lake.commits.away = True
    until(lambda: not client.kvquilt.service.tiers.followed, "silence is noticed")


def test_a_damaged_artifact_is_never_kept(client, lake):
    """Kept, it would be served without a check for as long as the process lives."""
    chunk = lake.parts.index.chunks(LAKE)[0]
    path = lake.parts.kv.path(LAKE, chunk.kv_key)
    whole = bytes(lake.blobs.get(path))
    lake.blobs.delete([path])
    assert lake.blobs.put_new(path, whole[:-1] + bytes([whole[-1] ^ 1]))
    assert ask(client)["fallback"] == {"checksum": 1}
    assert len(host(client)) == 2
    lake.blobs.delete([path])
    assert lake.blobs.put_new(path, whole)
    body = ask(client)
    assert (body["fallback"], body["tiers"]) == ({}, {"host": 2, "object": 1})


def test_api_04_tenants_do_not_share_what_is_in_memory(start, bench):
    """The time to the first token would tell one tenant what another has asked."""
    for tenant in ("a", "b"):
        bench.corpus.put("lake", *TEXTS, tenant=tenant)
    client = start(api_keys={"key-a": "a", "key-b": "b"})
    a, b = ({"authorization": f"Bearer key-{tenant}"} for tenant in "ab")
    ask(client, headers=a)
    assert ask(client, headers=b)["tiers"] == {"object": 3}
    assert ask(client, headers=a)["tiers"] == {"host": 3}


def test_what_an_answer_uses_stays_until_the_answer_is_complete(start, lake):
    """Else the tier would take in more while the rows are still in memory, and its bytes would be no bound."""
    lake.model.hold_at = 1
    client = start()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client)
        lake.model.held.acquire()
        entries = host(client)._entries.values()
        assert [entry.pins for entry in entries] == [1, 1, 1]
        lake.model.hold.set()
        answer.result()
    until(lambda: [entry.pins for entry in entries] == [0, 0, 0], "the pins come off")


def test_a_replica_says_that_it_keeps_something_before_it_does_and_takes_it_back_at_the_end(settings, lake):
    """A receipt would say COMPLETE while a replica that nobody knows of holds the document."""
    replicas = Replicas(lake.blobs, GENERATION.name)
    with BackgroundServer(settings, lake.parts) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        client.post("/v1/answer", json={"question": "lake"})
        assert [one.name for one in replicas.live()] == [server.app.state.kvquilt.service.tail.name]
    assert replicas.live() == []


def test_a_replica_that_cannot_say_so_keeps_nothing(start, lake):
    """A store that may only be read from is no reason not to answer."""

    def refused(key, data):
        raise BlobError("403")

    lake.blobs.put_new = refused
    client = start()
    assert ask(client)["tiers"] == {"object": 3}
    assert ask(client)["tiers"] == {"object": 3}
    assert len(host(client)) == 0


def noted(lake, stage, message=None):
    return Receipts(lake.blobs).note(
        ReceiptPart(
            tenant="default", doc_id="lake", version=2, generation=GENERATION.name, stage=stage, asked_ms=1,
            at_ms=10**15, found={}, left={},
            partition=message and message.partition, offset=message and message.offset,
        )
    )  # fmt: skip


def test_a_receipt_waits_for_the_replica_and_the_replica_closes_it(start, lake):
    """PREFILL is through before the replica has said that it is: somebody has to come back to the receipt."""
    client = start(tier_check_s=NEVER_S)
    ask(client)
    followed(client)
    for stage in (Stage.FOUND, Stage.INDEX):
        noted(lake, stage)
    lake.corpus.flip("lake", 2, state=DocumentState.DELETED, n_chunks=0)
    for chunk in lake.parts.index.chunks(LAKE, 1):
        lake.parts.kv.delete(LAKE, [chunk.kv_key])
    lake.parts.index.delete(lake.parts.index.stale_chunk_ids(LAKE, 3))
    message = lake.commits.publish("lake", 2, DocumentState.DELETED)
    noted(lake, Stage.PREFILL, message)
    receipts = Receipts(lake.blobs)
    until(lambda: receipts.get(LAKE, 2, GENERATION.name) is not None, "the replica closes it", timeout_s=30)
    receipt = receipts.get(LAKE, 2, GENERATION.name)
    assert receipt.state == "COMPLETE"
    assert [(c.tier, c.replicas, c.passed, c.dropped) for c in receipt.tiers] == [
        ("host", 1, 1, 3),
        ("prefix", 1, 1, 0),
    ]
    got = client.get("/v1/documents/lake/receipt").json()
    assert got["tiers"][0] == {"tier": "host", "replicas": 1, "passed": 1, "dropped": 3}


def test_a_replica_whose_word_has_run_out_keeps_nothing_although_its_tail_hangs(start, lake):
    """No receipt waits for it any more, so it must not hold a deleted document until a call of a store comes back."""
    client = start(tier_check_s=0.02)
    ask(client)
    followed(client)
    tail: CommitTail = client.kvquilt.service.tail
    hangs, release = threading.Event(), threading.Event()
    tail._check = lambda: (hangs.set(), release.wait(20))
    try:
        assert hangs.wait(10)
        assert len(host(client)) == 3
        tail._spoken_s -= LEASE_S + 1
        until(lambda: len(host(client)) == 0, "nothing is kept")
        assert not client.kvquilt.service.tiers.is_open
    finally:
        release.set()
    until(lambda: client.kvquilt.service.tiers.is_open, "it gives its word again")


def test_many_open_receipts_do_not_keep_the_tail_from_its_other_work(start, lake):
    """They are looked at in turn, a few at a time: meanwhile records pass, and the replica's word is given."""
    tiers = start().kvquilt.service.tiers
    tail = CommitTail(lake.parts, tiers, tiers._telemetry, NEVER_S, settle_s=0.0)
    for name in ("a", "b", "c"):
        tail._take(lake.commits.publish(name, 2, DocumentState.DELETED))
    tail._deleted = False
    for left in (2, 1, 0):
        tail._close_receipts()
        assert len(tail._round) == left
    assert len(tail._open) == 3, "they stay open, and are looked at again when it is time"
    tail._close_receipts()
    assert len(tail._round) == 0


def test_a_tail_that_fails_empties_the_tiers(start, lake, caplog):
    """What nobody looks after any more must not stay."""
    client = start(tier_check_s=0.02)
    ask(client)
    followed(client)

    def broken():
        raise RuntimeError("a bug of ours")

    tail: CommitTail = client.kvquilt.service.tail
    tail._check = broken
    until(lambda: len(host(client)) == 0, "nothing is kept")
    assert ask(client)["tiers"] == {"object": 3}
    assert "a bug of ours" in caplog.text
