"""After an edit nothing of the old text is left in what an answer is computed from."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from engine import PlannedChunk, composite_plan, plan_prompt
from engine.policies import POLICIES, create_policy
from quality import Subject
from quality.edits import CONDITIONS, DISTANCES, KINDS, Edit, edits, judge, remade


@pytest.fixture
def cases(subject: Subject) -> list[Edit]:
    return edits(subject, per_cell=1, chunk_tokens=90)


def plan_of(subject: Subject, edit: Edit):
    ids = subject.template.question_ids(edit.question)
    return plan_prompt(subject.template, ids, [PlannedChunk(chunk, True) for chunk in edit.after])


def test_there_is_a_case_for_every_kind_and_distance_and_the_edit_is_in_one_chunk_behind_the_first(
    subject: Subject, cases: list[Edit]
) -> None:
    assert [(edit.kind, edit.distance) for edit in cases] == [(k, d) for k in KINDS for d in DISTANCES]
    decode = subject.template.tokenizer.decode
    for edit in cases:
        assert edit.old in decode(edit.before[1])
        assert edit.new in decode(edit.after[1])
        assert not any(edit.old in decode(chunk) for chunk in edit.after)
        same = [a == b for a, b in zip(edit.before, edit.after, strict=True)]
        assert same == [number != 1 for number in range(len(edit.after))]


def test_two_look_alikes_have_other_names_and_numbers(subject: Subject, cases: list[Edit]) -> None:
    """A record that is the only one of its form is found by its form: then nothing is read but one number."""
    for edit in cases:
        text = subject.template.tokenizer.decode([token for chunk in edit.after for token in chunk])
        records = re.findall(r"The access number of the (\w+ \w+) is (\d{5})\.", text)
        assert len({name for name, _ in records}) == len({number for _, number in records}) == len(records) == 3
        assert records[1][1] == edit.new
        if edit.kind == "direct":
            assert records[1][0] in edit.question


def test_only_the_edited_chunk_is_made_again(subject: Subject, cases: list[Edit]) -> None:
    for edit in cases:
        before, after, n = remade(subject, edit)
        assert n == 1
        assert [a is b for a, b in zip(before, after, strict=True)] == [number != 1 for number in range(len(after))]
        assert not torch.equal(before[1].k, after[1].k)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_an_answer_after_an_edit_is_that_of_a_corpus_that_never_had_the_old_text(
    subject: Subject, cases: list[Edit], policy: str
) -> None:
    """Up to rounding, with every policy: what is equal to that cannot know the old number.

    Repairing over stale rows, as the field does after an edit, leaves them in what the repaired rows read.
    """
    edit = cases[1]
    plan, (_, after, _) = plan_of(subject, edit), remade(subject, edit)
    plan = composite_plan(plan) if create_policy(policy).layout == "composite" else plan
    model = subject.model
    never = model.prefill_chunks(subject.template.prefix_ids, edit.after)
    logits = []
    for rows in (after, never):
        base = model.stitch(plan, rows)
        repair = model.select(plan, base, create_policy(policy), 0.15)
        logits.append(model.logits(plan, base, repair=repair))
    assert torch.allclose(logits[0], logits[1], rtol=0, atol=1e-5)


def test_rows_that_were_not_made_again_would_be_seen(subject: Subject, cases: list[Edit]) -> None:
    """The control: stale rows give other logits, by orders of magnitude more than rounding."""
    edit, model = cases[0], subject.model
    plan, (before, after, _) = plan_of(subject, edit), remade(subject, edit)
    stale, fresh = (model.logits(plan, model.stitch(plan, rows)) for rows in (before, after))
    assert float((stale - fresh).abs().max()) > 1e-3 * float(fresh.abs().max())


def test_every_condition_is_judged_and_stale_only_where_lengths_agree(subject: Subject, cases: list[Edit]) -> None:
    assert [each.condition for each in judge(subject, cases[0])] == list(CONDITIONS)
    longer = replace(cases[0], after=((*cases[0].after[0], 20), *cases[0].after[1:]))
    assert [each.condition for each in judge(subject, longer)] == ["full", "none", "closure 15%"]
    (alone,) = judge(subject, cases[0], ["none"])
    full = judge(subject, cases[0])[0]
    assert alone.relevant == full.relevant == (not full.prefers_old)
