"""Questions through a model, method by method: same ids, same prompt, same decoding for all.

For every question: full attention answers greedily (the reference), the question alone answers without context, and
then each method, over the rows of its prefill variant. What differs between methods is which positions are repaired,
and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from engine import Plan, PlannedChunk, composite_plan, plan_prompt
from engine.policies import create_policy
from engine.repair import count_tokens
from quality import metrics
from quality.answers import KL_TOKENS, RUN_FORMAT, Answer, Answers
from quality.choices import NEAREST, Around, choose
from quality.methods import BASELINES, FULL, NO_CONTEXT, Method
from quality.questions import Form, Ids, Passage, Question, QuestionSet
from quality.results import Progress, Result, Seconds
from quality.stitched import Stitched
from quality.subject import Note, Subject
from schemas.errors import InputError
from schemas.ids import digest


def evaluate(
    subject: Subject,
    questions: QuestionSet,
    methods: Sequence[Method],
    *,
    form: Form | None = None,
    limit: int | None = None,
    answer_tokens: int = 32,
    other: QuestionSet | None = None,
    known: Callable[[str], Result | None] = lambda key: None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[Result]:
    """Results of every method on every question: `full`, `no_context`, then the methods, question by question.

    Args:
        limit: only the first so many questions; neighbours are looked for in the whole set all the same.
        answer_tokens: length of an answer, for F1; at least `KL_TOKENS`.
        other: the set that neighbours chosen by `other` are taken from.
        known: results of an earlier run by key; they are not computed again.
        progress: told what is done.

    Raises:
        InputError: a method does not exist or needs another set, or a question does not fit into the model.
    """
    form = form or Form()
    for method in methods:
        method.check()
        if method.neighbours.choice == "other" and (other is None or other.name == questions.name):
            raise InputError(f"{method.prefill}: say which other set these neighbours are taken from")
    asked = questions.questions[:limit]
    rows = [*BASELINES, *methods]
    done, total = 0, len(asked) * len(rows)

    def embedding(n: int, of: int) -> None:
        progress(Progress(done, total, f"embedding {n}/{of} passages"))

    for question in asked:
        run = _Question(subject, questions, question, form, max(answer_tokens, KL_TOKENS), other, embedding)
        for method in rows:
            key = run.key(method)
            result = known(key)
            if result is None:
                progress(Progress(done, total, f"{question.id} {method.prefill} {method.label}"))
                result = run.result(method, key)
            done += 1
            progress(Progress(done, total, question.id, result))
            yield result


class _Question:
    """One question: what its methods share is computed once, when the first of them needs it."""

    def __init__(
        self,
        subject: Subject,
        questions: QuestionSet,
        question: Question,
        form: Form,
        answer_tokens: int,
        other: QuestionSet | None,
        embedding: Note,
    ) -> None:
        self._subject, self._set, self._question, self._form = subject, questions, question, form
        self._n, self._other, self._embedding = answer_tokens, other, embedding
        self._ids = subject.template.question_ids(question.question)
        self._passages: list[Passage] = subject.prompt_passages(question, form)
        self._plan = self._planned(self._passages)
        longest = subject.model.max_tokens - answer_tokens
        if self._plan.n_tokens > longest:
            raise InputError(
                f"question {question.id}: its prompt has {self._plan.n_tokens} tokens, the model takes {longest} "
                "before an answer; take fewer or shorter chunks"
            )
        self._answers = Answers(subject, self._plan, answer_tokens)
        self._stitched: Stitched | None = None

    def key(self, method: Method) -> str:
        """What decides a result, in short. Company and neighbours count where the variant has them."""
        variant, subject = method.variant, self._subject
        facts: list[Any] = [RUN_FORMAT, subject.model.fingerprint.digest, list(self._plan.token_ids), self._n]
        facts += [list(self._question.answers), method.policy]
        if method.policy not in (FULL, NO_CONTEXT):
            facts += [asdict(variant), method.budget, [[name, repr(value)] for name, value in method.options]]
            if "company" in (variant.front, variant.neighbours):
                facts.append(list(subject.company))
            if variant.fused:
                facts += [subject.n_neighbours, self._set.name, len(self._set.questions)]
            if method.neighbours != NEAREST:
                facts.append(method.neighbours.label)
            if method.neighbours.choice == "other" and self._other is not None:
                facts += [self._other.name, len(self._other.questions)]
        return digest(facts)

    def result(self, method: Method, key: str) -> Result:
        """Run one method."""
        if method.policy == FULL:
            answer = self._answers.full()
            return self._result(method, key, answer, self._plan, 0, Seconds(first_step=answer.first_step_s))
        if method.policy == NO_CONTEXT:
            plan = self._planned([])
            answer = self._answers.of(plan, None, None)
            return self._result(method, key, answer, plan, 0, Seconds(first_step=answer.first_step_s))
        policy = create_policy(method.policy, **dict(method.options))
        plan = composite_plan(self._plan) if policy.layout == "composite" else self._plan
        stitched = self._base(method, plan)
        repair, selected = stitched.select(self._subject.model, policy, method.budget)
        answer = self._answers.of(plan, stitched.base, repair)
        seconds = Seconds(stitched.load_s, stitched.stitch_s, selected, answer.first_step_s)
        return self._result(method, key, answer, plan, len(repair), seconds)

    def _planned(self, passages: Sequence[Passage]) -> Plan:
        return plan_prompt(self._subject.template, self._ids, [PlannedChunk(each.ids, True) for each in passages])

    @cached_property
    def _around(self) -> Around:
        own = self._form.passages(self._question, self._subject.template.tokenizer)
        return Around(
            corpus=self._subject.corpus(self._set, self._form, self._embedding),
            prompt=tuple(passage.ids for passage in self._passages),
            own=frozenset(passage.ids for passage in own),
            other=self._subject.corpus(self._other, self._form) if self._other else None,
        )

    def _base(self, method: Method, plan: Plan) -> Stitched:
        """The stitched rows of a method's variant and neighbours; the last one is kept."""
        kept, variant, neighbours = self._stitched, method.variant, method.neighbours
        if kept is None or (kept.variant, kept.neighbours, kept.plan) != (variant, neighbours, plan):
            kept = self._stitched = None  # its memory is needed

            def neighbours_of(ids: Ids) -> list[Ids]:
                return choose(neighbours, ids, self._subject.n_neighbours, self._around)

            self._subject.prepare(self._passages, variant, neighbours_of)
            begin = time.perf_counter()
            rows = self._subject.load(self._passages, variant, neighbours_of)
            loaded = time.perf_counter()
            base = self._subject.model.stitch(plan, rows, room=self._n + KL_TOKENS)
            end = time.perf_counter()
            kept = self._stitched = Stitched(variant, neighbours, plan, base, loaded - begin, end - loaded)
        return kept

    def _result(self, method: Method, key: str, answer: Answer, plan: Plan, repaired: int, seconds: Seconds) -> Result:
        tokenizer = self._subject.template.tokenizer
        stop = next((n for n, token in enumerate(answer.ids) if token in tokenizer.stop_ids), len(answer.ids))
        text = tokenizer.decode(answer.ids[:stop]).rstrip("\ufffd").strip()  # an answer may end inside a character
        accepted = self._question.answers
        full = method.policy == FULL
        counts = count_tokens(plan)
        return Result(
            key=key,
            set=self._set.name,
            question=self._question.id,
            policy=method.policy,
            options=dict(method.options),
            variant=method.prefill,
            budget=method.budget,
            kl=sum(answer.kl) / len(answer.kl),
            kl_first=answer.kl[0],
            f1=metrics.f1(text, accepted),
            right=metrics.right(text, accepted),
            answer=text,
            prompt_tokens=plan.n_tokens,
            chunk_tokens=sum(len(chunk) for chunk in plan.chunks),
            repaired_tokens=repaired,
            fresh_tokens=plan.n_tokens if full else counts.fresh,
            seconds=seconds,
        )
