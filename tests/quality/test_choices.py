"""Each choice of neighbours takes what it says, and rows and results of one are never another's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.variants import VARIANTS
from quality import Method, Question, QuestionSet, Result, Subject, evaluate
from quality.choices import CHOICES, NEAREST, Around, Neighbours, choose, neighbours_named
from quality.methods import methods_of
from quality.results import ResultFile
from schemas.errors import InputError
from tests.quality.conftest import FORM, TEXTS

ELSEWHERE = QuestionSet(
    "elsewhere", (Question("elsewhere/0", "Why?", ("Because",), ("Ships sail at noon.", "Rain fell.", "Bread rose.")),)
)
FAR = QuestionSet(  # a third of the corpus belongs to each question
    "far",
    tuple(
        Question(f"far/{n}", f"Who is at {n}?", (), (*(f"{text} {n}" for text in TEXTS[:3]), TEXTS[n]))
        for n in range(3)
    ),
)


@pytest.fixture
def around(subject: Subject) -> Around:
    tokenizer = subject.template.tokenizer
    own = [passage.ids for passage in FORM.passages(FAR.questions[0], tokenizer)]
    corpus, other = (subject.corpus(each, FORM) for each in (FAR, ELSEWHERE))
    return Around(corpus, tuple(own[:3]), frozenset(own), other)


def texts(subject: Subject, around: Around, choice: str, number: int = 0, n: int | None = None) -> list[str]:
    chosen = choose(Neighbours(choice, n), around.prompt[number], 3, around)
    return [subject.template.tokenizer.decode(ids) for ids in chosen]


def test_nearest_takes_the_questions_own_contexts_and_outside_does_not(subject: Subject, around: Around) -> None:
    own = {subject.template.tokenizer.decode(ids) for ids in around.own}
    assert texts(subject, around, "nearest")[0] == TEXTS[0]  # the same words but one
    assert set(texts(subject, around, "nearest")) & own
    outside = texts(subject, around, "outside")
    assert len(outside) == 3
    assert not set(outside) & own
    ranked = [text for text in texts(subject, around, "nearest", n=99) if text not in own]
    assert outside == ranked[:3]


def test_drawn_chunks_are_of_other_questions(subject: Subject, around: Around) -> None:
    own = {subject.template.tokenizer.decode(ids) for ids in around.own}
    for choice in ("random", "fixed"):
        drawn = texts(subject, around, choice, n=99)
        assert len(drawn) == len(set(drawn)) == len(around.corpus.passages) - len(own)
        assert not set(drawn) & own
        assert texts(subject, around, choice) == drawn[:3]  # a larger number only adds


def test_random_is_drawn_for_each_chunk_and_fixed_is_the_same_for_all(subject: Subject, around: Around) -> None:
    assert len({tuple(texts(subject, around, "random", number, 99)) for number in range(3)}) == 3
    assert len({tuple(texts(subject, around, "fixed", number, 99)) for number in range(3)}) == 1


def test_the_other_choices_are_what_they_are_called(subject: Subject, around: Around) -> None:
    prompt = [subject.template.tokenizer.decode(ids) for ids in around.prompt]
    assert texts(subject, around, "prompt", 1) == [prompt[0], prompt[2]]
    assert texts(subject, around, "self", 1, 2) == [prompt[1], prompt[1]]
    assert sorted(texts(subject, around, "other")) == sorted(ELSEWHERE.questions[0].chunks)
    fixed, mixed = texts(subject, around, "fixed"), texts(subject, around, "shuffled")
    assert fixed != mixed
    assert [sorted(text) for text in fixed] == [sorted(text) for text in mixed]


def measured(subject: Subject, *choices: Neighbours, known: Callable[[str], Result | None] = lambda _: None):
    methods = [Method("none", 0.0, VARIANTS["fused"], neighbours=each) for each in choices]
    run = evaluate(subject, FAR, methods, form=FORM, limit=1, other=ELSEWHERE, known=known)
    return [result for result in run if result.policy == "none"]


def test_rows_and_results_of_one_choice_are_never_anothers(subject: Subject) -> None:
    """A wrong key would serve the rows of the choice before, and the ablation would show no difference."""
    choices = [Neighbours(choice) for choice in CHOICES] + [Neighbours("fixed", 1), Neighbours("self", 1)]
    subject.n_neighbours = 5  # with three the nearest are all outside the question's own
    results = measured(subject, *choices)
    assert len({result.key for result in results}) == len({result.variant for result in results}) == len(choices)
    assert len({result.kl for result in results}) == len(choices), [(r.variant, r.kl) for r in results]
    for choice, result in zip(choices, results, strict=True):
        assert measured(subject, choice)[0].kl == result.kl, choice
    assert results[0].variant == "fused"  # tables and results files of before know it by this name


def test_no_neighbours_are_the_shared_prefix(subject: Subject) -> None:
    (none,) = measured(subject, Neighbours("fixed", 0))
    plain = list(evaluate(subject, FAR, [Method("none")], form=FORM, limit=1))[2]
    assert none.kl == pytest.approx(plain.kl, rel=1e-4)


def test_only_choices_by_nearness_need_an_encoder(subject: Subject) -> None:
    def absent():
        raise AssertionError("embedded for nothing")

    subject.embed = absent
    far = [Neighbours(choice) for choice in CHOICES if choice not in ("nearest", "outside")]
    assert len(measured(subject, *far)) == len(far)


def test_an_ablation_goes_on_where_it_was_killed(subject: Subject, tmp_path: Path) -> None:
    choices = [Neighbours("random", 2), Neighbours("other", 2)]
    file = ResultFile(tmp_path / "results.jsonl")
    for result in measured(subject, *choices):
        file.add(result)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["variant"] for line in lines] == ["fused:random=2", "fused:other=2"]
    known = ResultFile(tmp_path / "results.jsonl").known
    assert all(known(result.key) == result for result in measured(subject, *choices, known=known))


def test_the_command_lines_variant_names_the_choice() -> None:
    run, asked = methods_of(["closure"], [0.1], ["fused", "fused:fixed=5", "fused_company:self"])
    assert {method.prefill for method in run} == {"fused", "fused:fixed=5", "fused_company:self"}
    assert [method.neighbours for method in asked] == [NEAREST, Neighbours("fixed", 5), Neighbours("self")]
    assert [method.policy for method in run] == ["none", "closure"] * 3


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        ("fused:farthest", "neighbours cannot be chosen by 'farthest'; known are nearest, outside,"),
        ("fused:fixed=few", "neighbours 'fixed=few': expected a number of chunks, such as fixed=5"),
        ("fused:fixed=", "neighbours 'fixed=': expected a number of chunks"),
        ("company:random", "variant 'company:random': only the fused ones have neighbours"),
        ("fuse:random", "there is no prefill variant 'fuse'"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(variant: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        methods_of((), (), [variant])


def test_another_set_must_be_another(subject: Subject) -> None:
    method = Method("none", 0.0, VARIANTS["fused"], neighbours=neighbours_named("other=2"))
    for other in (None, FAR):
        with pytest.raises(InputError, match="fused:other=2: say which other set"):
            next(iter(evaluate(subject, FAR, [method], form=FORM, other=other)))
