"""Time stitch and attention on this machine: `python -m bench.kernels [--threads N] [--repeats N]`.

Progress goes to stderr; the last line on stdout is one JSON object. Times are medians in milliseconds, and the best
beside them: on a busy machine the two lie far apart, and then neither means much.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from kernels import RopeLayout, attend, position_mask, stitch_kv

# SmolLM2-135M: layers, kv heads, query heads per kv head, head dim; a prompt of 4,096 tokens in chunks of 512
L, H, G, D = 30, 3, 3, 64
N_TOKENS, CHUNK = 4096, 512
SCALE = D**-0.5


def measure(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median and best of `repeats` runs after one that does not count, in ms."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e3)
    return {"median_ms": round(statistics.median(times), 3), "best_ms": round(min(times), 3)}


def stitch_case(dtype: torch.dtype) -> Callable[[], object]:
    """All layers of 8 chunks into one contiguous cache."""
    chunks = [torch.randn(2, L, H, CHUNK, D).to(dtype) for _ in range(N_TOKENS // CHUNK)]
    dst = torch.zeros(2, L, H, N_TOKENS, D, dtype=dtype)
    angle = torch.arange(N_TOKENS).float()[:, None] * 1e5 ** (-torch.arange(0, D, 2) / D)
    places = torch.arange(N_TOKENS)
    cos, sin, layout = angle.cos(), angle.sin(), RopeLayout(D)

    def run() -> None:
        stitch_kv(
            [k for k, _ in chunks],
            [v for _, v in chunks],
            dst[0],
            dst[1],
            positions=places,
            slots=places,
            cos=cos,
            sin=sin,
            pos_base=0,
            layout=layout,
        )

    return run


def copy_case(dtype: torch.dtype) -> Callable[[], object]:
    """The same bytes moved by one plain copy: what stitch would take if it did no arithmetic."""
    source, target = (torch.ones(2, L, H, N_TOKENS, D, dtype=dtype) for _ in range(2))
    return lambda: target.copy_(source)


def attention_case(dtype: torch.dtype, q_pos: torch.Tensor, n_keys: int) -> Callable[[], object]:
    """One layer: query rows at `q_pos` over keys 0 … n_keys - 1."""
    q, mask = torch.randn(H * G, len(q_pos), D).to(dtype), position_mask(q_pos, torch.arange(n_keys))
    k, v = torch.randn(2, H, n_keys, D).to(dtype)
    return lambda: attend(q, [(k, v, mask)], SCALE)


def cases(dtype: torch.dtype) -> dict[str, Callable[[], Callable[[], object]]]:
    """Name -> set-up of one measurement."""
    scattered = (
        torch.randperm(N_TOKENS, generator=torch.Generator().manual_seed(0))[: int(0.15 * N_TOKENS)].sort().values
    )
    n = N_TOKENS
    return {
        "copy": lambda: copy_case(dtype),
        "stitch": lambda: stitch_case(dtype),
        "attend_decode_layer": lambda: attention_case(dtype, torch.tensor([n]), n + 1),
        "attend_question_40_layer": lambda: attention_case(dtype, torch.arange(n, n + 40), n + 40),
        "attend_repair_15_percent_layer": lambda: attention_case(dtype, scattered, n),
        "attend_full_prefill_layer": lambda: attention_case(dtype, torch.arange(n), n),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves torch's choice")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry with the other benches: always on")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {
        "bench": "kernels",
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "shape": {"L": L, "H": H, "G": G, "D": D, "n_tokens": N_TOKENS, "chunk": CHUNK},
        "results": {},
    }
    for dtype in (torch.float32, torch.bfloat16):
        for name, set_up in cases(dtype).items():
            key = f"{name}_{str(dtype).removeprefix('torch.')}"
            result["results"][key] = times = measure(set_up(), arguments.repeats)
            print(f"{key}: {times['median_ms']} ms, best {times['best_ms']}", file=sys.stderr, flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
