"""What long-running commands print when they start."""

from __future__ import annotations

from cli.context import Context
from schemas.fingerprint import Generation


def say_identity(context: Context, generation: Generation) -> None:
    """The generation in use and the model behind it."""
    model = generation.fingerprint
    context.say(
        f"generation {generation.name}: chunks of {generation.chunk_max_tokens} tokens, embedder {generation.embedder} "
        f"({generation.embedding_dim} numbers)"
    )
    context.say(
        f"fingerprint {model.digest[:16]}: {model.model}, {model.dtype}, {model.n_layers} layers, "
        f"{model.n_kv_heads} kv heads of {model.head_dim}, RoPE {model.rope_layout}"
    )
