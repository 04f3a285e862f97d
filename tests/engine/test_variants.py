"""Every prefill variant makes the rows that a plain pass of transformers makes with the same things in front.

Truth is one forward pass with an explicit mask and transformers' own cache: its keys are rotated to where the chunk
stands in that pass, ours are stored before RoPE and rotated there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.model import Model
from engine.plan import PlannedChunk, plan_prompt
from engine.rows import KvRows
from engine.tokenizer import Tokenizer
from engine.variants import (
    VARIANTS,
    Variant,
    company_ids,
    company_text,
    fitting,
    front_ids,
    prefill_variant,
    variant_named,
)
from kernels import rotate
from schemas.errors import InputError
from tests.engine.conftest import REUSABLE, byte_tokenizer, random_ids, template_of, tiny_model

BOUND = 1e-5
CHUNK, NEIGHBOURS = random_ids(11, seed=1), [random_ids(n, seed=20 + n) for n in (9, 14, 6)]  # nearest first
COMPANY = random_ids(17, seed=3)


def plain_rows(model: Model, ids: Sequence[int], positions: Sequence[int], visible: torch.Tensor) -> list[torch.Tensor]:
    """Rotated keys and values `[L, H, len(ids), D]` of one pass of transformers."""
    module = model._hf.module
    mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
    kinds = ("full_attention", "sliding_attention")
    takes_one_mask_per_kind = getattr(module.config, "layer_types", None) is not None
    module.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            cache = module(
                input_ids=torch.tensor([ids]),
                attention_mask=dict.fromkeys(kinds, mask) if takes_one_mask_per_kind else mask,
                position_ids=torch.tensor([positions]),
                use_cache=True,
            ).past_key_values
    finally:
        module.set_attn_implementation("kvquilt")
    return [torch.stack([getattr(layer, part)[0] for layer in cache.layers]) for part in ("keys", "values")]


def error(model: Model, rows: KvRows, truth: list[torch.Tensor], start: int) -> float:
    """How far rows are from those at the end of a plain pass, whose chunk starts at position `start`."""
    n = rows.n_tokens
    cos, sin = model._tables.tables(start, start + n, start + n, torch.device("cpu"))
    tables = model._tables.table_of_layer
    ours = torch.stack([rotate(rows.k[i], cos[t], sin[t], model._tables.layout) for i, t in enumerate(tables)])
    k, v = (part[:, :, -n:] for part in truth)
    assert not ours.isnan().any()
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in ((ours, k), (rows.v, v)))


def tokenizer_with_bos() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.bos_ids = (1,)
    return tokenizer


@pytest.fixture(scope="module", params=list(REUSABLE))
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(REUSABLE[request.param]())


@pytest.mark.parametrize("name", ["alone", "bos", "shared_prefix", "dummy_prefix", "company"])
def test_rows_behind_fixed_ids_are_those_of_a_plain_pass(model: Model, name: str) -> None:
    """The ids in front are seen and their rows are dropped; the chunk's positions do not matter to what is stored."""
    template = replace(template_of(model), tokenizer=tokenizer_with_bos())
    front = VARIANTS[name].front_ids(template, COMPANY)
    (rows,) = prefill_variant(model, VARIANTS[name], template, [CHUNK], company=COMPANY)
    n = len(front) + len(CHUNK)
    truth = plain_rows(model, [*front, *CHUNK], range(n), torch.ones(n, n, dtype=torch.bool).tril())
    assert error(model, rows, truth, len(front)) < BOUND


@pytest.mark.parametrize("variant", ["fused", "fused_company", "company neighbours", "company in front"])
def test_fused_rows_see_every_neighbour_as_it_was_prefilled_by_itself(model: Model, variant: str) -> None:
    """Neighbours do not see each other (depth one), the nearest stands next to the chunk, all see prefix or company."""
    kinds = {
        **VARIANTS,
        "company neighbours": Variant("x", fused=True, neighbours="company"),
        "company in front": Variant("x", front="company", fused=True),
    }
    kind, template = kinds[variant], template_of(model)
    pass1 = model.prefill_chunks(front_ids(kind.neighbours, template, COMPANY), NEIGHBOURS)
    (rows,) = prefill_variant(model, kind, template, [CHUNK], lambda _: pass1, company=COMPANY)

    front, own = kind.front_ids(template, COMPANY), front_ids(kind.neighbours, template, COMPANY)
    ids, positions, groups = [*front], [*range(len(front))], [0] * len(front)
    start = len(front)
    for number, neighbour in enumerate(reversed(NEIGHBOURS), start=1):  # each behind a copy of its own front
        ids += [*own, *neighbour]
        positions += range(start - len(own), start + len(neighbour))
        groups += [-number] * len(own) + [number] * len(neighbour)
        start += len(neighbour)
    ids, groups = [*ids, *CHUNK], [*groups, *[99] * len(CHUNK)]
    positions += range(start, start + len(CHUNK))
    # positions before 0 are not a place: everything is moved up, which changes no row before RoPE
    moved = max(0, len(own) - len(front))
    position, group = torch.tensor(positions) + moved, torch.tensor(groups)
    earlier = position[None, :] <= position[:, None]
    chunk_sees = (group == 99)[:, None] & (group >= 0)[None, :]
    itself = group[:, None].abs() == group[None, :].abs()
    visible = earlier & (chunk_sees | itself)
    truth = plain_rows(model, ids, position.tolist(), visible)
    assert error(model, rows, truth, start + moved) < 2 * BOUND
    (without,) = prefill_variant(model, kind, template, [CHUNK], lambda _: [], company=COMPANY)
    assert error(model, without, truth, start + moved) > 100 * BOUND


def test_a_fused_chunk_without_neighbours_is_its_pass_1(llama: Model) -> None:
    template = template_of(llama)
    (alone,) = prefill_variant(llama, VARIANTS["fused"], template, [CHUNK])
    (pass1,) = llama.prefill_chunks(template.prefix_ids, [CHUNK])
    assert torch.equal(alone.k, pass1.k)
    assert torch.equal(alone.v, pass1.v)


def test_neighbours_that_do_not_fit_are_left_out_the_farthest_first(llama: Model) -> None:
    """A corpus of long chunks must not make a sequence that is longer than the model takes."""
    rows = llama.prefill_chunks((5,), [random_ids(1500, seed=n) for n in range(4)])
    assert list(fitting(rows, 3000)) == rows[:2]
    assert list(fitting(rows, 1499)) == []
    few = llama.prefill_behind((5,), rows[:2], random_ids(600, seed=9))
    many = llama.prefill_behind((5,), rows, random_ids(600, seed=9))  # 4 * 1,500 + 601 > 4,096
    assert torch.equal(few.v, many.v)


def test_a_chunk_longer_than_the_model_takes_is_refused(llama: Model) -> None:
    with pytest.raises(InputError, match="the chunk has 4090 tokens behind 7; the model takes 4096"):
        llama.prefill_behind((5,) * 7, [], random_ids(4090, seed=1))


def test_a_model_without_a_start_id_has_no_bos_variant(llama: Model) -> None:
    with pytest.raises(InputError, match="puts no id in front of a text; use dummy_prefix"):
        VARIANTS["bos"].front_ids(template_of(llama))


def test_an_unknown_variant_is_named_with_the_known_ones() -> None:

    with pytest.raises(InputError, match="no prefill variant 'fuse'; known are alone, bos, shared_prefix"):
        variant_named("fuse")


def test_the_packaged_company_is_text_of_ours_of_about_a_thousand_tokens() -> None:
    """It ships with the package: a missing data file would show only where the variant is first used."""
    assert 400 < len(company_text().split()) < 1200
    assert byte_tokenizer().decode(company_ids(byte_tokenizer())) == company_text()


def test_a_fresh_chunk_is_computed_behind_the_front_it_is_told() -> None:
    """Stored behind a company and computed behind the prefix, an answer would depend on what was stored."""
    model = tiny_model(REUSABLE["llama"]())
    template = template_of(model)
    chunks = [random_ids(n, seed=40 + n) for n in (7, 9, 8)]
    front = (*template.prefix_ids, *COMPANY)
    plan = plan_prompt(template, random_ids(3, seed=5), [PlannedChunk(tuple(ids), False) for ids in chunks])
    first, *others = chunks
    stored = [*model.prefill_chunks(template.prefix_ids, [first]), *model.prefill_chunks(front, others)]
    told = model.stitch(plan, [None, None, None], fronts=[template.prefix_ids, front, front])
    mixed = model.stitch(plan, [None, stored[1], None], fronts=[template.prefix_ids, front, front])
    expected = model.stitch(plan, stored)
    for base in (told, mixed):
        for ours, theirs in zip(base.rows, expected.rows, strict=True):
            torch.testing.assert_close(ours, theirs, atol=BOUND, rtol=0)
    behind_the_prefix = model.stitch(plan, [None, None, None])
    assert (behind_the_prefix.rows[1] - expected.rows[1]).abs().max() > 100 * BOUND
