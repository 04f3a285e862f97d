"""How a budget becomes positions: single tokens, heads, blocks and runs of blocks."""

from __future__ import annotations

import pytest
import torch

from engine.plan import Segment, Source
from engine.policies.closure import ClosurePolicy, _fitted_reads, _fitted_worth
from engine.policies.layers import layers_at
from engine.policies.spend import BlockRule, head_tokens, spend_on_blocks, top_tokens

CHUNKS = (Segment(10, 30, Source.CACHED, 0), Segment(31, 40, Source.CACHED, 1), Segment(41, 73, Source.CACHED, 2))
PLAIN = BlockRule(size=8, heads=False)


def spikes(*at: tuple[int, float]) -> torch.Tensor:
    scores = torch.full((73,), 1e-3)
    for position, value in at:
        scores[position] = value
    return scores


def spans(*pairs: tuple[int, int]) -> list[int]:
    return [position for start, end in pairs for position in range(start, end)]


def test_the_highest_scores_win_among_what_is_eligible() -> None:
    eligible = torch.tensor([True, False, True, True])
    assert top_tokens(torch.tensor([0.1, 9.0, 0.3, 0.2]), eligible, 2).tolist() == [2, 3]


def test_heads_are_equal_and_what_a_short_chunk_cannot_take_goes_to_the_others() -> None:
    assert head_tokens(CHUNKS, 6).tolist() == spans((10, 12), (31, 33), (41, 43))
    assert head_tokens(CHUNKS, 33).tolist() == spans((10, 22), (31, 40), (41, 53))
    assert head_tokens(CHUNKS, 61).tolist() == spans((10, 30), (31, 40), (41, 73))
    assert head_tokens((), 0).tolist() == []


def test_blocks_are_aligned_to_their_chunk_and_never_cross_its_end() -> None:
    assert spend_on_blocks(spikes((29, 1.0), (39, 1.0)), CHUNKS, 5, PLAIN).tolist() == spans((26, 30), (39, 40))


def test_exactly_the_budget_is_spent_and_the_last_block_is_cut_at_its_end() -> None:
    assert spend_on_blocks(spikes((20, 1.0), (50, 2.0)), CHUNKS, 11, PLAIN).tolist() == spans((18, 21), (49, 57))
    for n in range(62):
        assert len(spend_on_blocks(torch.rand(73), CHUNKS, n, BlockRule(size=16, floor=4, run_bonus=1.0))) == n


def test_every_chunk_gets_its_head_first_the_ones_that_matter_most_if_not_all_fit() -> None:
    rule = BlockRule(size=8, heads=True)
    scores = spikes((29, 1.0), (72, 2.0))
    assert spend_on_blocks(scores, CHUNKS, 24, rule).tolist() == spans((10, 18), (31, 39), (41, 49))
    assert spend_on_blocks(scores, CHUNKS, 12, rule).tolist() == spans((10, 14), (41, 49))
    assert spend_on_blocks(scores, CHUNKS, 32, rule).tolist() == spans((10, 18), (31, 39), (41, 49), (65, 73))


def test_a_floor_keeps_chunks_from_starving() -> None:
    """With many chunks a global choice gives everything to a few."""
    scores = spikes(*[(position, 5.0) for position in range(41, 73)])
    assert spend_on_blocks(scores, CHUNKS, 24, PLAIN).tolist() == spans((41, 65))
    with_floor = BlockRule(size=8, heads=False, floor=8)
    assert spend_on_blocks(scores, CHUNKS, 24, with_floor).tolist() == spans((10, 18), (31, 39), (41, 49))


def test_a_run_is_extended_before_a_slightly_better_block_alone() -> None:
    scores = spikes((41, 3.0), (49, 1.0), (65, 1.2))
    assert spend_on_blocks(scores, CHUNKS, 16, PLAIN).tolist() == spans((41, 49), (65, 73))
    assert spend_on_blocks(scores, CHUNKS, 16, BlockRule(size=8, heads=False, run_bonus=0.5)).tolist() == spans(
        (41, 57)
    )


def test_a_run_does_not_go_on_in_the_next_chunk() -> None:
    scores = spikes((26, 3.0), (31, 1.0), (65, 1.2))
    rule = BlockRule(size=8, heads=False, run_bonus=0.5)
    assert spend_on_blocks(scores, CHUNKS, 12, rule).tolist() == spans((26, 30), (65, 73))


def test_the_fitted_form_prefers_blocks_whose_inputs_are_fresh() -> None:
    """Its numbers by hand: w(1), w(2) with and without the head, and the worth of block 2 with only the head taken."""
    d = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert _fitted_reads(d, False).tolist() == pytest.approx([0.0685, 0.06 * 2**-1.25 + 0.0085])
    assert _fitted_reads(d, True).tolist() == pytest.approx([0.6225, 0.06 * 2**-1.25 + 0.5625])
    head, near = 0.06 * 2**-1.25 + 0.5625, 0.0685
    worth = _fitted_worth(torch.tensor(2.0), torch.tensor(head), torch.tensor(head + near))
    assert float(worth) == pytest.approx(3**-0.33 * (0.1 + head) / (0.1 + head + near))


def test_the_fitted_form_pulls_towards_taken_blocks() -> None:
    rule = ClosurePolicy(block=8, fitted=True, heads=True)._rule
    chunk = (Segment(0, 64, Source.CACHED, 0),)
    scores = torch.full((64,), 1e-3)
    scores[24], scores[32], scores[56] = 3.0, 0.99, 1.0
    taken = spend_on_blocks(scores, chunk, 24, rule).tolist()
    assert taken == spans((0, 8), (24, 40))


def test_layers_are_named_by_depth() -> None:
    assert layers_at(40, (22 / 40, 23 / 40, 24 / 40, 25 / 40)) == (22, 23, 24, 25)
    assert layers_at(30, (0.4, 0.467, 0.534, 0.6)) == (12, 14, 16, 18)
    assert layers_at(3, (0.4, 0.467, 0.534, 0.6)) == (1,)
    assert layers_at(1, (0.99,)) == (0,)
