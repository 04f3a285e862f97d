"""Tiny models of many families, random weights, fp32: what is true of them is true of the code path."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: many tests share two cores

import torch
import transformers as tf

from engine.hf_adapter import ATTENTION, HfModel, spec_of
from engine.identity import make_fingerprint
from engine.model import Model
from engine.prompt import PromptTemplate
from engine.tokenizer import Tokenizer

VOCAB = 300
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # large enough that attention looks somewhere
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_GROUPS = {**SHAPE, "num_key_value_heads": 4}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 5e5,
    "original_max_position_embeddings": 1024,
}
LONGROPE = {
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [2.0 + 1.5 * n for n in range(8)],
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

REUSABLE = {
    "llama": lambda: tf.LlamaConfig(**SHAPE),
    "llama linear": lambda: tf.LlamaConfig(**SHAPE, rope_parameters=LINEAR),
    "llama llama3": lambda: tf.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama yarn": lambda: tf.LlamaConfig(**SHAPE, rope_parameters=YARN),
    "qwen2 bias": lambda: tf.Qwen2Config(**SHAPE),
    "qwen3 k_norm": lambda: tf.Qwen3Config(**SHAPE, head_dim=16),
    "phi partial": lambda: tf.PhiConfig(**NO_GROUPS, partial_rotary_factor=0.5),
    "phi partial k_norm": lambda: tf.PhiConfig(**NO_GROUPS, partial_rotary_factor=0.5, qk_layernorm=True),
    "gpt_neox partial fused": lambda: tf.GPTNeoXConfig(**NO_GROUPS, rotary_pct=0.25),
    "stablelm partial": lambda: tf.StableLmConfig(**SHAPE, partial_rotary_factor=0.25),
    "phi3 fused": lambda: tf.Phi3Config(**SHAPE),
    "cohere interleaved": lambda: tf.CohereConfig(**SHAPE),
    "glm interleaved partial": lambda: tf.GlmConfig(**SHAPE, head_dim=16, partial_rotary_factor=0.5),
    "gemma3 two tables": lambda: tf.Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=4096, layer_types=KINDS),
    "smollm3 some layers without": lambda: tf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1]),
    "phi3 longrope": lambda: tf.Phi3Config(
        **SHAPE, original_max_position_embeddings=2048, rope_parameters={"rope_type": "longrope", **LONGROPE}
    ),
    "llama dynamic": lambda: tf.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    ),
    "arcee by rotating back": lambda: tf.ArceeConfig(**SHAPE),
    "arcee yarn by rotating back": lambda: tf.ArceeConfig(**SHAPE, rope_parameters=YARN),
}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN: a row that is read before it is written shows in every number (ENG-05)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def byte_tokenizer() -> Tokenizer:
    """One id per byte from 10 on, three special tokens in front; no merges."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: n for n, name in enumerate(["<pad>", "<s>", "</s>", *(f"<{n}>" for n in range(3, 10)), *alphabet])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<s>", "</s>")])
    hf = tf.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    return Tokenizer(hf)


def tiny_module(config: tf.PreTrainedConfig, seed: int = 0) -> tf.PreTrainedModel:
    """Random weights, norms and biases included: those are ones and zeros by default and would hide mistakes."""
    torch.manual_seed(seed)
    module = tf.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=ATTENTION).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def tiny_model(config: tf.PreTrainedConfig, seed: int = 0) -> Model:
    """A servable model of the configuration."""
    module, spec, tokenizer = tiny_module(config, seed), spec_of(config), byte_tokenizer()
    fingerprint = make_fingerprint("tiny", spec, "0" * 64, tokenizer.digest, "float32")
    return Model(HfModel(module), spec, fingerprint, tokenizer, model_type=config.model_type)


@pytest.fixture(scope="session")
def llama() -> Model:
    return tiny_model(REUSABLE["llama"]())


def template_of(model: Model, n_prefix: int = 5, n_separator: int = 1) -> PromptTemplate:
    """A template of arbitrary ids."""
    generator = torch.Generator().manual_seed(n_prefix)
    prefix = torch.randint(3, VOCAB, (n_prefix,), generator=generator).tolist()
    separator = torch.randint(3, VOCAB, (n_separator,), generator=generator).tolist()
    return PromptTemplate(tuple(prefix), tuple(separator), (), (), model.tokenizer)


def random_ids(n: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist())
