"""One definition of each metric, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from quality.metrics import f1, interval, kl, mean_interval, retention, right, words


def test_words_are_lower_case_without_punctuation_and_articles() -> None:
    assert words("The Cat's “hat”, an old-one!") == ["cat", "s", "hat", "old", "one"]


def test_f1_is_of_words_and_the_best_over_all_accepted_answers() -> None:
    assert f1("It is the Exeter College in Oxford", ["Oxford", "exeter college"]) == pytest.approx(2 * 2 / (6 + 2))
    assert f1("Exeter College.", ["The Exeter College"]) == 1.0
    assert f1("", ["x"]) == 0.0
    assert f1("nothing of it", ["x"]) == 0.0
    assert f1("x x", ["x"]) == pytest.approx(2 / 3)  # a repeated word counts once
    assert f1("anything", []) is None


def test_an_answer_is_right_where_the_words_stand_together() -> None:
    """Half words and scattered words once counted: `no` was found in `not known`."""
    assert right("It was the Exeter College.", ["Exeter College"])
    assert not right("Exeter has a college", ["Exeter College"])
    assert not right("that is not known", ["no"])
    assert right("No, they are not.", ["no"])
    assert right("x", []) is None


def test_kl_is_that_of_the_formula_and_zero_for_the_same_logits() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    values = kl(p.log(), q.log() + 7.0)
    assert values[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75), abs=1e-6)
    assert values[1] == pytest.approx(0.0, abs=1e-7)


def test_logits_that_are_not_finite_are_not_a_number_in_a_table() -> None:
    with pytest.raises(ValueError, match="hold NaN or infinity"):
        kl(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[float("nan"), 1.0]]))


def test_retention_counts_only_questions_that_need_their_context() -> None:
    """Questions that the model answers from memory, or not at all, say nothing about a method."""
    full = [True, True, True, False, True]
    nothing = [False, False, True, False, False]
    method = [True, False, True, True, True]
    found = retention(full, nothing, method)
    assert (found.asked, found.kept, found.lost, found.gained) == (3, 2, 1, 1)
    assert found.value == pytest.approx(2 / 3)
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low < 2 / 3 < found.high <= 1


def test_without_such_a_question_there_is_no_retention() -> None:
    found = retention([False, True], [False, True], [True, True])
    assert (found.value, found.low, found.high, found.asked, found.gained) == (None, None, None, 0, 1)


def test_intervals_are_the_same_in_every_run_and_shrink_with_more_questions() -> None:
    few, many = mean_interval([0.0, 1.0] * 4), mean_interval([0.0, 1.0] * 100)
    assert few == mean_interval([0.0, 1.0] * 4)
    assert few[0] < many[0] < 0.5 < many[1] < few[1]
    assert mean_interval([]) == (None, None)
    assert interval(3, lambda at: at.mean(-1) * 0 + 2) == (2.0, 2.0)
