"""The specification of stitch: against fp64, against an fp32 twin bit by bit, with canaries around every slot."""

import pytest
import torch

from kernels import RopeLayout, descriptors, rotate, stitch_kv
from kernels.reference import stitch as reference
from tests.kernels.stitch_cases import CANARY, POS_BASE, Case, check

LAYOUTS = [RopeLayout(r, interleaved, sign) for r in (16, 8, 2, 0) for interleaved in (False, True) for sign in (1, -1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.name}_{x.rotary_dim}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_layout_and_dtype(layout, dtype):
    """KER-03: pairing errors pass at small positions; these lie at 131,000."""
    case = Case(layout=layout, dtype=dtype)
    check(case, *case.run("reference"))


@pytest.mark.parametrize("lens", [(0,), (1,), (15,), (16,), (17,), (1, 0, 3), (1,) * 9])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 64), (5, 80)])
def test_chunk_lengths_and_head_shapes(lens, heads, head_dim):
    """Empty chunks, single tokens, lengths around a tile, head counts that are no power of two."""
    case = Case(heads=heads, head_dim=head_dim, lens=lens)
    check(case, *case.run("reference"))


def test_no_chunks_write_nothing():
    case = Case(lens=())
    assert all(bool((dst == CANARY).all()) for dst in case.run("reference"))


def test_slots_that_follow_each_other_are_written_in_place():
    """The rule in the engine: one contiguous prompt. Its short cut must give what the general way gives."""
    case = Case(slots=torch.arange(23) + 4)
    check(case, *case.run("reference"))


def test_a_paged_destination_is_a_transposed_view():
    case = Case(heads=3, paged=True)
    check(case, *case.run("reference"))


def test_pools_and_lists_of_chunks_are_the_same():
    case = Case(heads=3)
    for listed, pooled in zip(case.run("reference"), case.run("reference", as_pool=True), strict=True):
        assert torch.equal(listed, pooled)


def test_layers_take_their_own_table(monkeypatch):
    """Gemma 3 has two thetas: a layer rotated with the other one's table is wrong from position 1 on."""
    case = Case(layers=5, n_tables=2, table_of_layer=(1, 0, 1, 1, 0))
    check(case, *case.run("reference"))
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 2 * case.k[1][0].numel())  # two layers per block
    check(case, *case.run("reference"))


def test_cutting_a_chunk_in_two_changes_nothing():
    whole = Case(lens=(20,), slots=torch.arange(20))
    parts = Case(lens=(7, 13), slots=torch.arange(20))
    parts.k, parts.v = list(whole.k[0].split([7, 13], 2)), list(whole.v[0].split([7, 13], 2))
    parts.positions = whole.positions
    for a, b in zip(whole.run("reference"), parts.run("reference"), strict=True):
        assert torch.equal(a[:, :, :20], b[:, :, :20])


def test_rotation_keeps_norms_and_a_table_of_ones_copies():
    case = Case(lens=(30,), slots=torch.arange(30), dtype=torch.float32)
    got, _ = case.run("reference")
    torch.testing.assert_close(got[:, :, :30].norm(dim=-1), case.k[0].norm(dim=-1))
    case.cos, case.sin = torch.ones_like(case.cos), torch.zeros_like(case.sin)
    assert torch.equal(case.run("reference")[0][:, :, :30], case.k[0])


def test_rotating_back_gives_the_keys_again():
    x, angle = torch.randn(3, 9, 16).double(), torch.rand(9, 8).double() * 100
    for layout in (RopeLayout(16), RopeLayout(16, interleaved=True)):
        there = rotate(x, angle.cos(), angle.sin(), layout)
        torch.testing.assert_close(rotate(there, angle.cos(), -angle.sin(), layout), x)


def test_descriptors_name_the_rows_of_every_token():
    src_row, src_step = descriptors([2, 0, 3], n_layers=2, n_heads=3)
    assert src_row.tolist() == [0, 1, 12, 13, 14]
    assert src_step.tolist() == [2, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "cuda"}, r"impl must be one of .* \(got 'cuda'\)"),
        ({"pos_base": POS_BASE + 72}, r"positions .* must lie in the tables' 131072"),
        ({"slots": torch.zeros(23, dtype=torch.int64)}, "slots must not name a slot twice"),
        ({"slots": torch.arange(23) + 10}, r"slots must be -1 or below 32 \(got 10..32\)"),
        ({"slots": torch.arange(22)}, r"slots must hold 23 integers"),
        ({"positions": torch.zeros(23)}, r"positions must hold 23 integers \(got torch.float32"),
        ({"cos": torch.ones(72, 4)}, r"cos must be float32 \[span, 8\]"),
        ({"cos": torch.ones(2, 72, 8), "sin": torch.ones(2, 72, 8)}, "table_of_layer is needed: cos has 2 tables"),
        ({"table_of_layer": [0, 1]}, r"table_of_layer must hold 2 numbers below 1 \(got \[0, 1\]\)"),
        ({"chunk_lens": [1, 17]}, r"chunk_lens must be the lengths of k, \[1, 17, 5\] \(got \[1, 17\]\)"),
        ({"dst_v": torch.zeros(2, 2, 30, 16)}, r"dst_v must be like dst_k"),
        ({"dst_k": torch.zeros(2, 2, 16, 32).mT}, r"dst_k must be \[L, H, slots, D\] with D contiguous"),
        ({"k": torch.zeros(92, 16)}, "chunk_lens is needed: k is a flat pool"),
        ({"k": torch.zeros(91, 16), "chunk_lens": [1, 17, 5]}, r"k must be a contiguous pool \[92, 16\]"),
        ({"k": [torch.zeros(2, 3, 5, 16)]}, r"k\[0\] must be \[2, 2, T, 16\] like the destination"),
        ({"layout": RopeLayout(18)}, "layout rotates 18 elements of rows that have 16"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    case = Case()
    arguments = {
        "k": case.k,
        "v": case.v,
        "dst_k": case.destination(),
        "dst_v": case.destination(),
        "positions": case.positions,
        "slots": case.slots,
        "cos": case.cos,
        "sin": case.sin,
        "pos_base": POS_BASE,
        "layout": case.layout,
    }
    with pytest.raises(ValueError, match=message):
        stitch_kv(**{**arguments, **change})


@pytest.mark.parametrize("wrong", [{"rotary_dim": 3}, {"rotary_dim": -2}, {"rotary_dim": 4, "sign": 0}])
def test_impossible_layouts_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        RopeLayout(**wrong)
