"""Keys captured in one place are the model's keys in any other: far away and for every kind of RoPE scaling."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from engine.model import Model
from engine.plan import Plan, Segment, Source
from engine.rows import Base, Part
from tests.engine.conftest import LINEAR, LLAMA3, SHAPE, YARN, random_ids, tiny_model

LONG = {**SHAPE, "max_position_embeddings": 65_536}
KINDS = {
    "plain": lambda: tf.LlamaConfig(**LONG),
    "linear": lambda: tf.LlamaConfig(**LONG, rope_parameters=LINEAR),
    "llama3": lambda: tf.LlamaConfig(**LONG, rope_parameters=LLAMA3),
    "yarn": lambda: tf.LlamaConfig(**LONG, rope_parameters=YARN),
    "interleaved": lambda: tf.CohereConfig(**LONG),
    "partial": lambda: tf.GPTNeoXConfig(**{**LONG, "num_key_value_heads": 4}, rotary_pct=0.25),
}


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(KINDS[request.param]())


@torch.inference_mode()
def own_keys(model: Model, ids: tuple[int, ...], start: int) -> torch.Tensor:
    """`k [L, H, T, D]` as the model rotates it at positions start …, the ids alone in the prompt."""
    rows = Base(Part(model._like, len(ids))).open(0)
    positions = torch.arange(start, start + len(ids))
    rows.begin(positions)
    model._hf.run(torch.tensor(ids), positions, rows)
    return rows.own[0]


@pytest.mark.parametrize("offset", [1, 1_000, 8_000, 32_000])
def test_eng_02_eng_03_stitched_keys_are_those_that_the_model_makes_there(model: Model, offset: int) -> None:
    """A forgotten scaling has no error at position 0 and grows with the distance, so near positions prove nothing.

    Layer 0 sees nothing but token and position: there the keys must be equal to fp32 rounding of one rotation.
    """
    ids = random_ids(9, seed=1)
    (rows,) = model.prefill_chunks(ids[:1], [ids])
    end = offset + len(ids)
    plan = Plan(
        (ids[0],) * offset + ids + (3,),
        (
            Segment(0, 1, Source.PREFIX),
            Segment(1, offset, Source.FRESH),
            Segment(offset, end, Source.CACHED, 0),
            Segment(end, end + 1, Source.FRESH),
        )
        if offset > 1
        else (Segment(0, 1, Source.PREFIX), Segment(1, end, Source.CACHED, 0), Segment(end, end + 1, Source.FRESH)),
    )
    k, _, positions = model.stitch(plan, [rows], room=0).rows
    assert positions.tolist() == [0, *range(offset, end)]
    truth = own_keys(model, ids, offset)[0]
    torch.testing.assert_close(k[0][:, 1:], truth, rtol=0, atol=3e-6 * float(truth.abs().max()))
