"""The packaged default model, for real: conversion, tokenizer, equality, an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import Model, PlannedChunk, PromptTemplate, SamplingParams, load_model, plan_prompt
from engine.models import model_folder
from schemas.settings import ModelSettings, PromptSettings
from tests.engine.test_stitched_equals_masked_prefill import causal_logits, chunk_ids, error, masked_logits

pytestmark = pytest.mark.slow

# fp32, 30 layers, in units of the largest logit; keys at wrong positions give 1e-1.
BOUND = 1e-4
PASSAGES = (
    "The Harbour Bridge of Lindholm was opened in 1931. It is 412 metres long and carries two tram lines.",
    "Lindholm's town hall burned down in 1902 and was rebuilt in brick by 1907.",
    "Trams in Lindholm run every 8 minutes on weekdays and every 15 minutes on Sundays.",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(cache: Path) -> Model:
    return load_model(ModelSettings(name="smollm2", dtype="float32"), cache)


@pytest.fixture(scope="module")
def template(model: Model) -> PromptTemplate:
    return PromptTemplate.from_settings(model.tokenizer, PromptSettings())


def test_the_conversion_happens_once(model: Model, cache: Path) -> None:
    (folder,) = (cache / "models").iterdir()
    made = folder.stat().st_mtime_ns
    assert model_folder("smollm2", cache) == folder
    assert folder.stat().st_mtime_ns == made
    assert model.reuse_refusal is None
    assert (model.spec.n_layers, model.spec.n_kv_heads, model.spec.head_dim) == (30, 3, 64)


def test_digits_are_split_off_before_anything_is_merged(model: Model) -> None:
    """The converter forgets the tokenizer's digit rule, and two spaces before a number became one wrong id."""
    tokenizer = model.tokenizer
    assert tokenizer.encode("a  1") == [*tokenizer.encode("a"), *tokenizer.encode("  "), *tokenizer.encode("1")]
    assert tokenizer.decode(tokenizer.encode("In 1931, 412 m")) == "In 1931, 412 m"


def test_stitched_logits_equal_one_masked_prefill(model: Model, template: PromptTemplate) -> None:
    chunks = [PlannedChunk(tuple(model.tokenizer.encode(text)), True) for text in PASSAGES]
    plan = plan_prompt(template, template.question_ids("How long is the Harbour Bridge?"), chunks)
    base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    truth = masked_logits(model, plan)
    assert error(model.logits(plan, base, keep=0), truth) < BOUND
    assert error(causal_logits(model, plan)[list(plan.open_positions)], truth) > 100 * BOUND


def test_one_chunk_behind_the_prefix_equals_full_prefill(model: Model, template: PromptTemplate) -> None:
    chunk = PlannedChunk(tuple(model.tokenizer.encode(" ".join(PASSAGES))), True)
    plan = plan_prompt(template, template.question_ids("How long is the Harbour Bridge?"), [chunk])
    base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, chunk_ids(plan)))
    truth = causal_logits(model, plan)
    assert error(model.logits(plan, base, keep=0), truth[list(plan.open_positions)]) < BOUND
    params = SamplingParams(max_tokens=24)
    stitched, exact = ("".join(s.text for s in model.generate(plan, how, params)) for how in (base, None))
    assert stitched == exact
    assert "412" in stitched
    assert torch.isfinite(truth).all()
