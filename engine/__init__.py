"""One causal LM with reusable KV: identity, tokenizer, prompt, chunk prefill, stitch, decode; and the text encoder.

The door of the package. Names are loaded on first use: importing `engine` imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.composite import composite_plan
    from engine.decode import SamplingParams, Step
    from engine.embedder import Embedder, EmbedderIdentity, embedder_identity, load_embedder
    from engine.identity import Identity, resolve_fingerprint, resolve_generation
    from engine.load import load_model
    from engine.model import Model
    from engine.plan import Plan, PlannedChunk, Segment, Source, plan_prompt, without_reuse
    from engine.prompt import PromptTemplate
    from engine.rows import Base, KvRows
    from engine.tokenizer import Tokenizer, load_tokenizer

_HOME = {
    "Base": "rows",
    "Embedder": "embedder",
    "EmbedderIdentity": "embedder",
    "Identity": "identity",
    "KvRows": "rows",
    "Model": "model",
    "Plan": "plan",
    "PlannedChunk": "plan",
    "PromptTemplate": "prompt",
    "SamplingParams": "decode",
    "Segment": "plan",
    "Source": "plan",
    "Step": "decode",
    "Tokenizer": "tokenizer",
    "composite_plan": "composite",
    "embedder_identity": "embedder",
    "load_embedder": "embedder",
    "load_model": "load",
    "load_tokenizer": "tokenizer",
    "plan_prompt": "plan",
    "resolve_fingerprint": "identity",
    "resolve_generation": "identity",
    "without_reuse": "plan",
}

__all__ = [
    "Base",
    "Embedder",
    "EmbedderIdentity",
    "Identity",
    "KvRows",
    "Model",
    "Plan",
    "PlannedChunk",
    "PromptTemplate",
    "SamplingParams",
    "Segment",
    "Source",
    "Step",
    "Tokenizer",
    "composite_plan",
    "embedder_identity",
    "load_embedder",
    "load_model",
    "load_tokenizer",
    "plan_prompt",
    "resolve_fingerprint",
    "resolve_generation",
    "without_reuse",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(f"engine.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
