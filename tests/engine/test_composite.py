"""The composite layout against one plain pass at its own positions: chunks overlap, the longest ends last."""

from __future__ import annotations

import pytest
import torch

from engine import composite_plan
from engine.decode import SamplingParams
from engine.model import Model
from engine.plan import Plan, Source
from engine.policies import create_policy
from schemas.errors import InputError
from tests.engine.conftest import REUSABLE, tiny_model
from tests.engine.test_stitched_equals_masked_prefill import BOUND, LENS, chunk_ids, error, plain_logits, plan_of


def composite_logits(model: Model, plan: Plan) -> torch.Tensor:
    """Logits of separators and question; `plan` is composite already."""
    n_prefix = len(plan.prefix_ids)
    longest = max(len(chunk) for chunk in plan.chunks)
    positions, owners = [], []
    at_open = n_prefix + longest
    for segment in plan.segments:
        if segment.source is Source.PREFIX:
            positions += range(n_prefix)
        elif segment.chunk is not None:
            positions += range(n_prefix, n_prefix + len(segment))
        else:
            positions += range(at_open, at_open + len(segment))
            at_open += len(segment)
        owners += [-1 if segment.chunk is None else segment.chunk] * len(segment)
    position, owner = torch.tensor(positions), torch.tensor(owners)
    order = torch.arange(plan.n_tokens)
    is_open = torch.isin(order, torch.tensor(plan.open_positions))
    sees = (owner[:, None] == owner[None, :]) | (order < n_prefix)[None, :] | is_open[:, None]
    visible = (order[None, :] <= order[:, None]) & sees
    return plain_logits(model, list(plan.token_ids), position, visible)[is_open]


@pytest.mark.parametrize("name", ["llama", "llama yarn", "phi partial", "gemma3 two tables", "cohere interleaved"])
def test_composite_equals_one_plain_pass_at_its_positions(name: str) -> None:
    """Attention scaling in the tables enters once, though the prefix is rotated back and again."""
    model = tiny_model(REUSABLE[name]())
    ordinary = plan_of(model, LENS)
    plan = composite_plan(ordinary)
    base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    truth = composite_logits(model, plan)
    assert error(model.logits(plan, base, keep=0), truth) < 2 * BOUND
    reordered = model.stitch(ordinary, model.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    assert error(model.logits(ordinary, reordered, keep=1), truth[-1:]) > 100 * BOUND


def test_a_composite_plan_holds_the_same_ids_separators_last(llama: Model) -> None:
    plan = plan_of(llama, LENS)
    composite = composite_plan(plan)
    assert sorted(composite.token_ids) == sorted(plan.token_ids)
    assert chunk_ids(composite) == chunk_ids(plan)
    assert composite.open_positions == tuple(range(composite.chunks[-1].end, plan.n_tokens))
    assert composite.token_ids[-6:] == plan.token_ids[-6:]
    assert composite.reused_tokens == plan.reused_tokens


def test_with_one_chunk_there_is_nothing_to_lay_out(llama: Model) -> None:
    plan = plan_of(llama, (23,))
    composite = composite_plan(plan)
    rows = llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan))
    ours = llama.logits(composite, llama.stitch(composite, rows), keep=0)
    assert error(ours, llama.logits(plan, llama.stitch(plan, rows), keep=0)) < BOUND
    no_chunk = composite_plan(plan_of(llama, ()))
    assert llama.logits(no_chunk, llama.stitch(no_chunk, [])).isfinite().all()


def test_the_policy_says_so_and_a_composite_plan_cannot_be_repaired(llama: Model) -> None:
    plan = composite_plan(plan_of(llama, LENS))
    policy = create_policy("composite")
    assert policy.layout == "composite"
    assert create_policy("none").layout == "reordered"
    base = llama.stitch(plan, llama.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    ordinary = plan_of(llama, LENS)
    with pytest.raises(InputError, match="policy composite needs a plan of its own layout"):
        llama.select(ordinary, base, policy, 0.15)
    nothing = llama.select(plan, base, policy, 0.15)
    assert len(list(llama.generate(plan, base, SamplingParams(max_tokens=3), repair=nothing))) == 3
    with pytest.raises(ValueError, match="a composite plan cannot be repaired"):
        llama.logits(plan, base, repair=torch.tensor([plan.chunks[1].start]))
