"""Keys before RoPE, taken from the model while it runs.

For the families listed here a forward hook records the output of the module that makes the keys (after their norm,
where the model norms first). The layout of that output is stated per family, not guessed from its shape: [T, H, D]
and [H, T, D] look alike when T == H. For other families the keys that the model hands to its cache are rotated back
in fp32, which costs one more rounding. Either way `engine.model` checks at load that rotating what was captured gives
what the model rotated itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kernels import RopeLayout, RopeTables, rotate

# Per model type: (module of the attention, layout of its output), the first one that the model has.
_PLAIN = (("k_proj", "T,H*D"),)
_FUSED = (("qkv_proj", "T,(Hq+H+H)*D"),)
_HOOKS: dict[str, tuple[tuple[str, str], ...]] = {
    "cohere": (("k_norm", "T,H,D"), *_PLAIN),
    "ernie4_5": _PLAIN,
    "gemma": _PLAIN,
    "gemma3_text": (("k_norm", "H,T,D"),),
    "glm": _PLAIN,
    "glm4": _PLAIN,
    "gpt_neox": (("query_key_value", "T,H*(D+D+D)"),),
    "granite": _PLAIN,
    "helium": _PLAIN,
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "mixtral": _PLAIN,
    "olmo2": (("k_norm", "T,H*D"),),
    "phi": (("k_layernorm", "H,T,D"), *_PLAIN),
    "phi3": _FUSED,
    "qwen2": _PLAIN,
    "qwen3": (("k_norm", "T,H,D"),),
    "qwen3_moe": (("k_norm", "T,H,D"),),
    "smollm3": _PLAIN,
    "stablelm": (("k_layernorm", "H,T,D"), *_PLAIN),
    "starcoder2": _PLAIN,
}

Sink = Callable[[int, torch.Tensor], None]  # layer, k [H, T, D] before RoPE


class Capture:
    """How one model's keys are captured. Immutable."""

    def __init__(self, model_type: str, layers: list[Any], n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        self._shape = (n_heads, n_kv_heads, head_dim)
        self._points: list[tuple[Any, str]] = []
        for layer in layers:
            attention = next(
                (getattr(layer, name) for name in ("self_attn", "attention") if hasattr(layer, name)), None
            )
            found = [
                (getattr(attention, name), layout)
                for name, layout in _HOOKS.get(model_type, ())
                if isinstance(getattr(attention, name, None), torch.nn.Module)
            ]
            self._points += found[:1]
        self.hooked = len(self._points) == len(layers)  # else keys are rotated back

    @contextmanager
    def into(self, sink: Sink) -> Iterator[None]:
        """While open, every layer's keys go to `sink` before the layer rotates them. One pass at a time."""
        handles = []
        try:
            if self.hooked:
                for number, (module, layout) in enumerate(self._points):
                    handles.append(module.register_forward_hook(self._hook(number, layout, sink)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, number: int, layout: str, sink: Sink) -> Callable[[Any, Any, torch.Tensor], None]:
        def record(_module: Any, _args: Any, out: torch.Tensor) -> None:
            sink(number, _heads_first(out[0], layout, *self._shape))

        return record


def _heads_first(out: torch.Tensor, layout: str, n_heads: int, n_kv_heads: int, head_dim: int) -> torch.Tensor:
    """A module's output as `[H, T, D]`."""
    if layout == "H,T,D":
        return out
    if layout == "T,H,D":
        return out.transpose(0, 1)
    if layout == "T,H*D":
        return out.view(-1, n_kv_heads, head_dim).transpose(0, 1)
    if layout == "T,H*(D+D+D)":
        return out.view(-1, n_kv_heads, 3, head_dim)[:, :, 1].transpose(0, 1)
    assert layout == "T,(Hq+H+H)*D", layout
    keys = out[:, n_heads * head_dim : (n_heads + n_kv_heads) * head_dim]
    return keys.reshape(-1, n_kv_heads, head_dim).transpose(0, 1)


def rotate_back(k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: RopeLayout) -> torch.Tensor:
    """Undo a rotation: `k [H, T, D]`, tables `[T, R/2]` with the attention scaling in them, which is divided out."""
    power = cos.square() + sin.square()  # the square of the attention scaling
    return rotate(k, cos / power, -sin / power, layout).to(k.dtype)


def tables_at(
    tables: RopeTables, positions: torch.Tensor, final_length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin `[tables, T, R/2]` at arbitrary positions."""
    start = int(positions.min())
    cos, sin = tables.tables(start, int(positions.max()) + 1, final_length, device)
    at = (positions - start).to(device)
    return cos[:, at], sin[:, at]
