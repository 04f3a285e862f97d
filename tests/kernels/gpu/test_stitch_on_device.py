"""The compiled stitch on a CUDA device. Run by themselves, without the interpreter: `pytest tests/kernels/gpu`."""

import os

import pytest
import torch

from kernels import RopeLayout, attend, later, position_mask
from tests.kernels.stitch_cases import Case, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"),
]


def on_device(case: Case, impl: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """Run a case with everything but the places on the device; results come back to the host."""
    for name in ("k", "v"):
        setattr(case, name, [chunk.cuda() for chunk in getattr(case, name)])
    host = case.destination
    case.destination = lambda: host().cuda()
    dst_k, dst_v = case.run(impl)
    for name in ("k", "v"):
        setattr(case, name, [chunk.cpu() for chunk in getattr(case, name)])
    return dst_k.cpu(), dst_v.cpu()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [128, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_right_and_round_once(dtype, rotary_dim, interleaved):
    """Bit-equal to the fp32 twin, rounded once to nearest: the kernel is compiled without fused multiply-add."""
    case = Case(heads=4, head_dim=128, layout=RopeLayout(rotary_dim, interleaved), lens=(300, 1, 17), dtype=dtype)
    check(case, *on_device(case))


def test_the_reference_is_right_on_a_device_too():
    case = Case(heads=3, head_dim=64, layout=RopeLayout(64), lens=(20, 5))
    check(case, *on_device(case, "reference"))


@pytest.mark.slow
def test_more_elements_than_int32_counts():
    """A 32-bit offset would wrap and write into another layer."""
    n_layers, n_heads, n_slots, head_dim = 2, 8, 1_100_000, 128  # 2.25e9 elements per tensor
    case = Case(heads=n_heads, head_dim=head_dim, layout=RopeLayout(head_dim), lens=(16,), dtype=torch.bfloat16)
    shape = n_layers, n_heads, n_slots, head_dim
    case.destination = lambda: torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    case.k, case.v = [x.cuda() for x in case.k], [x.cuda() for x in case.v]
    case.slots = torch.arange(n_slots - 16, n_slots)
    assert case.slots[-1] < n_slots
    case.n_slots = n_slots
    dst_k, dst_v = case.run("auto")
    assert torch.equal(dst_v[:, :, -16:], case.v[0])
    assert int((dst_k[:, :, :-16] != 0).sum()) == 0


def test_attention_over_sets_on_a_device():
    q, k, v = (torch.randn(n, 50, 64, device="cuda") for n in (8, 2, 2))
    p = torch.arange(50)
    got = attend(q, [(k, v, position_mask(p, p))], 0.125)
    score = (q.double() @ k.double().repeat_interleave(4, 0).mT * 0.125).cpu().masked_fill(later(p, p), float("-inf"))
    exact = score.softmax(-1) @ v.double().cpu().repeat_interleave(4, 0)
    assert (got.cpu().double() - exact).abs().max() < 1e-4
