"""Check and time the Triton stitch on a GPU, in under five minutes: `python -m bench.gpu`.

Correctness first (bit equality with the fp32 twin on the device), then GB/s beside a plain copy of the same bytes.
Progress goes to stderr; the last line on stdout is one JSON object. Without a CUDA device it says so in both
places and measures nothing. Start it without TRITON_INTERPRET.

Bytes model: K and V read and written once, 28 B of descriptors per token, and cos and sin once per token (they stay
in L2 for the other layers).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels import RopeLayout, attend, rotate, stitch_kv


@dataclass(frozen=True)
class Shape:
    """One model's rows."""

    name: str
    n_layers: int
    n_heads: int
    head_dim: int
    layout: RopeLayout
    groups: int = 7


SHAPES = (
    Shape("qwen2_7b", 28, 4, 128, RopeLayout(128)),
    Shape("llama3_8b", 32, 8, 128, RopeLayout(128), groups=4),
    Shape("smollm2_135m", 30, 3, 64, RopeLayout(64), groups=3),
    Shape("glm4_9b", 40, 2, 128, RopeLayout(64, interleaved=True), groups=16),
)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOKENS = (512, 4096, 32_768)
CHUNK = 512


class Setup:
    """Pools, tables and a destination on the device, and the call that stitches them."""

    def __init__(self, shape: Shape, n_tokens: int, dtype: torch.dtype, *, paged: bool = False) -> None:
        self.shape, self.n_tokens, self.dtype = shape, n_tokens, dtype
        self.lens = [CHUNK] * (n_tokens // CHUNK)
        rows = shape.n_layers * shape.n_heads * n_tokens
        generator = torch.Generator("cuda").manual_seed(0)
        self.k, self.v = (
            torch.randn(rows, shape.head_dim, device="cuda", dtype=dtype, generator=generator) for _ in range(2)
        )
        sizes = (shape.n_layers, shape.n_heads, n_tokens, shape.head_dim)
        if paged:
            sizes = (shape.n_layers, n_tokens, shape.n_heads, shape.head_dim)
        self.dst_k, self.dst_v = (torch.zeros(sizes, device="cuda", dtype=dtype) for _ in range(2))
        if paged:
            self.dst_k, self.dst_v = self.dst_k.transpose(1, 2), self.dst_v.transpose(1, 2)
        self.positions = torch.arange(8000, 8000 + n_tokens)
        self.slots = torch.randperm(n_tokens) if paged else torch.arange(n_tokens)
        pairs = torch.arange(0, shape.layout.rotary_dim, 2) / shape.layout.rotary_dim
        angle = self.positions.float()[:, None] * 1e6 ** (-pairs)
        self.cos, self.sin = angle.cos().cuda(), angle.sin().cuda()

    def run(self, impl: str = "triton") -> None:
        """One stitch of all layers."""
        stitch_kv(
            self.k,
            self.v,
            self.dst_k,
            self.dst_v,
            positions=self.positions,
            slots=self.slots,
            cos=self.cos,
            sin=self.sin,
            pos_base=8000,
            layout=self.shape.layout,
            chunk_lens=self.lens,
            impl=impl,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that have to move, by the bytes model above."""
        payload = 2 * 2 * self.k.numel() * self.k.element_size()
        return payload + self.n_tokens * (28 + 4 * self.shape.layout.rotary_dim)

    def twin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[L, H, slots, D]` by the fp32 twin in torch, on the same device."""
        shape, out = self.shape, (torch.zeros_like(self.dst_k), torch.zeros_like(self.dst_v))
        start = row = 0
        for n in self.lens:
            size = shape.n_layers * shape.n_heads * n
            block = (shape.n_layers, shape.n_heads, n, shape.head_dim)
            where = self.slots[start : start + n].cuda()
            tables = self.cos[start : start + n], self.sin[start : start + n]
            keys = rotate(self.k[row : row + size].view(block), *tables, shape.layout)
            out[0][:, :, where] = keys.to(self.dtype)
            out[1][:, :, where] = self.v[row : row + size].view(block)
            start, row = start + n, row + size
        return out


def device_ms(run: Callable[[], object]) -> float:
    """Median time on the device, L2 cleared between runs."""
    import triton.testing

    return float(triton.testing.do_bench(run, warmup=10, rep=60, quantiles=[0.5]))


def wall_ms(run: Callable[[], object], repeats: int = 20) -> float:
    """Best wall time of a call and its end on the device: what a request waits for."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def check() -> dict[str, bool]:
    """Bit equality with the twin, contiguous and paged, for every shape and dtype."""
    equal = {}
    for shape in SHAPES:
        for name, dtype in DTYPES.items():
            for paged in (False, True):
                setup = Setup(shape, 1024, dtype, paged=paged)
                setup.run()
                wanted = setup.twin()
                key = f"{shape.name}_{name}{'_paged' if paged else ''}"
                equal[key] = torch.equal(setup.dst_k, wanted[0]) and torch.equal(setup.dst_v, wanted[1])
                say(f"correct {key}: {equal[key]}")
    return equal


def speed(n_tokens_list: tuple[int, ...]) -> list[dict[str, Any]]:
    """GB/s of stitch beside a copy of the same bytes, launch to end, and one launch for all layers against L."""
    rows = []
    for shape in SHAPES:
        for n_tokens in n_tokens_list:
            setup = Setup(shape, n_tokens, torch.bfloat16)
            launch = prepared_launch(setup)
            source = torch.empty(setup.nbytes // 2, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            kernel, copy = device_ms(launch), device_ms(lambda: target.copy_(source))  # noqa: B023 - run at once
            row = {
                "shape": shape.name,
                "n_tokens": n_tokens,
                "kernel_ms": round(kernel, 4),
                "gb_per_s": round(setup.nbytes / kernel / 1e6, 1),
                "share_of_copy": round(copy / kernel, 3),
                "call_ms": round(wall_ms(setup.run), 4),
                "eager_ms": round(wall_ms(lambda: setup.run("reference"), 3), 3),  # noqa: B023
            }
            rows.append(row)
            say(json.dumps(row))
    return rows


def prepared_launch(setup: Setup) -> Callable[[], object]:
    """The kernel alone: descriptors and tables are on the device before the clock starts."""
    import triton

    from kernels.layout import descriptors
    from kernels.triton.stitch import constants, options, stitch_kernel

    shape = setup.shape
    src_row, src_step = (x.cuda() for x in descriptors(setup.lens, shape.n_layers, shape.n_heads))
    table = torch.zeros(shape.n_layers, dtype=torch.int32, device="cuda")
    rows, slots = (setup.positions - 8000).int().cuda(), setup.slots.cuda()
    sizes = constants(shape.n_heads, shape.head_dim, shape.layout)
    grid = (triton.cdiv(setup.n_tokens, sizes["BLOCK_T"]), shape.n_layers)
    strides = [setup.dst_k.stride(axis) for axis in (0, 1, 2)]
    pools = (setup.k, setup.v, setup.dst_k, setup.dst_v, setup.cos, setup.sin, table, src_row, src_step, rows, slots)

    def launch() -> None:
        stitch_kernel[grid](*pools, setup.n_tokens, setup.n_tokens, *strides, **sizes, **options(sizes))

    return launch


def attention() -> dict[str, float]:
    """The generic attention path on the device against torch's own, for one layer of each shape."""
    errors = {}
    for shape in SHAPES:
        q = torch.randn(shape.n_heads * shape.groups, 40, shape.head_dim, device="cuda")
        k, v = torch.randn(2, shape.n_heads, 4096, shape.head_dim, device="cuda")
        got = attend(q, [(k[:, :1000], v[:, :1000], None), (k[:, 1000:], v[:, 1000:], None)], 0.1)
        wide = k.double().repeat_interleave(shape.groups, 0), v.double().repeat_interleave(shape.groups, 0)
        exact = (q.double() @ wide[0].mT * 0.1).softmax(-1) @ wide[1]
        errors[shape.name] = float((got.double() - exact).abs().max())
        say(f"attention {shape.name}: max error {errors[shape.name]:.1e}")
    return errors


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS), help=f"multiples of {CHUNK}")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry with the other benches: always on")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        reason = "bench.gpu needs a CUDA device and found none; bench.kernels measures what runs on this CPU"
        say(reason)
        print(json.dumps({"bench": "gpu", "skipped": reason}))
        return
    import triton

    result = {
        "bench": "gpu",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "correct": check(),
        "attention_max_error": attention(),
        "stitch": speed(tuple(arguments.tokens)),
    }
    result["all_correct"] = all(result["correct"].values())
    print(json.dumps(result))
    if not result["all_correct"]:
        sys.exit("bench.gpu: the kernel does not give the twin's rows; its times mean nothing")


if __name__ == "__main__":
    main()
