"""A session gives the logits that one plain pass over prompt and answer gives, in any order of extending it."""

from __future__ import annotations

import torch

from engine.model import Model
from engine.plan import Plan, Segment, Source
from tests.engine.conftest import random_ids
from tests.engine.test_stitched_equals_masked_prefill import (
    BOUND,
    LENS,
    causal_logits,
    chunk_ids,
    error,
    masked_logits,
    plan_of,
)

ANSWER = random_ids(9, seed=77)


def followed_by(plan: Plan, ids: tuple[int, ...]) -> Plan:
    """The prompt with `ids` behind its question."""
    n = plan.n_tokens
    last = Segment(plan.segments[-1].start, n + len(ids), Source.FRESH)
    return Plan((*plan.token_ids, *ids), (*plan.segments[:-1], last))


def test_an_answer_all_at_once_or_token_by_token_is_the_plain_pass(llama: Model) -> None:
    """Teacher forcing in one pass, and again from the middle with other ids over rows that were there before."""
    plan = plan_of(llama, LENS)
    truth = causal_logits(llama, followed_by(plan, ANSWER))[plan.n_tokens - 1 :]
    with llama.session(plan, None, room=2) as session:
        assert error(session.prompt(), truth[0]) < BOUND
        assert error(session.extend(ANSWER), truth[1:]) < BOUND
        others = (*ANSWER[:4], *random_ids(3, seed=5))
        changed = causal_logits(llama, followed_by(plan, others))[plan.n_tokens :]
        assert error(session.extend(others[4:], 4), changed[4:]) < BOUND
        assert error(changed[4:], truth[5:8]) > 100 * BOUND
        for number, token in enumerate(ANSWER):
            assert error(session.extend([token], number)[0], truth[number + 1]) < BOUND


def test_over_stitched_and_repaired_rows_too(llama: Model) -> None:
    plan = plan_of(llama, LENS)
    base = llama.stitch(plan, llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    masked = masked_logits(llama, followed_by(plan, ANSWER))[-len(ANSWER) - 1 :]
    with llama.session(plan, base) as session:
        assert error(session.prompt(), masked[0]) < BOUND
        assert error(session.extend(ANSWER), masked[1:]) < BOUND
    everything = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in plan.chunks])
    full = causal_logits(llama, followed_by(plan, ANSWER))[plan.n_tokens - 1 :]
    with llama.session(plan, base, repair=everything, room=1) as session:
        assert error(session.prompt(), full[0]) < BOUND
        assert error(session.extend(ANSWER), full[1:]) < BOUND


def test_a_prompt_of_several_passes(llama: Model) -> None:
    plan = plan_of(llama, (1500, 900), n_question=20)
    with llama.session(plan, None) as session:
        assert error(session.prompt(), causal_logits(llama, plan)[-1]) < BOUND
