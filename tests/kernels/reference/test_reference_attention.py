"""Attention against plain fp64 softmax over the union of all keys, and the traps of the kernel below it."""

import subprocess
import sys

import pytest
import torch

from kernels import attend, later, merge_states, position_mask
from kernels.reference.attention import QUERY_BLOCK

EPS = {torch.float64: 2.3e-16, torch.float32: 1.2e-7, torch.bfloat16: 7.9e-3, torch.float16: 9.8e-4}
DTYPES = list(EPS)
H, G, D = 3, 3, 64


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(q, sets, scale=D**-0.5, dtype=torch.float64):
    """The yardstick: `sets` hold (k, v, hidden or None); softmax in `dtype` over all keys at once."""
    groups = q.shape[0] // sets[0][0].shape[0]
    k, v = (torch.cat([entry[n] for entry in sets], 1).to(dtype).repeat_interleave(groups, 0) for n in (0, 1))
    hidden = [torch.zeros(q.shape[1], s[0].shape[1], dtype=torch.bool) if s[2] is None else s[2] for s in sets]
    score = (q.to(dtype) @ k.mT * scale).masked_fill(torch.cat(hidden, 1), float("-inf"))
    return score.softmax(-1).nan_to_num(0.0) @ v


def error_bound(q, sets, exact):
    """What ordinary attention in the same dtype is off by, and the rounding of a handful of merges on top."""
    ordinary = (truth(q, sets, dtype=q.dtype).double() - exact).abs().max()
    return 2 * ordinary + 8 * EPS[q.dtype] * max(1.0, exact.abs().max())


def assert_exact(got, q, sets):
    exact = truth(q, sets)
    assert got.dtype == q.dtype
    assert (got.double() - exact).abs().max() <= error_bound(q, sets, exact)


def kv(n_tokens, seed, dtype=torch.float32, heads=H):
    return draw(heads, n_tokens, D, seed=seed, dtype=dtype), draw(heads, n_tokens, D, seed=seed + 1, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "n_keys"), [(1, 1), (1, 517), (7, 33), (40, 300), (QUERY_BLOCK + 1, 700)])
def test_question_rows_over_cached_keys_and_themselves(n_rows, n_keys, dtype):
    """The question pass: all of the cached rows, then the rows that are being computed, causally."""
    q = draw(H * G, n_rows, D, dtype=dtype)
    base, own, p = kv(n_keys, 1, dtype), kv(n_rows, 3, dtype), torch.arange(n_keys, n_keys + n_rows)
    got = attend(q, [(*base, position_mask(p, torch.arange(n_keys))), (*own, position_mask(p, p))], D**-0.5)
    assert_exact(got, q, [(*base, None), (*own, later(p, p))])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [1, 100, 2 * QUERY_BLOCK + 5])
def test_scattered_rows_see_exactly_the_keys_up_to_their_position(n_rows, dtype):
    """Selective repair: rows anywhere in the prompt. A tile border one key off would show a row its future."""
    q, base = draw(H * G, n_rows, D, dtype=dtype), kv(600, 5, dtype)
    p = torch.randperm(600, generator=torch.Generator().manual_seed(1))[:n_rows].sort().values
    assert_exact(
        attend(q, [(*base, position_mask(p, torch.arange(600)))], D**-0.5), q, [(*base, later(p, torch.arange(600)))]
    )


def test_rows_and_keys_in_any_order_give_the_same_answers():
    """Overlay rows lie behind the base rows although their positions are among them; order must not matter."""
    q, (k, v), p = (
        draw(H * G, 200, D),
        kv(300, 5),
        torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(2)),
    )
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    got = attend(q, [(k[:, order], v[:, order], position_mask(p, order))], D**-0.5)
    assert_exact(got, q, [(k, v, later(p, torch.arange(300)))])


def test_replaced_keys_are_seen_by_nobody():
    """A repaired row replaces a cached one: the old key gets a position behind every query."""
    q, (k, v), own = draw(H * G, 20, D), kv(300, 5), kv(20, 9)
    p, k_pos = torch.arange(100, 120), torch.arange(300)
    k_pos[100:120] = 2**31
    k[:, 100:120] = v[:, 100:120] = 1e4  # seen once, they would be all that anybody sees
    got = attend(q, [(k, v, position_mask(p, k_pos)), (*own, position_mask(p, p))], D**-0.5)
    assert_exact(got, q, [(k, v, later(p, k_pos)), (*own, later(p, p))])


@pytest.mark.parametrize("seed", range(12))
def test_any_positions_and_replaced_keys(seed):
    """Random orders, gaps, blocks that see nothing and keys that nobody sees: the tiles must cover exactly the rest."""
    g = torch.Generator().manual_seed(seed)
    n_rows, n_keys = (int(n) for n in torch.randint(1, 2 * QUERY_BLOCK + 40, (2,), generator=g))
    q_pos = torch.randint(0, 400, (n_rows,), generator=g)
    k_pos = torch.randperm(500, generator=g)[:n_keys]
    if seed % 2:
        q_pos, k_pos = q_pos.sort().values, k_pos.sort().values + 60 * (seed % 3)
    replaced = torch.rand(n_keys, generator=g) < (0.0, 0.05, 0.9, 1.0)[seed % 4]
    q, base, own = draw(H * G, n_rows, D), kv(n_keys, 1), kv(30, 3)
    hidden = later(q_pos, k_pos) | replaced
    assert_exact(attend(q, [(*base, position_mask(q_pos, k_pos, replaced))], D**-0.5), q, [(*base, hidden)])
    own_pos = torch.randint(0, 400, (30,), generator=g)
    both = [(*base, position_mask(q_pos, k_pos, replaced)), (*own, position_mask(q_pos, own_pos))]
    assert_exact(attend(q, both, D**-0.5), q, [(*base, hidden), (*own, later(q_pos, own_pos))])


def test_rows_that_see_nothing_are_zero_when_a_whole_block_of_them_is_left_out():
    """Only the second block of rows has a tile: the result still has all rows."""
    q, base = draw(H * G, QUERY_BLOCK + 9, D), kv(5, 1)
    q_pos = torch.cat([torch.zeros(QUERY_BLOCK), torch.full((9,), 50)]).long()
    got = attend(q, [(*base, position_mask(q_pos, torch.arange(10, 15)))], D**-0.5)
    assert_exact(got, q, [(*base, later(q_pos, torch.arange(10, 15)))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_rows", [1, 2, 65, 300])
def test_full_prefill_is_plain_causal_attention(n_rows, dtype):
    """Exact mode: one causal set takes the short way, with grouped heads as they are."""
    q, own, p = draw(H * G, n_rows, D, dtype=dtype), kv(n_rows, 3, dtype), torch.arange(n_rows)
    assert_exact(attend(q, [(*own, position_mask(p, p))], D**-0.5), q, [(*own, later(p, p))])


@pytest.mark.parametrize("lens", [(64,), (1, 63), (20, 1, 0, 43), (0, 64, 0)])
def test_cutting_a_key_set_changes_nothing(lens):
    """Softmax over a disjoint union: pieces merged by their log-sum-exp, in any order, empty ones left out."""
    q, (k, v) = draw(H * G, 9, D), kv(sum(lens), 1)
    pieces = list(zip(k.split(lens, 1), v.split(lens, 1), [None] * len(lens), strict=True))
    assert_exact(attend(q, pieces, D**-0.5), q, [(k, v, None)])
    assert_exact(attend(q, pieces[::-1], D**-0.5), q, [(k, v, None)])


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (1, 9), (5, 1), (4, 7)])
def test_every_query_head_meets_its_own_kv_head(heads, groups):
    """Packing G query heads as rows of a kv head must not mix heads up."""
    q, base = draw(heads * groups, 6, D), kv(50, 1, heads=heads)
    assert_exact(attend(q, [(*base, None)], D**-0.5), q, [(*base, None)])


def test_strided_views_need_no_copy_to_be_right():
    """The engine hands over slices of a cache [H, slots, D] and queries transposed out of [S, Hq, D]."""
    cache_k, cache_v = kv(500, 1)
    q = draw(11, H * G, D).transpose(0, 1)
    views = cache_k[:, 30:333], cache_v[:, 30:333]
    assert_exact(attend(q, [(*views, None)], D**-0.5), q, [(*views, None)])


@pytest.mark.parametrize("n_sets", [1, 2, 3])
def test_a_row_that_sees_nothing_in_one_set_takes_nothing_from_it(n_sets):
    """aten gives such a row log-sum-exp 0, the weight of a real key: the merge must give it none."""
    q, sets = draw(H * G, 4, D), [kv(10, seed) for seed in (1, 3, 5)[:n_sets]]
    hidden = torch.zeros(4, 10, dtype=torch.bool)
    hidden[2] = True
    masked = [(*sets[0], hidden)] + [(*entry, None) for entry in sets[1:]]
    assert_exact(attend(q, masked, D**-0.5), q, masked)


@pytest.mark.parametrize("n_sets", [1, 2, 3])
def test_a_row_that_sees_nothing_anywhere_is_zero(n_sets):
    """0/0 in the merge would be NaN and poison every later layer."""
    q, hidden = draw(H * G, 4, D), torch.ones(4, 10, dtype=torch.bool)
    got = attend(q, [(*kv(10, seed), hidden) for seed in range(n_sets)], D**-0.5)
    assert bool((got == 0).all())


def test_no_keys_at_all_give_zeros():
    """The kernel below would be killed by an empty set; here it is never called with one."""
    q = draw(H * G, 4, D)
    assert bool((attend(q, [], D**-0.5) == 0).all())
    assert bool((attend(q, [(*kv(0, 1), None)], D**-0.5) == 0).all())
    assert attend(q[:, :0], [(*kv(5, 1), None)], D**-0.5).shape == (H * G, 0, D)


def test_the_traps_of_the_kernel_below_are_still_there():
    """If aten changes, the handling here can go; until then it is needed (empty keys are tried in a child process)."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k = draw(1, 2, 3, 8), draw(1, 2, 5, 8)
    _, lse = flash(q, k, k, 0.0, False, attn_mask=torch.full((1, 1, 3, 5), float("-inf")))
    assert bool((lse == 0).all()), "a fully masked row has log-sum-exp 0"
    program = (
        "import torch; e = torch.randn(1, 2, 0, 8);"
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(torch.randn(1, 2, 3, 8), e, e, 0.0, False)"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert child.returncode < 0, "an empty key set kills the process"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_generic_path_for_other_devices_computes_the_same(dtype):
    """The path that a GPU takes is ordinary torch; here it runs on the CPU by calling it directly."""
    from kernels.reference import attention

    q, (k, v) = draw(H, G * 5, D, dtype=dtype), kv(40, 1, dtype)
    hidden = later(torch.arange(30, 35), torch.arange(40))
    hidden[1] = True
    bias = torch.zeros(5, 40).masked_fill(hidden, float("-inf")).repeat(G, 1)
    out, lse = attention._plain(q, k, v, bias, D**-0.5)
    exact = truth(q.reshape(H * G, 5, D), [(k, v, hidden)])
    assert (out.double().reshape(H * G, 5, D) - exact).abs().max() <= 64 * EPS[
        torch.promote_types(dtype, torch.float32)
    ]
    assert bool(lse.reshape(H, G, 5)[:, :, 1].isneginf().all())


def test_merging_states_is_exact_and_commutes():
    """Weights come from the log-sum-exp; -inf on one side leaves the other side as it is, bit for bit."""
    outs, lses = (
        [draw(4, 5, D, seed=n).double() for n in range(3)],
        [draw(4, 5, seed=9 + n).double() * 30 for n in range(3)],
    )
    weight = torch.stack(lses).softmax(0)
    out, lse = merge_states(outs, lses)
    torch.testing.assert_close(out, (torch.stack(outs) * weight[..., None]).sum(0))
    torch.testing.assert_close(lse, torch.stack(lses).logsumexp(0))
    torch.testing.assert_close(merge_states(outs[::-1], lses[::-1])[0], out)
    nothing = torch.full((4, 5), float("-inf")).double()
    out, lse = merge_states([outs[0], torch.zeros_like(outs[0])], [lses[0], nothing])
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])
    out, lse = merge_states([torch.zeros_like(outs[0])] * 2, [nothing, nothing])
    assert bool((out == 0).all())
    assert bool(lse.isneginf().all())


def test_adding_a_constant_to_all_positions_hides_the_same_keys():
    q_pos, k_pos = torch.tensor([0, 5, 9]), torch.arange(10)
    assert torch.equal(later(q_pos, k_pos), later(q_pos + 32_000, k_pos + 32_000))
    assert later(q_pos, k_pos).sum(1).tolist() == [9, 4, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v, None), r"q must be a float tensor \[Hq, S, D\] \(got torch.float32 \(5, 64\)\)"),
        (lambda q, k, v: (q, k[:2], v[:2], None), r"H dividing 9 \(got \(2, 7, 64\)"),
        (lambda q, k, v: (q, k, v[:, :3], None), r"key set 0 must be k and v \[H, T, 64\]"),
        (lambda q, k, v: (q, k.half(), v.half(), None), r"must have the dtype of q, torch.float32 \(got torch.float16"),
        (
            lambda q, k, v: (q, k, v, torch.zeros(5, 6, dtype=torch.bool)),
            r"mask of key set 0 must be bool .*\(5, 7\) .*\(5, 6\)",
        ),
        (lambda q, k, v: (q, k, v, torch.zeros(5, 7)), r"mask of key set 0 must be bool"),
        (lambda q, k, v: (q, k, v, position_mask(torch.arange(5), torch.arange(9))), r"must be bool .*\(5, 9\)"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    q, k, v, mask = change(draw(9, 5, D), *kv(7, 1))
    with pytest.raises(ValueError, match=message):
        attend(q, [(k, v, mask)], 1.0)
