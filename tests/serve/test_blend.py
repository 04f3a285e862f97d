"""Mode `blend`: the certificate decides what is repaired; without one the answer is exact and says so."""

from __future__ import annotations

import threading
from itertools import chain, repeat

import pytest

from schemas.errors import BlobError
from serve import blend
from tests.serve.fakes import certificate, metric, until
from tests.serve.scripted import COVERS, PREFIX

ASK = {"question": "How deep is the lake?", "cache_mode": "blend", "k": 3}
TEXTS = ("The lake is deep.", "The lake is cold.", "The lake is blue.")
ROWS = (
    ("shared_prefix", "none", 0.0, 0.2),
    ("shared_prefix", "epic", 0.1, 0.06),
    ("shared_prefix", "closure", 0.1, 0.04),
    ("shared_prefix", "closure", 0.2, 0.02),
    ("shared_prefix", "infoflow", 0.2, 0.03),
    ("fused", "none", 0.0, 0.01),
)


@pytest.fixture
def certified(bench):
    bench.certificates.append(certificate(*ROWS))
    bench.corpus.put("lake", *TEXTS)
    return bench


def ask(client, **fields):
    return client.post("/v1/answer", json=ASK | fields)


def test_blend_takes_the_cheapest_certified_policy_and_counts_what_it_repairs(client, certified):
    """The KL of the whole table is worth nothing if serving takes another row of it."""
    body = ask(client).json()
    assert (body["cache_mode"], body["policy"], body["budget"], body["note"]) == ("blend", "closure", 0.1, None)
    chunk_tokens = sum(map(len, TEXTS))
    usage = body["usage"]
    assert usage["repaired_tokens"] == round(0.1 * chunk_tokens)
    assert usage["reused_tokens"] == len(PREFIX) + chunk_tokens - usage["repaired_tokens"]
    assert usage["reused_tokens"] + usage["repaired_tokens"] + usage["fresh_tokens"] == usage["prompt_tokens"]
    assert certified.model.selected == [("closure", 0.1, True)]
    assert certified.model.repaired == [usage["repaired_tokens"]]
    assert metric(client, 'kvquilt_repaired_tokens_total{policy="closure"}') == usage["repaired_tokens"]
    assert metric(client, 'kvquilt_ttft_seconds_count{cache_mode="blend",model="smollm2"}') == 1


def test_selection_and_repair_have_their_own_times(client, certified):
    timing = ask(client).json()["timing"]
    parts = [timing[f"{part}_s"] for part in ("retrieve", "load", "stitch", "select", "repair")]
    assert 0 < sum(parts) <= timing["ttft_s"]
    assert timing["select_s"] > 0
    assert timing["repair_s"] > 0 == timing["first_step_s"], "one pass computes repaired and open rows"


@pytest.mark.parametrize(
    ("fields", "used"),
    [
        ({"policy": "infoflow"}, ("infoflow", 0.2)),
        ({"policy": "closure", "budget": 0.15}, ("closure", 0.15)),
        ({"budget": 0.5}, ("closure", 0.5)),
    ],
    ids=str,
)
def test_a_request_may_choose_within_what_is_certified(client, certified, fields, used):
    body = ask(client, **fields).json()
    assert (body["cache_mode"], body["policy"], body["budget"]) == ("blend", *used)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"policy": "prophet"}, "no method of policy prophet is certified to stay under KL 0.05"),
        ({"policy": "epic"}, "the cheapest that is: closure at 0.1"),
        ({"policy": "closure", "budget": 0.05}, "no method of policy closure within budget 0.05 is certified"),
        ({"budget": 0.0}, "no method within budget 0 is certified"),
    ],
    ids=str,
)
def test_what_is_not_certified_is_answered_exactly_and_says_so(client, certified, fields, reason):
    """A caller who asks for less than what was measured to be good gets a right answer and a reason."""
    body = ask(client, **fields).json()
    assert (body["cache_mode"], body["policy"], body["usage"]["repaired_tokens"]) == ("exact", "full", 0)
    assert body["note"].startswith("Answered in exact mode: ")
    assert reason in body["note"]
    assert certified.model.stitched_rows == []


def test_kv_12_a_model_without_a_certificate_is_answered_exactly_and_says_so(client, bench):
    """Nobody knows how wrong an uncertified blend is."""
    bench.corpus.put("lake", *TEXTS)
    body = ask(client).json()
    assert body["cache_mode"] == "exact"
    assert "there is no valid certificate for this model and prompt. `kvquilt verify` makes one" in body["note"]
    assert bench.blobs.reads == [], "nothing is loaded that is not used"


@pytest.mark.parametrize("changed", ["fingerprint", "tokenizer_sha256", "template_sha256", "company_sha256", "kvquilt"])
def test_a_certificate_of_another_state_counts_as_none(client, bench, changed):
    """Numbers measured with another model, tokenizer, prompt or code say nothing of this one."""
    bench.corpus.put("lake", *TEXTS)
    bench.certificates.append(certificate(*ROWS, **{changed: "other"}))
    body = ask(client).json()
    assert body["cache_mode"] == "exact"
    assert "it was made for another state of" in body["note"]


def test_a_certificate_that_is_made_while_the_service_runs_is_found(client, bench, monkeypatch):
    """Whoever follows the note's advice should not have to guess that a restart is needed."""
    monkeypatch.setattr(blend, "_LOOK_AGAIN_S", 0.0)
    bench.corpus.put("lake", *TEXTS)
    assert ask(client).json()["cache_mode"] == "exact"
    bench.certificates.append(certificate(*ROWS))
    assert ask(client).json()["cache_mode"] == "blend"


@pytest.mark.parametrize("policy", ["composite", "of another release"])
def test_a_certified_policy_that_cannot_be_served_is_passed_over(client, bench, policy):
    """Bug: the cheapest row was of a policy that wants prompts of its own layout, and every blend was a 400."""
    bench.corpus.put("lake", *TEXTS)
    bench.certificates.append(certificate(("shared_prefix", policy, 0.05, 0.01), *ROWS))
    body = ask(client).json()
    assert (body["cache_mode"], body["policy"], body["budget"]) == ("blend", "closure", 0.1)
    if policy == "composite":
        body = ask(client, policy=policy).json()
        assert body["cache_mode"] == "exact"
        assert "no method of policy composite is certified" in body["note"]
        assert "the cheapest that is: closure at 0.1" in body["note"]


def test_a_certificate_that_was_replaced_while_the_service_runs_is_read_again(client, certified, monkeypatch):
    """Bug: `kvquilt verify` had found the blend too far off, and the service went on with it until its restart."""
    monkeypatch.setattr(blend, "_RENEW_S", 0.0)
    assert ask(client).json()["policy"] == "closure"
    certified.certificates[:] = [certificate(("shared_prefix", "epic", 0.2, 0.01))]
    until(lambda: ask(client).json()["policy"] == "epic", "the new one holds")
    certified.certificates.clear()
    until(lambda: ask(client).json()["cache_mode"] == "exact", "it was taken back")


def test_a_valid_certificate_outlives_its_store(monkeypatch):
    """A store that is away, or slow, says nothing about the model."""
    monkeypatch.setattr(blend, "_RENEW_S", 0.0)
    valid, go = certificate(*ROWS), threading.Event()

    def away():
        raise BlobError("no bucket")

    answers = chain([lambda: [valid], away, lambda: go.wait(20) and []], repeat(lambda: []))
    known = blend.Certificates(COVERS, lambda: next(answers)())
    for _ in range(3):  # read; away; slow, which no question waits for
        assert known.current() == (valid, "")
        if known._renewing is not None and not go.is_set():
            known._renewing.join(0.2)
    assert known.current() == (valid, "")
    go.set()
    until(lambda: known.current()[0] is None, "the store said at last that there is none")


def test_a_model_that_refuses_reuse_is_not_blended(client, certified):
    certified.model.reuse_refusal = "its rotary layout is not known."
    assert ask(client).json()["note"] == "Answered in exact mode: its rotary layout is not known."


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"policy": "magic"}, "policy", "unknown_policy"),
        ({"budget": 1.5}, "budget", "invalid_value"),
        ({"budget": -0.1}, "budget", "invalid_value"),
        ({"budget": "much"}, "budget", "invalid_value"),
        ({"budget": 0.1, "cache_mode": "reuse"}, "budget", "invalid_value"),
        ({"policy": "closure", "cache_mode": "exact"}, "policy", "invalid_value"),
    ],
    ids=str,
)
def test_an_unknown_policy_and_a_budget_that_is_no_share_are_refused(client, certified, fields, param, code):
    """A field that is ignored looks like a field that works."""
    response = ask(client, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
