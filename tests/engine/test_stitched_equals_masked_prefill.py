"""The one claim that finds position, mask, hook and layout errors together.

Truth is one plain forward pass of transformers (eager attention, explicit additive mask): each chunk sees the prefix
and itself, separators and question see everything before them. The chunks were prefilled right behind the prefix and
keep that view of it wherever they are put. So that a plain pass can show them the same, its ids hold, for every
chunk, a copy of the prefix right in front of the chunk, at the positions before it, which nobody else sees:

    ids         prefix  (prefix' chunk0) sep  (prefix' chunk1) sep  question
    positions   0..P     s0-P..   s0..   e0    s1-P..   s1..   e1   ...
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.model import Model
from engine.plan import Plan, PlannedChunk, plan_prompt
from tests.engine.conftest import REUSABLE, random_ids, template_of, tiny_model

# fp32, three layers: rounding of sums taken in another order. In units of the largest logit. Measured 1e-6 and less;
# a key at a wrong position gives 1e-2 and more (`test_eng_04_keys_at_wrong_positions_would_be_seen`).
BOUND = 1e-5
LENS = (13, 2, 29, 1, 9)


def plan_of(model: Model, lens: tuple[int, ...], n_question: int = 6, n_prefix: int = 5) -> Plan:
    chunks = [PlannedChunk(random_ids(n, seed=number), True) for number, n in enumerate(lens)]
    return plan_prompt(template_of(model, n_prefix), random_ids(n_question, seed=99), chunks)


def chunk_ids(plan: Plan) -> list[tuple[int, ...]]:
    return [plan.token_ids[segment.start : segment.end] for segment in plan.chunks]


def masked_logits(model: Model, plan: Plan) -> torch.Tensor:
    """Logits of the open rows (separators and question), as the docstring of this file says."""
    n_prefix = plan.segments[0].end
    ids, positions, owners = [], [], []  # owner of a row: -1 all see it, 2n the copy for chunk n, 2n + 1 chunk n
    for segment in plan.segments:
        if segment.chunk is not None:
            ids += plan.prefix_ids
            positions += range(segment.start - n_prefix, segment.start)
            owners += [2 * segment.chunk] * n_prefix
        ids += plan.token_ids[segment.start : segment.end]
        positions += range(segment.start, segment.end)
        owners += [-1 if segment.chunk is None else 2 * segment.chunk + 1] * len(segment)
    position, owner = torch.tensor(positions), torch.tensor(owners)
    own, other = owner[:, None], owner[None, :]
    sees_chunk = (own == -1) & (other % 2 == 1)  # rows that all see are odd too: -1 % 2 == 1
    sees_own = (own == other) | ((own % 2 == 1) & (own >= 0) & (other == own - 1))
    visible = (position[None, :] <= position[:, None]) & (sees_chunk | sees_own)
    logits = plain_logits(model, ids, position, visible)
    at = torch.isin(position, torch.tensor(plan.open_positions)) & (owner == -1)
    return logits[at]


def causal_logits(model: Model, plan: Plan) -> torch.Tensor:
    """Logits `[n_tokens, vocab]` of a plain full prefill."""
    positions = torch.arange(plan.n_tokens)
    return plain_logits(model, plan.token_ids, positions, positions[None, :] <= positions[:, None])


def plain_logits(model: Model, ids: Sequence[int], positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    module = model._hf.module
    mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
    takes_one_mask_per_kind = getattr(module.config, "layer_types", None) is not None
    kinds = ("full_attention", "sliding_attention")
    module.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return module(
                input_ids=torch.tensor([ids]),
                attention_mask=dict.fromkeys(kinds, mask) if takes_one_mask_per_kind else mask,
                position_ids=positions[None],
                use_cache=False,
            ).logits[0]
    finally:
        module.set_attn_implementation("kvquilt")


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    assert not ours.isnan().any()
    return float((ours - truth).abs().max() / truth.abs().max())


@pytest.fixture(scope="module", params=list(REUSABLE))
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(REUSABLE[request.param]())


def test_no_family_is_refused(model: Model) -> None:
    assert model.reuse_refusal is None


def test_stitched_logits_equal_one_masked_prefill(model: Model) -> None:
    """Separator rows too: they stand between the chunks and see only what is before them."""
    plan = plan_of(model, LENS)
    base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    truth = masked_logits(model, plan)
    assert error(model.logits(plan, base, keep=0), truth) < BOUND
    assert error(causal_logits(model, plan)[list(plan.open_positions)], truth) > 100 * BOUND


def test_chunks_prefilled_alone_equal_the_block_diagonal_mask_over_the_same_ids(model: Model) -> None:
    """Without a prefix in view nothing needs a copy: one pass over the prompt itself, chunks blind to all else."""
    plan = plan_of(model, LENS)
    base = model.stitch(plan, model.prefill_chunks((), chunk_ids(plan)))
    position = torch.arange(plan.n_tokens)
    visible = position[None, :] <= position[:, None]
    for chunk in plan.chunks:
        visible[chunk.start : chunk.end, : chunk.start] = False
    truth = plain_logits(model, plan.token_ids, position, visible)[list(plan.open_positions)]
    assert error(model.logits(plan, base, keep=0), truth) < BOUND


def test_with_one_chunk_reuse_equals_full_prefill(model: Model) -> None:
    """One chunk behind the prefix sees all that it would see in a full prefill: reuse is then exact."""
    plan = plan_of(model, (23,))
    base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    truth = causal_logits(model, plan)[list(plan.open_positions)]
    assert error(model.logits(plan, base, keep=0), truth) < BOUND
    assert error(model.logits(plan, None, keep=1), truth[-1:]) < BOUND


def test_exact_equals_full_prefill(model: Model) -> None:
    plan = plan_of(model, LENS)
    truth = causal_logits(model, plan)[plan.segments[0].end :]
    assert error(model.logits(plan, None, keep=0), truth) < BOUND


@pytest.mark.parametrize("name", ["llama", "phi partial", "cohere interleaved", "llama yarn"])
def test_eng_04_keys_at_wrong_positions_would_be_seen(name: str) -> None:
    """The bound means something: keys left at the positions of their prefill are three orders of magnitude off."""
    model = tiny_model(REUSABLE[name]())
    plan = plan_of(model, LENS)
    rows = model.prefill_chunks(plan.prefix_ids, chunk_ids(plan))
    base = model.stitch(plan, rows)
    k, _, positions = base.rows
    last = plan.chunks[-1]
    moved = model.stitch(plan_of(model, LENS[-1:]), rows[-1:]).rows[0][:, :, 5:]  # right behind the prefix
    with torch.inference_mode():
        k[:, :, positions >= last.start] = moved
    truth = masked_logits(model, plan)
    assert error(model.logits(plan, base, keep=0), truth) > 100 * BOUND


@pytest.mark.parametrize("n_question", [1, 6])
@pytest.mark.parametrize("lens", [(1,), (1, 1, 1), (7, 7, 7, 7)])
def test_short_chunks_and_short_questions(llama: Model, lens: tuple[int, ...], n_question: int) -> None:
    plan = plan_of(llama, lens, n_question, n_prefix=7)
    base = llama.stitch(plan, llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    truth = masked_logits(llama, plan)
    assert error(llama.logits(plan, base, keep=0), truth) < BOUND


def test_the_same_chunk_twice_is_two_chunks_at_two_positions(llama: Model) -> None:
    ids = random_ids(11, seed=4)
    plan = plan_prompt(template_of(llama), random_ids(3, seed=5), [PlannedChunk(ids, True)] * 3)
    (rows,) = llama.prefill_chunks(plan.prefix_ids, [ids])
    truth = masked_logits(llama, plan)
    assert error(llama.logits(plan, llama.stitch(plan, [rows] * 3), keep=0), truth) < BOUND


def test_no_chunk_at_all_is_prefix_and_question(llama: Model) -> None:
    plan = plan_of(llama, ())
    truth = causal_logits(llama, plan)[list(plan.open_positions)]
    assert error(llama.logits(plan, llama.stitch(plan, []), keep=0), truth) < BOUND


def test_chk_04_a_prefix_of_seven_tokens_and_three_chunks_reuses_all_three(llama: Model) -> None:
    """A system prompt shorter than a chunk once shifted everything, and nothing was found."""
    plan = plan_of(llama, (16, 16, 16), n_prefix=7)
    assert plan.reused_tokens == 7 + 48
    base = llama.stitch(plan, llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    assert base.n_rows == plan.reused_tokens
