"""The tables and the probe against the models of transformers themselves."""

import copy
import inspect

import pytest
import torch

from kernels import RopeTables, probe, rotate
from schemas.errors import UnsupportedModelError
from tests.kernels import rope_families
from tests.kernels.rope_families import NAMES, family

OFFSETS = [0, 1, 1_000, 8_000, 32_000]  # a missing scaling is exactly zero error at 0 and grows with the position
N_TOKENS = 5


class _Keys(Exception):  # noqa: N818
    pass


class _Stop:
    def update(self, keys, *_, **__):
        self.keys = keys
        raise _Keys


def keys_at(model, layer, hidden, positions, rotating=True):
    """The keys `[H, T, D]` that a layer of the model itself puts into its cache for tokens at `positions`."""
    attention = model.get_decoder().layers[layer].self_attn
    rotary = copy.deepcopy(model.get_decoder().rotary_emb)
    kinds = getattr(model.config, "layer_types", None)
    per_type = kinds and hasattr(rotary, f"{kinds[layer]}_inv_freq")
    cos, sin = rotary(hidden, positions[None], **({"layer_type": kinds[layer]} if per_type else {}))
    if not rotating:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    stop = _Stop()
    argument = "cache" if "cache" in inspect.signature(attention.forward).parameters else "past_key_values"
    with torch.no_grad(), pytest.raises(_Keys):
        attention(hidden_states=hidden, position_embeddings=(cos, sin), attention_mask=None, **{argument: stop})
    return stop.keys[0]


def our_keys(tables, layer, keys, offset):
    """The same keys, rotated by our tables to offset, offset + 1, …"""
    cos, sin = tables.tables(offset, offset + N_TOKENS, final_length=offset + N_TOKENS)
    number = tables.table_of_layer[layer]
    return rotate(keys, cos[number], sin[number], tables.layout)


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_reads_layout_and_table_of_every_layer(name, tiny_model):
    """ENG-01: partial rotary or rope per layer type was rotated wrongly while the answers stayed plausible."""
    tables = RopeTables.from_model(tiny_model(name))
    expected = family(name)
    assert (tables.layout.name, tables.layout.rotary_dim) == (expected.layout, expected.rotary_dim)
    assert tuple(tables.table_names[n] for n in tables.table_of_layer) == expected.layers
    assert probe(tiny_model(name)) == tables.layout
    assert set(tables.digests) == set(expected.layers)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", NAMES)
def test_eng_03_our_rotation_is_the_models_own_at_every_offset(name, offset, tiny_model):
    """ENG-01/03, KER-03: wrong pairs, a lost scaling or a lost attention factor pass at position 0 and fail later."""
    model = tiny_model(name)
    tables = RopeTables.from_model(model)
    positions = torch.arange(offset, offset + N_TOKENS)
    hidden = torch.randn(1, N_TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(offset))
    for layer in range(3):
        before = keys_at(model, layer, hidden, positions, rotating=False)
        theirs = keys_at(model, layer, hidden, positions)
        ours = our_keys(tables, layer, before, offset)
        # both compute cos and sin of the same fp32 angle; torch's vector and scalar code may differ by an ulp or two
        assert (ours - theirs).abs().max() <= 8 * torch.finfo(torch.float32).eps * theirs.abs().max()
        if offset and tables.table_names[tables.table_of_layer[layer]] != "none":
            late = our_keys(tables, layer, before, offset - 1)
            assert (late - theirs).abs().max() > 1e-2, "an error of one position must be visible"


@pytest.mark.parametrize("shift", [1, 1_000, 8_000, 32_000])
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("llama_dynamic", "llama_longrope")])
def test_eng_02_keys_shifted_by_a_delta_are_keys_of_the_later_position(name, shift, tiny_model):
    """ENG-02: rope scaling (Llama 3.1) unsupported, reuse silently wrong. The delta carries no attention factor."""
    model = tiny_model(name)
    tables = RopeTables.from_model(model)
    hidden = torch.randn(1, N_TOKENS, model.config.hidden_size)
    for layer in range(3):
        number = tables.table_of_layer[layer]
        near = keys_at(model, layer, hidden, torch.arange(N_TOKENS)).double()
        far = keys_at(model, layer, hidden, torch.arange(shift, shift + N_TOKENS)).double()
        cos, sin = (table[number].double() for table in tables.tables(shift, shift + 1))
        m = (cos**2 + sin**2).sqrt()  # tables carry the attention factor; a delta between two rotated keys must not
        moved = rotate(near, cos / m, sin / m, tables.layout)
        # fp32 angles: position * inv_freq is rounded once on each side, 2^-24 of up to 32,005 radians
        assert (moved - far).abs().max() <= 4 * shift * 2**-24 * far.abs().max() + 1e-5


def test_yarn_tables_carry_the_attention_factor_exactly_once(tiny_model):
    """The m-trap: a factor applied twice (or not at all) multiplies every key by 1.14 and no test at 0 sees it."""
    cos, sin = RopeTables.from_model(tiny_model("llama_yarn")).tables(0, 50)
    m = tiny_model("llama_yarn").model.rotary_emb.attention_scaling
    assert m == pytest.approx(1.1386, abs=1e-4)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, m * m))


def test_layers_without_rotation_get_a_table_that_copies(tiny_model):
    """Cohere2 and SmolLM3 leave layers out; rotating those would move keys that the model never moved."""
    tables = RopeTables.from_model(tiny_model("smollm3"))
    cos, sin = tables.tables(777, 780)
    number = tables.table_names.index("none")
    assert bool((cos[number] == 1).all())
    assert bool((sin[number] == 0).all())


@pytest.mark.parametrize("name", ["llama_dynamic", "llama_longrope"])
def test_length_dependent_frequencies_follow_the_final_length(name, tiny_model):
    """All keys of a prompt take the frequencies of its final length, whatever part of the prompt is rotated first."""
    tables = RopeTables.from_model(tiny_model(name))
    assert tables.length_dependent
    with pytest.raises(ValueError, match="final_length is needed"):
        tables.tables(0, 10)
    short, long = tables.tables(0, 10, final_length=100)[0], tables.tables(0, 10, final_length=20_000)[0]
    assert not torch.equal(short, long)
    assert torch.equal(short, tables.tables(0, 10, final_length=100)[0]), "a long prompt must not change the next one"


@pytest.mark.parametrize("name", ["llama_dynamic", "llama_longrope"])
def test_tables_leave_the_live_module_alone(name):
    """One long call through the live rotary module changes its frequencies for everybody (measured on transformers)."""
    model = rope_families.build(name)
    before = model.model.rotary_emb.inv_freq.clone()
    RopeTables.from_model(model).tables(0, 10, final_length=30_000)
    assert torch.equal(before, model.model.rotary_emb.inv_freq)


def test_digests_tell_apart_everything_that_changes_the_numbers(tiny_model):
    """A stored key is only usable under the rotation it is served with: the fingerprint must see each difference."""
    digests = {name: tuple(RopeTables.from_model(tiny_model(name)).digests.items()) for name in NAMES}
    same = {frozenset((x, y)) for x in NAMES for y in NAMES if x != y and digests[x] == digests[y]}
    alike = {frozenset(("llama_default", "qwen3")), frozenset(("phi_partial", "phi3_partial"))}
    assert same == alike, "those rotate alike, no others do"
    assert RopeTables.from_model(rope_families.build("gemma3")).digests == (
        RopeTables.from_model(tiny_model("gemma3")).digests
    ), "a digest must not depend on the process or on the weights"


def test_eng_01_a_layer_that_rotates_differently_is_refused(tiny_model):
    """ENG-01: one layer that turns its keys a thousandth too far gives answers that look right."""
    model = copy.deepcopy(tiny_model("llama_default"))
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def almost(hidden_states, position_embeddings, attention_mask=None, cache=None):
        cos, sin = position_embeddings
        return forward(hidden_states, (cos, sin * 1.001), attention_mask, cache)

    attention.forward = almost
    with pytest.raises(UnsupportedModelError, match=r"layer 1: its keys are rotated in a way that we do not know"):
        RopeTables.from_model(model)


def test_models_without_one_rotary_module_are_refused_with_a_sentence():
    """GPT-2 has no rotary embedding, GPT-J keeps its own: both are served, without reuse."""
    import transformers as tf

    model = tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    )
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel has 0 modules .* exact mode only"):
        RopeTables.from_model(model)


def test_layers_without_attention_are_refused():
    """Hybrid models (linear attention layers) keep a state that is no row per token."""
    import transformers as tf

    with pytest.raises(UnsupportedModelError, match=r"layer 0: .* has no attention that takes position embeddings"):
        RopeTables.from_model(tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**rope_families.SHAPE, num_experts=2)))
