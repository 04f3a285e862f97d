"""Tiny random models, one per way of rotating keys, and what the probe must say of each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
ROPE = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 5e5,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 1024},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + n for n in range(8)],
    },
}


@dataclass(frozen=True)
class Family:
    """A tiny model and its rotary layout: name in the fingerprint, R of D = 16, table name of each of 3 layers."""

    name: str
    build: Callable[[], Any]
    layout: str = "half_split"
    rotary_dim: int = 16
    layers: tuple[str, ...] = ("default",) * 3


def _families() -> dict[str, Family]:
    import transformers as tf

    def llama(rope: dict[str, Any] | None) -> Callable[[], Any]:
        extra = {} if rope is None else {"rope_parameters": dict(rope)}
        return lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE, **extra))

    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    listed = [Family(f"llama_{name}", llama(rope)) for name, rope in ROPE.items()]
    listed += [
        Family("qwen3", lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SHAPE, head_dim=16))),
        Family("phi3_partial", lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**SHAPE, rope_parameters=half)), rotary_dim=8),
        Family("phi_partial", lambda: tf.PhiForCausalLM(tf.PhiConfig(**SHAPE)), rotary_dim=8),
        Family("cohere", lambda: tf.CohereForCausalLM(tf.CohereConfig(**SHAPE)), "interleaved"),
        Family("glm_partial", lambda: tf.GlmForCausalLM(tf.GlmConfig(**SHAPE, head_dim=16)), "interleaved", 8),
        Family("nanochat", lambda: tf.NanoChatForCausalLM(tf.NanoChatConfig(**SHAPE)), "half_split_reversed"),
        Family(
            "gemma3",
            lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SHAPE, head_dim=16, layer_types=KINDS)),
            layers=tuple(KINDS),
        ),
        Family(
            "cohere2",
            lambda: tf.Cohere2ForCausalLM(tf.Cohere2Config(**SHAPE, layer_types=KINDS)),
            "interleaved",
            layers=("default", "none", "default"),
        ),
        Family(
            "smollm3",
            lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1])),
            layers=("default", "none", "default"),
        ),
    ]
    return {family.name: family for family in listed}


NAMES = [
    *(f"llama_{name}" for name in ROPE),
    *("qwen3", "phi3_partial", "phi_partial", "cohere", "glm_partial", "nanochat", "gemma3", "cohere2", "smollm3"),
]


def family(name: str) -> Family:
    """One family by name; transformers is imported here, not when tests are collected."""
    return _families()[name]


def build(name: str) -> Any:
    """The family's model: random weights from a fixed seed, fp32, in evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own remarks on tiny configurations
        torch.manual_seed(0)
        return family(name).build().eval()
