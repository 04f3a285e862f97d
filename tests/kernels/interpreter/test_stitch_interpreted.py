"""The Triton stitch in its interpreter, against the same twin and the same canaries as the reference.

At most about 300 programs per test (1.5 ms each). The interpreter has no tensor cores and no FMA, so fp32 must be
bit-equal; it cuts fp32 to bf16 where a GPU rounds, so 16-bit destinations get one unit more.
"""

import pytest
import torch

from kernels import RopeLayout
from tests.kernels.stitch_cases import Case, check

pytest.importorskip("triton", reason="triton is installed on Linux only")

LAYOUTS = [RopeLayout(r, interleaved, sign) for r in (16, 8, 0) for interleaved in (False, True) for sign in (1, -1)]


def interpreted() -> bool:
    from kernels.triton.stitch import stitch_kernel

    return type(stitch_kernel).__name__ == "InterpretedFunction"


def test_the_kernels_really_are_interpreted_here():
    """A kernel that was defined before the switch would be compiled, and these tests would need a GPU."""
    assert interpreted()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.name}_{x.rotary_dim}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ker_03_every_layout_at_large_positions(layout, dtype):
    """KER-03: interleaved and half-split pairs agree at small positions; these lie at 131,000."""
    case = Case(layout=layout, dtype=dtype)
    check(case, *case.run("triton"))


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim", "interleaved"),
    [(1, 80, 80, False), (3, 64, 64, True), (5, 96, 48, False), (4, 128, 128, False), (2, 256, 64, True)],
)
def test_head_shapes_that_are_no_power_of_two(heads, head_dim, rotary_dim, interleaved):
    """Padded head and row axes must neither read nor write beyond the row."""
    case = Case(heads=heads, head_dim=head_dim, layout=RopeLayout(rotary_dim, interleaved), lens=(3, 14))
    check(case, *case.run("triton"))


@pytest.mark.parametrize("lens", [(0,), (1,), (15,), (16,), (17,), (1, 0, 3), (1,) * 9])
def test_chunk_lengths_around_a_tile(lens):
    case = Case(lens=lens, heads=3)
    check(case, *case.run("triton"))


def test_pools_paged_destinations_and_tables_per_layer():
    """All in one launch: five layers with two tables, into a paged cache, from flat pools."""
    case = Case(heads=3, layers=5, n_tables=2, table_of_layer=(1, 0, 1, 1, 0), paged=True)
    check(case, *case.run("triton", as_pool=True))


def test_triton_and_reference_are_bit_equal():
    case = Case(heads=3, head_dim=64, layout=RopeLayout(64), lens=(40, 1, 9))
    for ours, specified in zip(case.run("triton"), case.run("reference"), strict=True):
        assert torch.equal(ours, specified)


def test_ker_01_bfloat16_rows():
    """KER-01: on many versions the interpreter took bf16 for raw bits; where it does, bf16 is left to a GPU."""
    import triton
    import triton.language as tl

    @triton.jit
    def add(x, y, out):
        tl.store(out, (tl.load(x).to(tl.float32) + tl.load(y).to(tl.float32)).to(tl.bfloat16))

    out = torch.zeros(1, dtype=torch.bfloat16)
    add[(1,)](torch.tensor([2.5]).bfloat16(), torch.tensor([2.0]).bfloat16(), out)
    if out.item() != 4.5:
        pytest.skip(f"this Triton interpreter has no bf16: 2.5 + 2.0 = {out.item()}")
    case = Case(heads=3, dtype=torch.bfloat16)
    check(case, *case.run("triton"), truncates=True)


def test_unaligned_destinations_are_refused():
    """They would silently make every access 16 bits wide."""
    case = Case()
    whole = torch.zeros(2 * 2 * 32 * 16 + 1)
    case.destination = lambda: whole[1:].view(2, 2, 32, 16)
    with pytest.raises(ValueError, match="dst_k must start at a multiple of 16 bytes"):
        case.run("triton")


def test_ker_02_the_kernel_uses_no_dot():
    """KER-02: TF32 in `tl.dot` is where interpreter and GPU differ; stitch has none."""
    from pathlib import Path

    from kernels.triton import primitives, stitch

    assert not any("tl.dot" in Path(module.__file__).read_text() for module in (primitives, stitch))
