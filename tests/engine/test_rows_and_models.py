"""Sharing, replacing and refusing: what the rows of a request guarantee, and which models are not reused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from engine.decode import SamplingParams
from engine.hf_adapter import read_config
from engine.model import Model
from engine.plan import PlannedChunk, plan_prompt
from engine.rows import Base, KvRows, Part, WorkingRows
from schemas.errors import Cancelled, InputError, RequestError, UnsupportedModelError
from tests.engine.conftest import REUSABLE, SHAPE, VOCAB, random_ids, template_of, tiny_model
from tests.engine.test_stitched_equals_masked_prefill import BOUND, LENS, causal_logits, chunk_ids, error, plan_of


def test_eng_04_a_ragged_batch_equals_single_runs() -> None:
    """Chunks of other lengths in the same pass, or another split into passes, change nothing but rounding."""
    for name in ("llama", "glm interleaved partial", "gpt_neox partial fused"):
        model = tiny_model(REUSABLE[name]())
        plan = plan_of(model, LENS)
        together = model.prefill_chunks(plan.prefix_ids, chunk_ids(plan))
        for batch_tokens in (1, 16):
            apart = model.prefill_chunks(plan.prefix_ids, chunk_ids(plan), batch_tokens=batch_tokens)
            for a, b in zip(together, apart, strict=True):
                torch.testing.assert_close(a.k, b.k, rtol=0, atol=1e-5 * float(b.k.abs().max()))
                torch.testing.assert_close(a.v, b.v, rtol=0, atol=1e-5 * float(b.v.abs().max()))


@pytest.mark.parametrize("name", REUSABLE)
@torch.inference_mode()
def test_a_pass_for_rows_alone_leaves_the_last_layer_when_it_has_them(name: str) -> None:
    """What follows the last layer's rows is read by nobody: its attention and its MLP are not computed."""
    model = tiny_model(REUSABLE[name]())
    ids, positions = torch.tensor(random_ids(9, seed=1)), torch.arange(9)

    def rows_of(run: Callable[..., None]) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        layers: list[int] = []

        class Watched(WorkingRows):
            def attend(self, layer: int, *rest: Any) -> torch.Tensor:
                layers.append(layer)
                return super().attend(layer, *rest)

        rows = Base(Part(model._like, 9)).open(0)
        rows.__class__ = Watched
        rows.begin(positions)
        run(ids, positions, rows)
        return layers, *rows.own

    layers, k, v = rows_of(model._hf.run)
    all_layers, all_k, all_v = rows_of(model._hf.look)
    assert layers == list(range(model.spec.n_layers - 1))
    assert all_layers == list(range(model.spec.n_layers))
    assert torch.equal(k, all_k)
    assert torch.equal(v, all_v)


def test_the_pace_of_chunk_prefill_is_known_from_the_start_and_follows_what_answers_wait_for() -> None:
    """Passes in the background give way to others, and a few tokens cost as much as many: neither tells the pace."""
    model = tiny_model(REUSABLE["llama"]())
    assert model.prefill_pace_s is None
    model.precompute(random_ids(5, seed=1))
    known = model.prefill_pace_s
    assert known is not None
    assert known > 0
    model.prefill_chunks((), [random_ids(80, seed=2)])
    model.precompute(random_ids(5, seed=3))
    for n_tokens, told in ((20, False), (80, True)):
        plan = plan_of(model, (n_tokens,))
        model.stitch(plan, [None])
        assert (model.prefill_pace_s != known) is told


def test_eng_02_a_model_whose_frequencies_change_with_the_length_is_served_up_to_there() -> None:
    """Beyond it a prompt in several passes, or over rows of chunks, would hold keys of both kinds, and tell nobody."""
    model = tiny_model(REUSABLE["phi3 longrope"]())
    assert model.max_tokens == 2048
    for too_long in (
        lambda plan: model.generate(plan, None, SamplingParams()),
        lambda plan: model.logits(plan, None),
        lambda plan: model.session(plan, None).__enter__(),
    ):
        with pytest.raises(RequestError, match="the model takes 2048"):
            too_long(plan_of(model, (2040,)))
    plan = plan_of(model, (2000,))
    assert error(model.logits(plan, None), causal_logits(model, plan)[-1:]) < BOUND


def test_eng_05_a_chunk_without_rows_gives_the_same_answer(llama: Model) -> None:
    """A failed read must not show: the chunk is computed the way its artifact would have been. Memory holds NaN."""
    plan = plan_of(llama, LENS)
    rows: list[KvRows | None] = list(llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    whole = llama.logits(plan, llama.stitch(plan, rows), keep=0)
    for missing in ([1], [0, 4], [0, 1, 2, 3, 4]):
        some = [None if n in missing else chunk for n, chunk in enumerate(rows)]
        assert error(llama.logits(plan, llama.stitch(plan, some), keep=0), whole) < BOUND


def test_requests_share_a_base_and_never_write_to_it(llama: Model) -> None:
    """The second request at a time gets slots of its own behind the same base rows."""
    plan = plan_of(llama, LENS)
    base = llama.stitch(plan, llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan)), room=8)
    before = [rows.clone() for rows in base.rows]
    params = SamplingParams(max_tokens=12)
    alone = [step.token_id for step in llama.generate(plan, base, params)]
    first, second = llama.generate(plan, base, params), llama.generate(plan, base, params)
    taken: list[list[int]] = [[], []]
    for _ in range(12):  # in turns, token by token
        for own, steps in zip(taken, (first, second), strict=True):
            step = next(steps, None)
            if step is not None:
                own.append(step.token_id)
    assert taken == [alone, alone]
    assert all(torch.equal(a, b) for a, b in zip(before, base.rows, strict=True))


def test_threads_share_one_model(llama: Model) -> None:
    plan = plan_of(llama, LENS)
    base = llama.stitch(plan, llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    expected = [step.token_id for step in llama.generate(plan, base, SamplingParams(max_tokens=8))]
    seen: list[list[int]] = []

    def answer() -> None:
        llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan), batch_tokens=16)
        seen.append([step.token_id for step in llama.generate(plan, base, SamplingParams(max_tokens=8))])

    threads = [threading.Thread(target=answer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 4


@pytest.mark.parametrize("name", ["llama", "gemma3 two tables", "cohere interleaved"])
def test_rows_computed_again_take_the_place_of_base_rows(name: str) -> None:
    """The repair operator: with every position computed again, a stitched base gives the full prefill."""
    model = tiny_model(REUSABLE[name]())
    plan = plan_of(model, LENS)
    base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    everything = torch.arange(plan.n_tokens)
    with torch.inference_mode():
        for order in (everything, everything.flip(0)[torch.randperm(plan.n_tokens)].sort().values):
            rows = base.open(plan.n_tokens)
            rows.begin(order)
            logits = model._hf.logits(torch.tensor(plan.token_ids)[order], order, rows, keep=0)
            rows.close()
            assert error(logits, causal_logits(model, plan)) < BOUND


def test_kv_rows_survive_the_way_through_bytes(llama: Model) -> None:
    """Read-only bytes become tensors without a copy and without a warning; odd sizes are refused."""
    plan = plan_of(llama, (9,))
    (rows,) = llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan))
    k, v = (bytes(part) for part in rows.to_bytes())
    again = KvRows.from_bytes(k, v, llama.fingerprint)
    assert torch.equal(again.k, rows.k)
    assert torch.equal(again.v, rows.v)
    assert again.n_tokens == 9
    with pytest.raises(ValueError, match="expected the same positive multiple of 384"):
        KvRows.from_bytes(k[:-4], v[:-4], llama.fingerprint)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.MistralConfig(**SHAPE, sliding_window=16), "sliding window of 16 tokens"),
        (
            tf.Qwen2Config(**{**SHAPE, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
            "sliding",
        ),
        (tf.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2), "exact mode only"),
        (tf.GPTJConfig(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, rotary_dim=8), "exact mode only"),
    ],
    ids=["mistral window", "qwen2 window", "gpt2 without rope", "gptj of an older build"],
)
def test_eng_01_a_model_we_cannot_rotate_is_refused_for_reuse_and_served_in_exact(
    config: tf.PreTrainedConfig, reason: str
) -> None:
    model = tiny_model(config)
    assert model.reuse_refusal is not None
    assert reason in model.reuse_refusal
    plan = plan_of(model, LENS)
    with torch.inference_mode():
        truth = model._hf.plain_logits(torch.tensor(plan.token_ids))  # the model's own masks, windows included
    assert error(model.logits(plan, None, keep=0), truth[5:]) < BOUND
    for refused in (
        lambda: model.prefill_chunks(plan.prefix_ids, chunk_ids(plan)),
        lambda: model.stitch(plan, [None] * 5),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            refused()


def test_a_model_whose_attention_we_lack_is_refused_altogether() -> None:
    """Better no answer than one from attention without its soft cap."""
    with pytest.raises(UnsupportedModelError, match="softcap"):
        tiny_model(tf.Gemma2Config(**SHAPE, head_dim=16))


def test_a_model_without_attention_is_refused_by_its_configuration(tmp_path: Path) -> None:
    tf.MambaConfig(vocab_size=VOCAB, num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="mamba is not a causal language model with attention"):
        read_config(tmp_path)


def test_api_03_a_stitch_whose_asker_is_gone_stops_between_two_passes(llama: Model) -> None:
    """Fresh chunks can take seconds: they must not be computed to the end for nobody."""
    plan = plan_of(llama, (700, 700, 700))
    answers = iter([False, True])
    with pytest.raises(Cancelled, match="given up"):
        llama.stitch(plan, [None] * 3, cancelled=lambda: next(answers))
    assert next(answers, None) is None, "one pass, then it asked again and stopped"


def test_ids_and_lengths_are_checked_before_the_model_sees_them(llama: Model) -> None:
    prefix = random_ids(5, 0)
    for chunk, message in (
        ((), "chunk 1 has no token ids"),
        ((VOCAB,), f"ids {VOCAB} to {VOCAB}; the model knows 0 to {VOCAB - 1}"),
        ((-1,), "ids -1 to -1"),
        (random_ids(4092, 1), "chunk 1 has 4092 tokens behind a prefix of 5; the model takes 4096"),
    ):
        with pytest.raises(InputError, match=message):
            llama.prefill_chunks(prefix, [(5,), chunk])
    plan = plan_prompt(template_of(llama), random_ids(4096, 2), [])
    with pytest.raises(RequestError, match="the prompt has 4101 tokens; the model takes 4096"):
        llama.generate(plan, None, SamplingParams())


def test_rows_that_do_not_fit_the_plan_are_refused(llama: Model) -> None:
    plan = plan_of(llama, (3, 4))
    rows = llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan))
    with pytest.raises(ValueError, match="the plan has 2 chunks, rows were given for 1"):
        llama.stitch(plan, rows[:1])
    with pytest.raises(ValueError, match=r"the plan's chunks have \[3, 4\] tokens, the rows \[4, 3\]"):
        llama.stitch(plan, rows[::-1])


def test_the_ids_that_were_prefilled_are_the_ids_that_are_served(llama: Model) -> None:
    """CHK-01: from chunk to plan nothing is tokenised again."""
    chunks = [random_ids(n, seed=n) for n in (4, 9)]
    plan = plan_prompt(template_of(llama), random_ids(2, 0), [PlannedChunk(ids, True) for ids in chunks])
    assert chunk_ids(plan) == chunks
