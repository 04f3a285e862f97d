"""Compiles the stitch kernel for sm_90 without a GPU; prints what the machine code of each
configuration does as one JSON list.

A child process of its own, because the kernels of the test process may be interpreted ones.
"""

import collections
import json
import pathlib
import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import RopeLayout
from kernels.triton.stitch import constants, options, stitch_kernel

CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = "*{0} *{0} *{0} *{0} *fp32 *fp32 *i32 *i64 *i32 *i32 *i64 i32 i32 i64 i64 i64"
SM = 90
CONFIGURATIONS = {
    "Qwen2-7B": ("bf16", 4, 128, RopeLayout(128)),
    "Qwen2-7B in fp32": ("fp32", 4, 128, RopeLayout(128)),
    "Llama 3, 8 heads": ("bf16", 8, 128, RopeLayout(128)),
    "SmolLM2, 3 heads": ("bf16", 3, 64, RopeLayout(64)),
    "Cohere, interleaved": ("bf16", 8, 128, RopeLayout(128, interleaved=True)),
    "GLM-4, interleaved, half of each row": ("bf16", 2, 128, RopeLayout(64, interleaved=True)),
}


def machine_code(dtype: str, heads: int, head_dim: int, layout: RopeLayout) -> dict[str, object]:
    """{load and store widths in bits: count}, registers and stack bytes of one configuration."""
    values = constants(heads, head_dim, layout)
    names = stitch_kernel.arg_names
    types = dict(zip([n for n in names if n not in values], TYPES.format(dtype).split(), strict=True))
    aligned = [n for n, kind in types.items() if kind[0] == "*" or n.startswith("stride")]
    source = ASTSource(
        fn=stitch_kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in values.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    built = triton.compile(source, target=GPUTarget("cuda", SM, 32), options=options(values))
    result: dict[str, object] = {}
    for name, op in (("loads", "ld"), ("stores", "st")):
        found = re.findall(rf"\b{op}\.global(?:\.\w+|::\w+)*?(?:\.v(\d))?\.[a-z](\d+)\b", built.asm["ptx"])
        result[name] = dict(collections.Counter(int(v or 1) * int(bits) for v, bits in found))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    for name, key in (("registers", "REG"), ("stack", "STACK")):
        match = re.search(rf"{key}:(\d+)", usage)
        assert match, usage
        result[name] = int(match[1])
    return result


if __name__ == "__main__":
    print(json.dumps({name: machine_code(*configuration) for name, configuration in CONFIGURATIONS.items()}))
