"""A run measures what it says: exact methods have no divergence, and every number is that of the model's own logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine import PlannedChunk, SamplingParams, plan_prompt, without_reuse
from engine.policies import create_policy
from engine.variants import SHARED_PREFIX, VARIANTS
from quality import Form, Method, Progress, QuestionSet, Result, Subject, evaluate
from quality.answers import KL_TOKENS
from quality.choices import NEAREST
from quality.methods import BASELINES
from quality.stitched import Stitched
from schemas.errors import InputError
from tests.quality.conftest import FORM, QUESTIONS, embed

ALL = [Method(policy, 0.2, VARIANTS[name]) for name in VARIANTS if name != "bos" for policy in ("none", "random")]


def run(subject: Subject, *methods: Method, form: Form = FORM, **options: object) -> list[Result]:
    return list(evaluate(subject, QUESTIONS, methods, form=form, **options))


def planned(subject: Subject, number: int = 0):
    question = QUESTIONS.questions[number]
    passages = FORM.prompt_passages(question, subject.template.tokenizer)
    ids = subject.template.question_ids(question.question)
    return plan_prompt(subject.template, ids, [PlannedChunk(passage.ids, True) for passage in passages]), passages


def test_baselines_come_first_and_full_attention_does_not_diverge_from_itself(subject: Subject) -> None:
    results = run(subject, Method("none"))
    assert [(r.question, r.policy) for r in results[:3]] == [
        ("five/0", "full"),
        ("five/0", "no_context"),
        ("five/0", "none"),
    ]
    assert len(results) == 3 * 3
    assert all(r.kl == r.kl_first == 0 for r in results if r.policy == "full")
    assert all(r.kl > 1e-3 for r in results if r.policy != "full")


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "bos"])
def test_with_everything_repaired_every_variant_is_full_attention(subject: Subject, name: str) -> None:
    """Whatever stood in front of a chunk, its repaired rows are those of the prompt: else a table compares prompts."""
    variant = VARIANTS[name]
    everything, none = (run(subject, Method(p, 1.0, variant), limit=1)[2] for p in ("random", "none"))
    assert everything.kl < 1e-8
    assert everything.answer == run(subject, limit=1)[0].answer
    assert none.kl > 1e-3
    exact = len(planned(subject)[1][0].ids) if variant.first_chunk_exact else 0
    assert everything.repaired_tokens == everything.chunk_tokens - exact


def test_kl_is_that_of_the_models_own_logits_along_the_full_answer(subject: Subject) -> None:
    """Computed here in one plain call for each token: no session, no reference file."""
    model = subject.model
    plan, passages = planned(subject)
    found = run(subject, Method("infoflow", 0.3), limit=1)[2]
    base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, [passage.ids for passage in passages]))
    repair = model.select(plan, base, create_policy("infoflow"), 0.3)
    answer: list[int] = []
    divergences = []
    for _ in range(KL_TOKENS):
        longer = plan_prompt(
            subject.template,
            [*subject.template.question_ids(QUESTIONS.questions[0].question), *answer],
            [PlannedChunk(passage.ids, True) for passage in passages],
        )
        p = model.logits(without_reuse(longer), None)[0].log_softmax(-1)
        q = model.logits(longer, base, repair=repair)[0].log_softmax(-1)
        divergences.append(float((p.exp() * (p - q)).sum()))
        answer.append(int(p.argmax()))
    assert found.kl == pytest.approx(sum(divergences) / KL_TOKENS, rel=1e-3)
    assert found.kl_first == pytest.approx(divergences[0], rel=1e-3)
    assert found.repaired_tokens == len(repair)


def test_answers_are_those_that_the_service_would_give(subject: Subject) -> None:
    """The answer is put together from a teacher-forced pass and a decode behind it: the seam must not show."""
    model = subject.model
    for number in range(3):
        plan, passages = planned(subject, number)
        base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, [passage.ids for passage in passages]))
        results = [r for r in run(subject, Method("none"), answer_tokens=30) if r.question == f"five/{number}"]
        for result, stitched in ((results[0], None), (results[2], base)):
            steps = list(model.generate(plan, stitched, SamplingParams(max_tokens=30)))
            assert result.answer == "".join(step.text for step in steps).strip()


def test_the_chunk_behind_the_prefix_is_served_from_pass_1_where_it_is_exact(subject: Subject) -> None:
    """One chunk only: fused rows would diverge, its pass-1 rows are a full prefill's."""
    one = Form(chunks=1)
    fused = run(subject, Method("none", 0.0, VARIANTS["fused"]), form=one, limit=1)[2]
    always = replace(VARIANTS["fused"], pass1_first=False)
    assert fused.kl < 1e-8
    assert run(subject, Method("none", 0.0, always), form=one, limit=1)[2].kl > 1e-4


def test_neighbours_are_looked_for_in_the_whole_set_and_only_for_fused(make_subject: Callable[..., Subject]) -> None:
    embedded: list[str] = []
    subject = make_subject()
    subject.embed = lambda: (lambda texts: (embedded.extend(texts), embed(texts))[1], "0" * 64)
    run(subject, Method("none", 0.0, VARIANTS["company"]), limit=1)
    assert embedded == []
    run(subject, Method("none", 0.0, VARIANTS["fused"]), limit=1)
    assert len(embedded) == len(set(embedded)) == 5


def test_a_second_run_computes_nothing_that_is_known(make_subject: Callable[..., Subject]) -> None:
    """A long table is made in pieces: what is in the results file must not cost a pass of the model."""
    subject = make_subject()
    known = {result.key: result for result in run(subject, *ALL)}
    assert len(known) == 3 * (2 + len(ALL))
    subject.model = _Unused(subject.model)  # type: ignore[assignment]
    again = run(subject, *ALL, known=known.get)
    assert [result.key for result in again] == list(known)


class _Unused:
    """A model whose identity may be asked for, and nothing else."""

    def __init__(self, model) -> None:
        self.fingerprint, self.max_tokens = model.fingerprint, model.max_tokens


def test_references_and_rows_on_disk_give_the_same_results(make_subject: Callable[..., Subject]) -> None:
    first = run(make_subject(), *ALL)
    again = run(make_subject(), *ALL)
    without = run(make_subject("other", 0), *ALL)
    for a, b, c in zip(first, again, without, strict=True):
        assert (a.key, a.kl, a.answer) == (b.key, b.kl, b.answer) == (c.key, c.kl, c.answer)


def test_keys_tell_apart_what_is_different(make_subject: Callable[..., Subject]) -> None:
    """A result that is taken for another's is a wrong number in a table."""
    subject = make_subject()
    results = run(subject, Method("infoflow", 0.1), Method("infoflow", 0.2), Method("closure", 0.1), limit=1)
    results += run(subject, Method("closure", 0.1, options=(("floor", 32),)), limit=1)[2:]
    results += run(subject, Method("closure", 0.1, VARIANTS["fused"]), limit=1)[2:]
    subject.n_neighbours = 2
    results += run(subject, Method("closure", 0.1, VARIANTS["fused"]), limit=1)[2:]
    results += run(subject, Method("closure", 0.1), form=Form(chunks=2), limit=1)[2:]
    assert len({result.key for result in results}) == len(results)


def test_progress_counts_every_result(subject: Subject) -> None:
    seen: list[Progress] = []
    run(subject, Method("none"), progress=seen.append)
    done = [told for told in seen if told.result]
    assert [told.done for told in done] == list(range(1, 10))
    assert {told.total for told in seen} == {9}


def test_time_to_the_first_token_is_the_sum_of_its_parts(subject: Subject) -> None:
    full, nothing, method = run(subject, Method("closure", 0.2), limit=1)
    s = method.seconds
    assert s.ttft == s.load + s.stitch + s.select + s.first_step
    assert min(s.load, s.stitch, s.select, s.first_step) > 0
    assert full.seconds.ttft == full.seconds.first_step > 0
    assert nothing.prompt_tokens < method.prompt_tokens


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (Method("fusion", 0.1), "no selection policy 'fusion'"),
        (Method("closure", 1.5), "the budget is 1.5; expected the share"),
        (Method("closure", -0.1), "the budget is -0.1; expected the share"),
        (Method("closure", 0.1, options=(("blocks", 3),)), "cannot be made with"),
    ],
)
def test_a_method_that_does_not_exist_is_refused_before_anything_runs(
    subject: Subject, method: Method, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        run(subject, *BASELINES[:0], method)


def test_a_prompt_that_is_too_long_says_which_question(subject: Subject) -> None:
    long = replace(QUESTIONS.questions[0], chunks=("word " * 1000,))
    with pytest.raises(InputError, match="question five/0: its prompt has 50"):
        list(evaluate(subject, QuestionSet("five", (long,)), [Method("none")], form=FORM))


def test_broken_rows_end_the_run_instead_of_giving_a_number(subject: Subject) -> None:
    def broken(*args: object, **options: object):
        rows = load(*args, **options)
        rows[1] = replace(rows[1], v=torch.full_like(rows[1].v, float("nan")))
        return rows

    load, subject.load = subject.load, broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="hold NaN or infinity"):
        run(subject, Method("none"), limit=1)


def test_methods_that_share_selection_passes_have_the_results_that_they_have_alone(
    make_subject: Callable[..., Subject],
) -> None:
    """A table is made faster, not different; and a method is charged for a pass that another ran before it."""
    kinds = [(SHARED_PREFIX, p) for p in ("infoflow", "cacheblend", "composite")] + [(VARIANTS["company"], "infoflow")]
    methods = [Method(policy, budget, variant) for variant, policy in kinds for budget in (0.1, 0.3)]
    together = run(make_subject(), *methods, limit=1)[2:]
    for method, shared in zip(methods, together, strict=True):
        alone = run(make_subject(), method, limit=1)[2]
        assert replace(alone, seconds=shared.seconds) == shared
        assert method.policy == "composite" or shared.seconds.select > 0


def test_a_pass_that_another_method_ran_is_charged_to_this_one_too(subject: Subject) -> None:
    """Its time to the first token must not look better because of the order of a table's rows."""
    plan, passages = planned(subject)
    base = subject.model.stitch(plan, subject.load(passages, SHARED_PREFIX))
    stitched, policy = Stitched(SHARED_PREFIX, NEAREST, plan, base, 0.0, 0.0), create_policy("prophet")
    stitched.select(subject.model, policy, 0.1)
    assert stitched.passes.saved_s == 0
    for times in (1, 2):
        _, seconds = stitched.select(subject.model, policy, 0.2)
        assert seconds > stitched.passes.saved_s / times > 0
