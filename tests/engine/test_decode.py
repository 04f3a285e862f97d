"""Generation: the loop, the sampler, the stream of text."""

from __future__ import annotations

import pytest
import torch

from engine.decode import Detokenizer, Sampler, SamplingParams
from engine.hf_adapter import ATTENTION
from engine.model import Model
from tests.engine.conftest import REUSABLE, byte_tokenizer, tiny_model
from tests.engine.test_stitched_equals_masked_prefill import LENS, chunk_ids, plan_of


@pytest.mark.parametrize("name", ["llama", "qwen3 k_norm", "phi partial", "cohere interleaved", "llama yarn"])
def test_eng_07_exact_mode_equals_greedy_generate_of_transformers(name: str) -> None:
    """Positions of decoded tokens come from us; `generate()` with a foreign cache infers wrong ones, silently."""
    model = tiny_model(REUSABLE[name]())
    plan = plan_of(model, LENS)
    ours = [step.token_id for step in model.generate(plan, None, SamplingParams(max_tokens=24))]
    module = model._hf.module
    module.set_attn_implementation("eager")
    ids = torch.tensor([plan.token_ids])
    with torch.no_grad():
        theirs = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    module.set_attn_implementation(ATTENTION)
    assert ours == theirs[0, plan.n_tokens :].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3 two tables"])
def test_with_one_chunk_reuse_generates_what_exact_generates(name: str) -> None:
    model = tiny_model(REUSABLE[name]())
    plan = plan_of(model, (40,))
    base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    params = SamplingParams(max_tokens=24)
    assert list(model.generate(plan, base, params)) == list(model.generate(plan, None, params))


def test_answers_longer_than_the_room_that_was_set_aside_go_on(llama: Model) -> None:
    """Slots run out in the middle of an answer: more are found, and nothing changes."""
    plan = plan_of(llama, LENS)
    rows = llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan))
    answers = []
    for room in (0, 500):
        base = llama.stitch(plan, rows, room=room)
        answers.append([step.token_id for step in llama.generate(plan, base, SamplingParams(max_tokens=200))])
    assert answers[0] == answers[1]


def test_the_last_step_says_why_it_is_the_last(llama: Model) -> None:
    plan = plan_of(llama, LENS)
    steps = list(llama.generate(plan, None, SamplingParams(max_tokens=5)))
    assert [step.finish_reason for step in steps] == [None, None, None, None, "length"]
    stops = llama.tokenizer.stop_ids
    try:
        llama.tokenizer.stop_ids = frozenset([steps[2].token_id])
        stopped = list(llama.generate(plan, None, SamplingParams(max_tokens=5)))
    finally:
        llama.tokenizer.stop_ids = stops
    assert stopped[-1].finish_reason == "stop"
    assert stopped[-1].text == ""
    assert len(stopped) <= 3


def test_the_context_length_ends_an_answer(llama: Model) -> None:
    """4096 positions are there; an answer does not go on behind them."""
    plan = plan_of(llama, (4000,), n_question=80, n_prefix=10)
    assert plan.n_tokens == 4091
    steps = list(llama.generate(plan, None, SamplingParams(max_tokens=100)))
    assert len(steps) <= 5
    assert steps[-1].finish_reason in ("length", "stop")


def test_cancelling_ends_the_stream_without_a_last_step(llama: Model) -> None:
    plan = plan_of(llama, LENS)
    asked = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > 3

    steps = list(llama.generate(plan, None, SamplingParams(max_tokens=50), cancelled))
    assert len(steps) == 3
    assert steps[-1].finish_reason is None


def test_closing_the_stream_gives_its_slots_back(llama: Model) -> None:
    plan = plan_of(llama, LENS)
    base = llama.stitch(plan, llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    for _ in range(3):
        stream = llama.generate(plan, base, SamplingParams(max_tokens=50))
        next(stream)
        stream.close()
    rows = base.open(1)
    assert len(rows._views) == 1, "the slots behind the base were not given back"


def test_greedy_takes_the_largest_and_seeds_repeat() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert Sampler(SamplingParams()).choose(logits) == 1
    params = SamplingParams(temperature=1.0, seed=7)
    draws = [[sampler.choose(logits) for _ in range(50)] for sampler in (Sampler(params), Sampler(params))]
    assert draws[0] == draws[1]
    assert set(draws[0]) == {0, 1, 2}


def test_top_p_never_takes_what_lies_outside() -> None:
    """Shares .5, .3, .15, .05: top_p .6 keeps the first two, and .1 still keeps the first."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    for top_p, kept in ((0.6, {1, 3}), (0.1, {1}), (0.95, {0, 1, 3})):
        sampler = Sampler(SamplingParams(temperature=1.0, top_p=top_p, seed=1))
        assert {sampler.choose(logits) for _ in range(300)} == kept


@pytest.mark.parametrize("small", [1e-38, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_the_smallest_temperature_and_top_p_take_the_most_likely_token(name: str, small: float) -> None:
    """Bug: in float32 they were 0, and shares of inf or of nothing at all were drawn from: a 500."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 50
    logits[7] = float("-inf")
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 1, name: small}))  # type: ignore[arg-type]
    assert {sampler.choose(logits) for _ in range(50)} == {int(logits.argmax())}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must not be negative"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
    ],
)
def test_wrong_sampling_parameters_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語のテキスト", "a👩‍👩‍👧b", "�", "x\n\n  y"])
def test_streamed_text_never_holds_half_a_character(text: str) -> None:
    """One id per byte: every character beyond ASCII comes in pieces."""
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer.decode)
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() in (text, text.rstrip("�"))
    assert all("�" not in piece for piece in pieces)


def test_an_answer_that_ends_inside_a_character_ends_before_it() -> None:
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer.decode)
    ids = tokenizer.encode("ab日")[:-1]
    assert "".join(stream.add(token) for token in ids) + stream.finish() == "ab"
