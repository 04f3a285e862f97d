"""Each policy against its formula, computed from attention and rows of a plain pass; and how budgets are spent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.hf_adapter import Enough
from engine.model import Model
from engine.passes import PassMemo, PassRows
from engine.plan import Plan, PlannedChunk, plan_prompt
from engine.policies import POLICIES, Policy, create_policy
from engine.policies.closure import block_for, middle_layers
from engine.rows import Base
from engine.scoring import MEAN, NORM, SUM, Reduction, ScoringRows
from engine.selection import SelectionContext
from schemas.errors import InputError
from tests.engine.conftest import REUSABLE, random_ids, template_of, tiny_model
from tests.engine.test_repair import chunk_positions, stitched
from tests.engine.test_stitched_equals_masked_prefill import LENS, plan_of

N_QUESTION = 6


class Recorder:
    """A `RowSet` of the open rows over a base that keeps full attention and new rows of every layer."""

    def __init__(self, base: Base, positions: torch.Tensor) -> None:
        self.base_k, self.base_v, at = base.rows
        keep = ~torch.isin(at, positions)
        self.base_k, self.base_v, at = self.base_k[:, :, keep], self.base_v[:, :, keep], at[keep]
        self.at, self.positions = torch.cat([at, positions]), positions
        self.attention: list[torch.Tensor] = []  # [Hq, S, T], sorted by key position
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.rows.append((k, v))

    def attend(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        k, v = self.rows[layer]
        keys, values = torch.cat([self.base_k[layer], k], 1), torch.cat([self.base_v[layer], v], 1)
        groups = q.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
        score = (q @ keys.mT * scale).masked_fill(self.at[None, :] > self.positions[:, None], float("-inf"))
        weights = score.softmax(-1)
        self.attention.append(weights[:, :, self.at.argsort()])
        return weights @ values


def recorded(model: Model, plan: Plan, positions: torch.Tensor) -> Recorder:
    rows = Recorder(stitched(model, plan), positions)
    with torch.inference_mode():
        model._hf.look(torch.tensor(plan.token_ids)[positions], positions, rows)
    return rows


def question_attention(model: Model, plan: Plan) -> list[torch.Tensor]:
    """`[Hq, question rows, n_ctx]` of every layer."""
    rows = recorded(model, plan, torch.tensor(plan.open_positions))
    return [a[:, -N_QUESTION:, : plan.chunks[-1].end] for a in rows.attention]


def context_of(model: Model, plan: Plan, *, first_chunk_exact: bool = True) -> SelectionContext:
    return SelectionContext(plan, stitched(model, plan), model.spec, model._look, first_chunk_exact)


def scores_of(model: Model, policy: Any, plan: Plan) -> torch.Tensor:
    context = context_of(model, plan)
    with torch.inference_mode():
        scores = policy.score(context)
    return scores[context.eligible]


def eligible(plan: Plan, of_positions: torch.Tensor) -> torch.Tensor:
    return of_positions[chunk_positions(plan, first=1)]


def same(ours: torch.Tensor, truth: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), truth, rtol=1e-4, atol=1e-5 * float(truth.max()))


@pytest.fixture(scope="module", params=["llama", "phi partial", "gemma3 two tables", "cohere interleaved"])
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(REUSABLE[request.param]())


@pytest.fixture(params=["none", "epic", "cacheblend", "fusionrag", "infoflow", "prophet", "closure", "random", "full"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return create_policy(request.param)


def test_infoflow_is_the_norm_over_question_rows_of_the_mean_over_heads(model: Model) -> None:
    plan = plan_of(model, LENS, N_QUESTION)
    attention = question_attention(model, plan)
    truth = torch.stack([attention[layer].mean(0).norm(dim=0) for layer in (0, 2)]).mean(0)
    same(scores_of(model, create_policy("infoflow", layers=[0, 2]), plan), eligible(plan, truth))
    same(scores_of(model, create_policy("closure", layers=[0, 2]), plan), eligible(plan, truth))


def test_fusionrag_is_the_sum_at_the_last_layer(model: Model) -> None:
    plan = plan_of(model, LENS, N_QUESTION)
    truth = question_attention(model, plan)[-1].sum((0, 1))
    same(scores_of(model, create_policy("fusionrag"), plan), eligible(plan, truth))


def test_prophet_is_the_mean_over_layers_heads_and_rows(model: Model) -> None:
    plan = plan_of(model, LENS, N_QUESTION)
    truth = torch.stack(question_attention(model, plan)).mean((0, 1, 2))
    same(scores_of(model, create_policy("prophet"), plan), eligible(plan, truth))


@pytest.mark.parametrize("of", ["k", "v"])
def test_cacheblend_is_the_squared_change_at_layer_1_of_a_full_prefill(model: Model, of: str) -> None:
    plan = plan_of(model, LENS, N_QUESTION)
    everything = torch.arange(plan.segments[0].end, plan.n_tokens)
    new = recorded(model, plan, everything).rows[1][0 if of == "k" else 1]
    base = stitched(model, plan)
    at = {int(position): slot for slot, position in enumerate(base.rows[2])}
    old = base.rows[0 if of == "k" else 1][1]
    truth = torch.stack(
        [(new[:, p - everything[0]] - old[:, at[int(p)]]).square().sum() for p in chunk_positions(plan, first=1)]
    )
    same(scores_of(model, create_policy("cacheblend", of=of), plan), truth)
    assert float(truth.min()) > 0


def test_layer_0_rows_of_stitched_chunks_are_exact_already(model: Model) -> None:
    """They depend on token and position only: nothing that is in front of a chunk can change them."""
    plan = plan_of(model, LENS, N_QUESTION)
    with torch.inference_mode():
        context = context_of(model, plan)
        for of in ("k", "v"):
            assert float(context.deviation(0, of).max()) < 1e-9
            assert float(context.deviation(1, of).max()) > 1e-4


def test_gradual_cacheblend_with_nothing_to_filter_is_the_deeper_layer(llama: Model) -> None:
    """With every candidate kept to the last step, its choice is that of a full prefill's deviation there."""
    plan = plan_of(llama, LENS, N_QUESTION)
    with torch.inference_mode():
        context = context_of(llama, plan)
        most = int(context.eligible.sum())
        deepest = context.deviation(2, "v").masked_fill(~context.eligible, -1).topk(5).indices.sort().values
        assert torch.equal(context.filtered([(1, most), (2, 5)], "v"), deepest)
        first = context.deviation(1, "v").masked_fill(~context.eligible, -1).topk(9).indices
        survivors = context.filtered([(1, 9), (2, 5)], "v")
    assert len(survivors) == 5
    assert set(survivors.tolist()) <= set(first.tolist())


def test_every_policy_spends_the_budget_and_nothing_on_exact_rows(llama: Model, policy: Policy) -> None:
    """The budget counts chunk tokens; the chunk behind the prefix is exact with rows made behind that prefix."""
    plan = plan_of(llama, (40, 33, 1, 50, 2), N_QUESTION)
    base = stitched(llama, plan)
    for budget in (0.0, 0.05, 0.15, 0.5, 1.0):
        chosen = llama.select(plan, base, policy, budget)
        expected = min(round(budget * 126), 86)
        expected = {"none": 0, "full": 86}.get(policy.name, expected)
        assert chosen.dtype == torch.int64
        assert len(chosen) == expected
        assert bool((chosen.diff() > 0).all())
        assert set(chosen.tolist()) <= set(chunk_positions(plan, first=1).tolist())


def test_rows_of_other_variants_are_repaired_in_the_first_chunk_too(llama: Model) -> None:
    """Only rows that were made behind this very prefix are those of a full prefill."""
    plan = plan_of(llama, (40, 33), N_QUESTION)
    base = stitched(llama, plan)
    chosen = llama.select(plan, base, create_policy("full"), 1.0, first_chunk_exact=False)
    assert chosen.tolist() == chunk_positions(plan).tolist()
    heads = llama.select(plan, base, create_policy("epic", n_head=2), 1.0, first_chunk_exact=False)
    assert heads.tolist() == [
        plan.chunks[0].start,
        plan.chunks[0].start + 1,
        plan.chunks[1].start,
        plan.chunks[1].start + 1,
    ]


def test_selection_leaves_the_base_as_it_is_and_free(llama: Model, policy: Policy) -> None:
    plan = plan_of(llama, LENS, N_QUESTION)
    base = stitched(llama, plan)
    before = [rows.clone() for rows in base.rows]
    first, again = (llama.select(plan, base, policy, 0.3).tolist() for _ in range(2))
    assert first == again
    assert all(torch.equal(a, b) for a, b in zip(before, base.rows, strict=True))
    assert not base._lent


@pytest.mark.parametrize("lens", [(), (1,), (5,), (1, 1)])
@pytest.mark.parametrize("n_question", [1, 3])
def test_prompts_with_little_or_nothing_to_choose_from(
    llama: Model, policy: Policy, lens: tuple[int, ...], n_question: int
) -> None:
    plan = plan_of(llama, lens, n_question)
    chosen = llama.select(plan, stitched(llama, plan), policy, 0.5)
    assert len(chosen) <= max(0, len(lens) - 1)


def test_the_question_pass_stops_behind_the_last_layer_it_needs(llama: Model) -> None:
    """The rest of the model would be half of the price."""
    plan = plan_of(llama, LENS, N_QUESTION)
    base = stitched(llama, plan)
    seen: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_, number=number: seen.append(number))
        for number, layer in enumerate(llama._hf.layers)
    ]
    llama.select(plan, base, create_policy("infoflow", layers=[0, 1]), 0.3)
    for handle in handles:
        handle.remove()
    assert seen == [0]  # layer 1 itself is left at its attention


@pytest.mark.parametrize("reduction", [NORM, SUM, MEAN], ids=lambda reduction: reduction.name)
def test_attention_is_reduced_block_by_block(llama: Model, reduction: Reduction) -> None:
    """A long prompt's attention is never held whole; blocks of one row give what one block gives."""
    plan = plan_of(llama, LENS, N_QUESTION)
    base, positions = stitched(llama, plan), torch.tensor(plan.open_positions)
    found = []
    with torch.inference_mode():
        for held in (1, 1 << 20):
            rows = ScoringRows(base, positions, N_QUESTION, [0, 2], reduction, block_elements=held)
            llama._look(torch.tensor(plan.token_ids)[positions], positions, rows)
            found.append(rows.scores)
    assert list(found[0]) == [0, 2]
    for layer in found[0]:
        same(found[0][layer], found[1][layer])


def test_a_pass_that_has_enough_leaves_the_model_usable(llama: Model) -> None:
    plan = plan_of(llama, LENS, N_QUESTION)
    base = stitched(llama, plan)
    before = llama.logits(plan, base)
    for name in POLICIES:
        if name != "composite":
            llama.select(plan, base, create_policy(name), 0.2)
    assert torch.equal(llama.logits(plan, base), before)
    assert issubclass(Enough, Exception)


def test_unknown_policies_options_budgets_and_layers_are_refused(llama: Model) -> None:
    plan = plan_of(llama, LENS, N_QUESTION)
    base = stitched(llama, plan)
    with pytest.raises(InputError, match="no selection policy 'best'; known are none, composite, epic, cacheblend"):
        create_policy("best")
    with pytest.raises(InputError, match=r"selection policy epic cannot be made with \{'size': 3\}"):
        create_policy("epic", size=3)
    with pytest.raises(InputError, match="cacheblend has modes"):
        create_policy("cacheblend", mode="fast")
    for name in POLICIES.keys() - {"composite"}:
        for budget in (-0.1, 1.01, float("nan"), 15.0):
            with pytest.raises(InputError, match="expected the share of chunk tokens to repair, 0 to 1"):
                llama.select(plan, base, create_policy(name), budget)
    for layers in ([3], [-1], []):
        with pytest.raises(InputError, match="the model has layers 0 to 2"):
            llama.select(plan, base, create_policy("closure", layers=layers), 0.2)


def test_duplicates_of_a_chunk_are_scored_where_they_stand(llama: Model) -> None:
    ids = random_ids(11, seed=4)
    plan = plan_prompt(template_of(llama), random_ids(N_QUESTION, seed=5), [PlannedChunk(ids, True)] * 3)
    truth = torch.stack([a.mean(0).norm(dim=0) for a in question_attention(llama, plan)[1:2]]).mean(0)
    same(scores_of(llama, create_policy("infoflow", layers=[1]), plan), eligible(plan, truth))


def test_a_balanced_closure_does_not_leave_far_chunks_to_the_near_one(llama: Model) -> None:
    """Scores divided by their chunk's mean: what counts is what stands out in its own chunk."""
    plan = plan_of(llama, (40, 33, 50), N_QUESTION)
    plain = scores_of(llama, create_policy("closure"), plan)
    balanced = scores_of(llama, create_policy("closure", balance=1.0), plan)
    first, second = balanced[:33], balanced[33:]
    assert float(first.mean()) == pytest.approx(1.0, rel=1e-4)
    assert float(second.mean()) == pytest.approx(1.0, rel=1e-4)
    same(first, plain[:33] / plain[:33].mean())


def test_closure_scores_at_all_middle_layers() -> None:
    """From a third to four fifths of the depth; a model of one layer has one too."""
    assert middle_layers(30) == tuple(range(10, 24))
    assert (middle_layers(1), middle_layers(2), middle_layers(3)) == ((0,), (0,), (1,))


def test_closure_takes_runs_of_stale_rows_and_single_tokens_of_fused_ones(llama: Model) -> None:
    plan = plan_of(llama, (40, 33, 50), N_QUESTION)
    base = stitched(llama, plan)
    tokens = create_policy("infoflow", layers=middle_layers(llama.spec.n_layers))
    assert llama.select(plan, base, create_policy("closure", head_bonus=0), 0.2, fused=True).equal(
        llama.select(plan, base, tokens, 0.2)
    )
    runs_of_16 = create_policy("closure", block=16, head_bonus=0)
    stale = llama.select(plan, base, runs_of_16, 0.2)
    runs = int((stale.diff() > 1).sum()) + 1
    assert runs <= 3, "25 tokens are two blocks of 16, the second one cut, or three where one is a chunk's short end"
    assert llama.select(plan, base, runs_of_16, 0.2, fused=True).equal(stale), "a block size that is named holds"


def test_closure_prefers_heads_of_fused_chunks_and_of_no_others(llama: Model) -> None:
    """What fusion leaves wrong is the heads; a bonus over stale rows made long chunks worse."""
    plan = plan_of(llama, (40, 33, 50), N_QUESTION)
    base = stitched(llama, plan)
    plain, headed = create_policy("closure", head_bonus=0), create_policy("closure")
    with torch.inference_mode():
        contexts = [SelectionContext(plan, base, llama.spec, llama._look, fused=fused) for fused in (True, False)]
        fused, stale = [(headed.score(context), plain.score(context)) for context in contexts]
    assert stale[0].equal(stale[1])
    for chunk in plan.chunks[1:]:
        ratio = (fused[0] / fused[1])[chunk.start : chunk.end]
        assert float(ratio[0]) == pytest.approx(5.0)
        assert float(ratio[16]) == pytest.approx(1 + 4 / 2.71828, rel=1e-4)
        assert bool((ratio.diff() < 0).all())
    first = plan.chunks[0]
    assert fused[0][: first.end].equal(fused[1][: first.end])


def test_closure_spends_a_small_budget_in_small_pieces() -> None:
    """28 tokens in blocks of 16 were two places of six short passages, and worse than any other choice."""
    assert [block_for(n) for n in (1, 28, 64, 182, 550, 5000)] == [1, 1, 2, 5, 16, 16]


EVERY = [("cacheblend", {}), ("cacheblend", {"mode": "gradual"}), ("fusionrag", {}), ("fusionrag", {"group": 4})]
EVERY += [(name, {}) for name in ("none", "epic", "infoflow", "prophet", "closure", "random", "full")]


def test_policies_that_share_passes_choose_what_they_choose_alone(model: Model) -> None:
    """A score that one policy changes in place, or a pass taken for another's, would change the next one's choice."""
    plan = plan_of(model, LENS, N_QUESTION)
    base, passes = stitched(model, plan), PassMemo()
    for budget in (0.1, 0.3):
        for name, options in EVERY:
            policy = create_policy(name, **options)
            alone = model.select(plan, base, policy, budget)
            assert model.select(plan, base, policy, budget, passes=passes).equal(alone), (name, options, budget)


def test_a_pass_that_was_run_is_not_run_again_and_its_seconds_are_told(model: Model) -> None:
    plan = plan_of(model, LENS, N_QUESTION)
    ran: list[int] = []

    def look(ids: torch.Tensor, positions: torch.Tensor, rows: PassRows) -> None:
        ran.append(len(ids))
        model._look(ids, positions, rows)

    passes = PassMemo()
    context = SelectionContext(plan, stitched(model, plan), model.spec, look, passes=passes)
    with torch.inference_mode():
        for name in ("infoflow", "cacheblend"):
            first = [create_policy(name).select(context, budget) for budget in (0.1, 0.2)]
            assert len(first[0]) < len(first[1])
        assert len(ran) == 2
        saved = passes.saved_s
        create_policy("prophet").select(context, 0.1)  # another pass: nothing saved
        assert (len(ran), passes.saved_s) == (3, saved)
    assert saved > 0
