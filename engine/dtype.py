"""Which dtype `auto` means: the one that is fastest for long inputs on this machine, measured once and remembered."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from engine.models import remembered
from schemas.ids import digest
from schemas.settings import EmbedderSettings, ModelSettings

CANDIDATES = ("float32", "bfloat16")  # float16 has no fast path on CPUs
_TOKENS, _ROUNDS = 1024, 5


def resolve_dtype(model: ModelSettings | EmbedderSettings, folder: Path, cache: Path) -> str:
    """The dtype's name. A GPU gets bfloat16; a CPU what is fastest for layers of this model's shape.

    The measurement is kept per CPU, torch version and model shape: an LLM's dtype is part of every fingerprint and must
    not change from start to start. Machines that share a KV store should name the dtype in the settings.
    """
    if model.dtype != "auto":
        return model.dtype
    if resolve_device(model.device).type == "cuda":
        return "bfloat16"
    from engine.hf_adapter import read_config

    config = read_config(folder)
    shape = [getattr(config, name, None) for name in ("model_type", "hidden_size", "intermediate_size")]
    key = digest([_cpu(), torch.__version__, shape])
    found = remembered(cache / "dtypes" / f"{key}.json", lambda: _measure(config))
    return str(found["dtype"])


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _measure(config: Any) -> dict[str, Any]:
    """Best seconds of one layer's matrix products and attention over a prompt of 1,024 tokens."""
    hidden = int(config.hidden_size)
    wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    inputs = {}
    for name in CANDIDATES:
        shapes = ((_TOKENS, hidden), (wide, hidden), (hidden, wide), (hidden, hidden), (1, heads, _TOKENS, head_dim))
        inputs[name] = [torch.randn(*shape).to(getattr(torch, name)) for shape in shapes]
    seconds = dict.fromkeys(CANDIDATES, float("inf"))
    for _ in range(_ROUNDS):  # taking turns, so that a busy moment hits all of them
        for name, tensors in inputs.items():
            begin = time.perf_counter()
            _one_layer(*tensors)
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    return {"dtype": min(seconds, key=lambda name: seconds[name]), "seconds": seconds, "cpu": _cpu()[0]}


@torch.inference_mode()
def _one_layer(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, out: torch.Tensor, q: torch.Tensor
) -> torch.Tensor:
    """The work of a decoder layer, without its small operations."""
    linear = torch.nn.functional.linear
    for _ in range(2):  # gate and up; query and output
        wide = linear(x, up)
        linear(x, out)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return linear(wide, down)


def _cpu() -> tuple[str, str]:
    """The CPU's model name and what torch can use of it."""
    name = "unknown"
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return name, str(torch.backends.cpu.get_cpu_capability())
