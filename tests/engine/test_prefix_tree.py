"""The tree of exact prefixes: finds what was put, forgets whom it must, and stays within its bytes."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.decode import SamplingParams
from engine.model import Model
from engine.plan import PlannedChunk, Source, plan_prompt
from engine.prefix_tree import Owned, PrefixTree, extend_prefix
from tests.engine.conftest import random_ids, template_of

PER_ID = 2 * 2 * 3 * 4  # k and v, two layers, three numbers of fp32


def put(tree, ids, *owned, space="s"):
    """Rows that hold their ids and positions, so that a mix-up shows."""
    rows = torch.tensor([[[ids, range(len(ids)), [0] * len(ids)]]] * 2, dtype=torch.float32)
    rows = rows.view(2, 1, 3, -1).transpose(2, 3).contiguous()  # [L, H, n, D]
    tree.insert(space, tuple(ids), rows, rows + 0.5, [Owned(*one) for one in owned])


def got(tree, ids, space="s"):
    """Ids and positions of the rows that the tree gives."""
    rows = tree.rows(space, tuple(ids))
    if rows is None:
        return None
    assert torch.equal(rows.k + 0.5, rows.v)
    assert (rows.k[1, 0, :, 1] == torch.arange(rows.n_tokens)).all()
    return rows.k[0, 0, :, 0].int().tolist()


def test_the_longest_common_beginning_is_found():
    tree = PrefixTree(10_000)
    put(tree, [1, 2, 3, 4, 5])
    put(tree, [1, 2, 3, 7, 8, 9])
    put(tree, [6, 6])
    assert tree.longest("s", [1, 2, 3, 7, 8, 5, 5]) == 5
    assert got(tree, [1, 2, 3, 7, 8]) == [1, 2, 3, 7, 8]
    assert got(tree, [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]
    assert got(tree, [1, 2]) == [1, 2]
    assert got(tree, [1, 2, 4]) is None
    assert (tree.longest("s", [2, 3]), got(tree, []), tree.longest("s", [])) == (0, None, 0)
    assert tree.nbytes == PER_ID * (5 + 3 + 2), "the common beginning is there once"


def test_spaces_never_see_each_other():
    """A tenant that is answered sooner learns what another has asked."""
    tree = PrefixTree(10_000)
    put(tree, [1, 2, 3], space="a")
    assert tree.longest("b", [1, 2, 3]) == 0
    assert got(tree, [1, 2, 3], space="b") is None


def test_dropping_an_owner_takes_its_tokens_and_all_that_was_computed_behind_them():
    """Rows behind a deleted text were computed with it in sight."""
    tree = PrefixTree(10_000)
    put(tree, [1, 2, 3, 4, 5, 6], (1, 3, "a"), (4, 5, "b"))
    put(tree, [1, 2, 3, 4, 8, 9], (1, 3, "a"), (4, 6, "c"))
    put(tree, [1, 7, 7], (1, 3, "d"))
    assert tree.owners() == {"a", "b", "c", "d"}
    tree.drop("c")
    assert got(tree, [1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6]
    assert tree.longest("s", [1, 2, 3, 4, 8, 9]) == 4
    tree.drop("a")
    assert tree.longest("s", [1, 2, 3, 4, 5, 6]) == 1
    assert got(tree, [1, 7, 7]) == [1, 7, 7]
    assert tree.owners() == {"d"}
    tree.drop("d")
    assert tree.owners() == set()
    assert tree.nbytes == PER_ID
    tree.drop("nobody")


def test_an_owner_twice_on_one_path_is_dropped_once():
    """Bytes that are subtracted twice make room that is not there."""
    tree = PrefixTree(10_000)
    put(tree, [1, 2, 3, 4, 5, 6], (1, 2, "a"), (4, 6, "a"))
    put(tree, [1, 2, 3, 9, 9, 9], (1, 2, "a"), (3, 6, "a"))
    tree.drop("a")
    assert tree.nbytes == PER_ID
    assert tree.owners() == set()


def test_the_budget_holds_and_what_was_not_used_for_longest_goes_first():
    tree = PrefixTree(PER_ID * 8)
    put(tree, [1, 1, 1, 1])
    put(tree, [2, 2, 2, 2])
    assert got(tree, [1, 1, 1, 1])
    put(tree, [3, 3, 3])
    assert tree.nbytes == PER_ID * 7
    assert tree.longest("s", [2, 2, 2, 2]) == 0
    assert got(tree, [1, 1, 1, 1])
    put(tree, list(range(20)))
    assert tree.longest("s", list(range(20))) == 0, "what does not fit is not kept, and costs nothing else its place"
    assert got(tree, [1, 1, 1, 1])


def test_threads_may_put_find_and_drop_at_the_same_time():
    tree = PrefixTree(PER_ID * 50)
    faults = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(150):
                ids = torch.randint(0, 3, (8,), generator=generator).tolist()
                put(tree, ids, (2, 5, tuple(ids[2:5])))
                found = got(tree, ids[:6])
                assert found is None or found == ids[:6]
                tree.drop(tuple(ids[2:5]))
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert 0 <= tree.nbytes <= PER_ID * 50


@pytest.mark.parametrize(
    ("n_tokens", "end", "n_chunks"), [(5, 5, 3), (11, 5, 3), (12, 12, 2), (13, 13, 2), (99, 31, 0)]
)
def test_a_plan_is_extended_to_the_end_of_a_segment(llama: Model, n_tokens, end, n_chunks):
    template = template_of(llama)  # 5 ids of prefix, 1 of separator
    chunks = [PlannedChunk(random_ids(n, seed=n), n == 8) for n in (7, 8, 8)]
    plan = plan_prompt(template, random_ids(4, seed=1), chunks)
    longer = extend_prefix(plan, n_tokens)
    assert longer.token_ids == plan.token_ids
    assert len(longer.prefix_ids) == end
    assert [chunk.chunk for chunk in longer.chunks] == list(range(n_chunks))
    assert [segment.end for segment in longer.segments[:-1]] == [segment.start for segment in longer.segments[1:]]
    assert longer.segments[-1].source is Source.FRESH, "the question is always computed"
    assert longer.reused_tokens + longer.fresh_tokens == longer.n_tokens


def test_an_answer_over_an_exact_prefix_is_the_answer_without_it(llama: Model):
    """Exact by construction: rows of a full prefill, at the place where they were computed."""
    template, tree = template_of(llama), PrefixTree(10_000_000)
    chunks = [PlannedChunk(random_ids(n, seed=n), False) for n in (19, 11, 23)]
    plan = plan_prompt(template, random_ids(6, seed=2), chunks)
    n_front = plan.segments[-1].start
    greedy = SamplingParams(max_tokens=8)
    ids = plan.token_ids[:n_front]
    first = list(llama.generate(plan, None, greedy, keep=lambda k, v: tree.insert("s", ids, k, v, [])))
    assert tree.longest("s", plan.token_ids) == n_front
    other = plan_prompt(template, random_ids(5, seed=3), [*chunks[:2], PlannedChunk(random_ids(9, seed=4), False)])
    for prompt in (plan, other):
        longer = extend_prefix(prompt, tree.longest("s", prompt.token_ids[: prompt.segments[-1].start]))
        assert len(longer.prefix_ids) > len(template.prefix_ids)
        rows = tree.rows("s", longer.prefix_ids)
        expected = list(llama.generate(prompt, None, greedy))
        assert list(llama.generate(longer, None, greedy, prefix=rows)) == expected
    assert first == list(llama.generate(plan, None, greedy))


def test_chunks_behind_an_exact_prefix_are_stitched_behind_it(llama: Model):
    """The exact part is used before anything approximate; with everything behind it repaired the whole is exact."""
    template, tree = template_of(llama), PrefixTree(10_000_000)
    chunks = [PlannedChunk(random_ids(n, seed=n), True) for n in (19, 11, 23)]
    plan = plan_prompt(template, random_ids(6, seed=2), chunks)
    ids = plan.token_ids[: plan.chunks[1].end]
    part = plan_prompt(template, random_ids(3, seed=9), chunks[:2])
    greedy = SamplingParams(max_tokens=2)
    list(llama.generate(part, None, greedy, keep=lambda k, v: tree.insert("s", part.token_ids[:-3], k, v, [])))
    longer = extend_prefix(plan, tree.longest("s", ids))
    assert [len(chunk) for chunk in longer.chunks] == [23]
    (third,) = llama.prefill_chunks(template.prefix_ids, [chunks[2].token_ids])
    base = llama.stitch(longer, [third], prefix=tree.rows("s", longer.prefix_ids))
    everything = torch.arange(longer.chunks[0].start, longer.chunks[0].end)
    exact = llama.logits(plan, None)
    torch.testing.assert_close(llama.logits(longer, base, repair=everything), exact, atol=1e-4, rtol=1e-4)
    approximate = llama.logits(longer, base)
    assert (approximate - exact).abs().max() > 1e-3


def test_rows_of_an_answer_that_was_cancelled_are_not_kept(llama: Model):
    """Its rows may not all be there."""
    plan = plan_prompt(template_of(llama), random_ids(6, seed=2), [PlannedChunk(random_ids(9, seed=1), False)])
    kept = []
    calls = iter([False, True])
    list(
        llama.generate(plan, None, SamplingParams(max_tokens=4), lambda: next(calls), keep=lambda k, v: kept.append(k))
    )
    assert kept == []
