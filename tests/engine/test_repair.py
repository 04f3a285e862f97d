"""The repair operator is exact: whatever is repaired, the result is that of one plain pass with the right mask.

Truth is one forward pass of transformers with an explicit mask. A row that is not repaired sees the prefix and its
own chunk; a repaired row, a separator and the question see everything before them, as it is after repair. The plain
pass holds every chunk twice: as it was prefilled (with a copy of the prefix in front of it, for its eyes only), and
as it is after repair; a row of the second copy is visible where it was repaired, a row of the first where not.
"""

from __future__ import annotations

import threading

import pytest
import torch

from engine.decode import SamplingParams
from engine.model import Model
from engine.plan import Plan, PlannedChunk, plan_prompt
from engine.repair import TokenCounts, check_repair, count_tokens
from engine.rows import Base, Part
from engine.sequence import OrderedRows
from tests.engine.conftest import REUSABLE, random_ids, template_of, tiny_model
from tests.engine.test_stitched_equals_masked_prefill import (
    BOUND,
    LENS,
    causal_logits,
    chunk_ids,
    error,
    masked_logits,
    plain_logits,
    plan_of,
)


def repaired_logits(model: Model, plan: Plan, repair: torch.Tensor) -> torch.Tensor:
    """Logits of the open and the repaired rows, ascending, as the docstring of this file says."""
    n_prefix = plan.segments[0].end
    ids, positions, groups, live = [], [], [], []  # group n > 0: chunk n as it was prefilled; 0: rows all may see
    for segment in plan.segments:
        span = range(segment.start, segment.end)
        if segment.chunk is not None:
            ids += [*plan.prefix_ids, *plan.token_ids[segment.start : segment.end]]
            positions += [*range(segment.start - n_prefix, segment.start), *span]
            groups += [segment.chunk + 1] * (n_prefix + len(segment))
            live += [False] * n_prefix + [int(p) not in set(repair.tolist()) for p in span]
        ids += plan.token_ids[segment.start : segment.end]
        positions += span
        groups += [0] * len(segment)
        live += [segment.chunk is None or p in set(repair.tolist()) for p in span]
    position, group, seen = torch.tensor(positions), torch.tensor(groups), torch.tensor(live)
    own = (group[:, None] == group[None, :]) & (group > 0)[:, None]
    from_outside = (group == 0)[:, None] & seen[None, :]
    visible = (position[None, :] <= position[:, None]) & (own | from_outside)
    visible |= torch.eye(len(position), dtype=torch.bool)  # second copies that nobody reads must see something
    logits = plain_logits(model, ids, position, visible)
    return logits[(group == 0) & seen & (position >= n_prefix)]


def stitched(model: Model, plan: Plan) -> Base:
    return model.stitch(plan, model.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))


def chunk_positions(plan: Plan, first: int = 0) -> torch.Tensor:
    return torch.cat([torch.arange(chunk.start, chunk.end) for chunk in plan.chunks[first:]])


def scattered(plan: Plan, share: float, seed: int = 3) -> torch.Tensor:
    everything = chunk_positions(plan)
    drawn = torch.rand(len(everything), generator=torch.Generator().manual_seed(seed)) < share
    return everything[drawn]


@pytest.fixture(scope="module", params=list(REUSABLE))
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(REUSABLE[request.param]())


def test_repairing_everything_equals_full_prefill(model: Model) -> None:
    """Row by row, not only at the last: a mask that is a triangle over the rows of P would show here."""
    plan = plan_of(model, LENS)
    truth = causal_logits(model, plan)[plan.segments[0].end :]
    logits = model.logits(plan, stitched(model, plan), keep=0, repair=chunk_positions(plan))
    assert error(logits, truth) < BOUND


def test_repairing_all_but_the_first_chunk_equals_full_prefill(model: Model) -> None:
    """The rows of the chunk behind the prefix are those of a full prefill, so that no budget belongs there."""
    plan = plan_of(model, LENS)
    truth = causal_logits(model, plan)[plan.chunks[0].end :]
    logits = model.logits(plan, stitched(model, plan), keep=0, repair=chunk_positions(plan, first=1))
    assert error(logits, truth) < BOUND


def test_repairing_nothing_equals_the_masked_prefill(model: Model) -> None:
    plan = plan_of(model, LENS)
    base, truth = stitched(model, plan), masked_logits(model, plan)
    assert error(model.logits(plan, base, keep=0, repair=torch.empty(0, dtype=torch.int64)), truth) < BOUND
    assert error(repaired_logits(model, plan, torch.empty(0, dtype=torch.int64)), truth) < BOUND  # of the truth itself


@pytest.mark.parametrize("share", [0.15, 0.6])
def test_repairing_scattered_rows_equals_a_plain_pass_with_that_mask(model: Model, share: float) -> None:
    """A repaired row sees repaired rows before it and stale ones, none behind it, and no row twice."""
    plan = plan_of(model, LENS)
    repair = scattered(plan, share)
    truth = repaired_logits(model, plan, repair)
    assert error(model.logits(plan, stitched(model, plan), keep=0, repair=repair), truth) < BOUND
    full = causal_logits(model, plan)[torch.cat([repair, torch.tensor(plan.open_positions)]).sort().values]
    assert error(truth, full) > 100 * BOUND


def test_a_pass_of_many_rows_puts_all_rows_in_order(model: Model) -> None:
    """Long passes attend to one ordered copy of a layer's rows instead of the base with holes; same result."""
    plan = plan_of(model, (90, 2, 150, 1, 60))
    repair = scattered(plan, 0.85)
    base = stitched(model, plan)
    rows, positions = model._open(plan, base, 0, repair)
    with torch.inference_mode():
        rows.begin(positions)
    assert rows._ordered is not None
    truth = repaired_logits(model, plan, repair)
    assert error(model.logits(plan, base, keep=0, repair=repair), truth) < 2 * BOUND


@pytest.mark.parametrize("n_heads", [1, 2])
@pytest.mark.parametrize("kind", ["scattered", "blocks"])
def test_ordered_rows_are_the_rows_of_all_parts_each_position_once(n_heads: int, kind: str) -> None:
    """Copied run by run or by index, some heads at a time: the newest row at every position, none behind the last."""
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 1, 2, 500, 4, generator=generator).unbind()
    k2, v2 = torch.randn(2, 1, 2, 200, 4, generator=generator).unbind()
    at = torch.cat([torch.arange(100), torch.arange(103, 400), torch.arange(405, 508)])
    queries = (
        torch.arange(50, 250) if kind == "blocks" else torch.randperm(400, generator=generator)[:200].sort().values
    )
    replaced = torch.isin(at, queries)
    ordered = OrderedRows(
        [(k, v, at, replaced), (k2, v2, queries, torch.zeros(200, dtype=torch.bool))], queries, n_heads
    )
    q = torch.randn(4, 200, 4, generator=generator)
    keys, values = torch.cat([k[0][:, ~replaced], k2[0]], 1), torch.cat([v[0][:, ~replaced], v2[0]], 1)
    where = torch.cat([at[~replaced], queries])
    score = (q @ keys.repeat_interleave(2, 0).mT * 0.5).masked_fill(where[None] > queries[:, None], float("-inf"))
    truth = score.softmax(-1) @ values.repeat_interleave(2, 0)
    torch.testing.assert_close(ordered.attend(0, q, 0.5), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_question", [1, 6])
@pytest.mark.parametrize("lens", [(1,), (1, 1, 1), (2, 1, 40, 1), (7, 7, 7, 7)])
def test_chunks_of_one_token_and_a_question_of_one_token(llama: Model, lens: tuple[int, ...], n_question: int) -> None:
    plan = plan_of(llama, lens, n_question, n_prefix=7)
    base = stitched(llama, plan)
    for repair in (chunk_positions(plan), scattered(plan, 0.5), chunk_positions(plan)[-1:]):
        truth = repaired_logits(llama, plan, repair)
        assert error(llama.logits(plan, base, keep=0, repair=repair), truth) < BOUND


def test_the_same_chunk_twice_is_repaired_at_one_place_only(llama: Model) -> None:
    """Rows are replaced by position: the other copy of the chunk stays as it was."""
    ids = random_ids(11, seed=4)
    plan = plan_prompt(template_of(llama), random_ids(3, seed=5), [PlannedChunk(ids, True)] * 3)
    repair = torch.arange(plan.chunks[1].start, plan.chunks[1].end)
    truth = repaired_logits(llama, plan, repair)
    assert error(llama.logits(plan, stitched(llama, plan), keep=0, repair=repair), truth) < BOUND


@pytest.mark.slow
def test_more_rows_than_one_tile_of_queries_and_than_one_pass(llama: Model) -> None:
    """Tiles of query rows, and passes of 2,048 rows, meet at positions that are not theirs to choose.

    Sums run over a hundred times as many keys as elsewhere here: plain full prefill is 1e-5 from ours, too.
    """
    plan = plan_of(llama, (700, 300, 900, 500), n_question=20)
    base = stitched(llama, plan)
    for repair in (scattered(plan, 0.3), torch.arange(plan.chunks[2].start + 5, plan.chunks[2].start + 400)):
        truth = repaired_logits(llama, plan, repair)
        assert error(llama.logits(plan, base, keep=0, repair=repair), truth) < 10 * BOUND
    first = next(llama.generate(plan, base, SamplingParams(max_tokens=1), repair=chunk_positions(plan)))
    assert first.token_id == int(causal_logits(llama, plan)[-1].argmax())


def test_an_answer_over_repaired_rows_is_the_exact_answer(llama: Model) -> None:
    """Decode goes on over the base without the replaced rows and the rows that took their place."""
    plan = plan_of(llama, LENS)
    params = SamplingParams(max_tokens=80)  # more than any part has spare slots
    exact = [step.token_id for step in llama.generate(plan, None, params)]
    repaired = llama.generate(plan, stitched(llama, plan), params, repair=chunk_positions(plan))
    assert [step.token_id for step in repaired] == exact


def test_requests_with_other_repairs_share_one_base(llama: Model) -> None:
    """Side by side, in threads, and with nothing written to the rows that they share."""
    plan = plan_of(llama, LENS)
    base = stitched(llama, plan)
    before = [rows.clone() for rows in base.rows]
    repairs = [torch.empty(0, dtype=torch.int64), scattered(plan, 0.2), scattered(plan, 0.5), chunk_positions(plan)]
    params = SamplingParams(max_tokens=8)
    alone = [[s.token_id for s in llama.generate(plan, stitched(llama, plan), params, repair=r)] for r in repairs]
    assert len({tuple(tokens) for tokens in alone}) > 1
    seen: dict[int, list[int]] = {}

    def answer(number: int) -> None:
        steps = llama.generate(plan, base, params, repair=repairs[number % 4])
        seen[number] = [step.token_id for step in steps]

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen[number] for number in range(8)] == alone * 2
    assert all(torch.equal(a, b) for a, b in zip(before, base.rows, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [0.05, 0.15])
@pytest.mark.parametrize("block", [1, 16])
def test_memory_over_the_base_is_little_more_than_the_kv_of_what_is_repaired(
    dtype: torch.dtype, budget: float, block: int
) -> None:
    """Private rows, ordered rows and masks, counted in bytes, for 4,096 tokens and the shape of SmolLM2-135M."""
    part = Part(torch.empty(30, 3, 0, 64, dtype=dtype), 4096)
    part.n = 4096
    part.positions = torch.arange(4096)
    base = Base(part)
    blocks = torch.randperm(4000 // block, generator=torch.Generator().manual_seed(2))[: round(budget * 4000 / block)]
    repair = (blocks[:, None] * block + torch.arange(block)).flatten()
    positions = torch.cat([repair, torch.arange(4056, 4096)]).sort().values
    with torch.inference_mode():
        rows = base.open(len(positions), private=True)
        rows.begin(positions)
        rows.attend(0, torch.zeros(9, len(positions), 64, dtype=dtype), 0.125, None)  # makes the masks
    own, ordered = rows._views[1].part, rows._ordered
    assert rows._views[0].part is part
    assert ordered is not None
    tensors = [own.k, own.v, ordered._k, ordered._v]
    for tile in ordered._mask.tiles:
        tensors += tile._bias.values()
    kv = 2 * 30 * 3 * 64 * dtype.itemsize * len(positions)
    assert own.k.nbytes + own.v.nbytes == kv
    assert sum(tensor.nbytes for tensor in tensors) < 1.3 * kv


def test_positions_that_cannot_be_repaired_are_refused(llama: Model) -> None:
    plan = plan_of(llama, LENS)
    start = plan.chunks[1].start
    for wrong, message in (
        ([start + 1, start], "sorted list without doubles"),
        ([start, start], "sorted list without doubles"),
        ([[start]], "sorted list without doubles"),
        ([0], "position 0 to repair lies in no chunk"),
        ([plan.chunks[0].end], "lies in no chunk"),
        ([plan.n_tokens - 1], "lies in no chunk"),
        ([plan.n_tokens + 7], "lies in no chunk"),
        ([-1], "lies in no chunk"),
    ):
        with pytest.raises(ValueError, match=message):
            check_repair(plan, wrong)


def test_reused_repaired_and_fresh_tokens_add_up(llama: Model) -> None:
    chunks = [PlannedChunk(random_ids(n, seed=n), n != 4) for n in (10, 4, 6)]
    plan = plan_prompt(template_of(llama), random_ids(3, seed=1), chunks)  # prefix 5, separators of 1
    assert count_tokens(plan) == TokenCounts(reused=21, repaired=0, fresh=10)
    repair = torch.tensor([6, 7, plan.chunks[1].start, plan.chunks[2].start])
    assert count_tokens(plan, repair) == TokenCounts(reused=18, repaired=3, fresh=10)
