"""Questions through a model, method by method: same ids, same prompt, same decoding for all.

For every question: full attention answers greedily (the reference), the question alone answers without context, and
then each method, over the rows of its prefill variant. What differs between methods is which positions are repaired,
and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from engine import Model, Plan, PlannedChunk, composite_plan, plan_prompt, without_reuse
from engine.passes import PassMemo
from engine.policies import Policy, create_policy
from engine.repair import count_tokens
from engine.rows import Base
from engine.session import Session
from engine.variants import SHARED_PREFIX, Variant
from quality import metrics
from quality.questions import Form, Passage, Question, QuestionSet
from quality.subject import Subject
from schemas.errors import InputError
from schemas.ids import digest

KL_TOKENS = 12  # of full attention's greedy answer, stop or no stop
RUN_FORMAT = 1  # raise it when a result means something else
FULL, NO_CONTEXT = "full", "no_context"


@dataclass(frozen=True)
class Method:
    """One row of a table.

    Attributes:
        policy: a selection policy, or `full` attention, or `no_context`; those two have no variant and no budget.
        options: of the policy, as (name, value) pairs.
    """

    policy: str
    budget: float = 0.0
    variant: Variant = SHARED_PREFIX
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """How tables call it."""
        if self.policy in (FULL, NO_CONTEXT):
            return self.policy.replace("_", " ")
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"{self.policy}{options}"

    def check(self) -> None:
        """Raise `InputError` where there is no such policy, or it does not take the options or the budget."""
        if not 0.0 <= self.budget <= 1.0:
            raise InputError(f"the budget is {self.budget}; expected the share of chunk tokens to repair, 0 to 1")
        if self.policy not in (FULL, NO_CONTEXT):
            create_policy(self.policy, **dict(self.options))


BASELINES = (Method(FULL), Method(NO_CONTEXT))


@dataclass(frozen=True)
class Seconds:
    """Where the time to the first token went; everything is warm, the prompt's ids are known. 0: does not apply.

    `load` reads rows from disk (in the page cache), `first_step` is the pass that repairs and answers the prompt. A
    selection pass that several methods share is run once and charged to each, as if the method were alone.
    """

    load: float = 0.0
    stitch: float = 0.0
    select: float = 0.0
    first_step: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.load + self.stitch + self.select + self.first_step


@dataclass(frozen=True)
class Result:
    """One question, one method."""

    key: str
    set: str
    question: str
    policy: str
    options: dict[str, Any]
    variant: str
    budget: float
    kl: float  # mean over the answer's first tokens
    kl_first: float
    f1: float | None
    right: bool | None
    answer: str
    prompt_tokens: int
    chunk_tokens: int
    repaired_tokens: int
    fresh_tokens: int
    seconds: Seconds = field(default_factory=Seconds)

    def as_dict(self) -> dict[str, Any]:
        """One line of a results file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """Back from a line.

        Raises:
            TypeError: fields are missing, or unknown.
        """
        return cls(**{**values, "seconds": Seconds(**values["seconds"])})


@dataclass(frozen=True)
class Progress:
    """Told after every result: how many of how many are done, and the last one (None while things are prepared)."""

    done: int
    total: int
    doing: str
    result: Result | None = None


@dataclass(frozen=True)
class _Reference:
    """Full attention on one question: its answer's ids, log-probabilities `[KL_TOKENS, vocab]`, and its time."""

    ids: list[int]
    log_p: torch.Tensor
    first_step_s: float


@dataclass(frozen=True)
class _Stitched:
    """The base of a prompt in one variant, what selection passes over it have found, and what it cost."""

    variant: Variant
    plan: Plan
    base: Base
    load_s: float
    stitch_s: float
    passes: PassMemo = field(default_factory=PassMemo)

    def select(self, model: Model, policy: Policy, budget: float) -> tuple[torch.Tensor, float]:
        """Positions to repair, and the seconds that it takes to choose them for one who shares no pass."""
        saved, begin = self.passes.saved_s, time.perf_counter()
        exact = self.variant.first_chunk_exact
        repair = model.select(self.plan, self.base, policy, budget, first_chunk_exact=exact, passes=self.passes)
        return repair, time.perf_counter() - begin + self.passes.saved_s - saved


def evaluate(
    subject: Subject,
    questions: QuestionSet,
    methods: Sequence[Method],
    *,
    form: Form | None = None,
    limit: int | None = None,
    answer_tokens: int = 32,
    known: Callable[[str], Result | None] = lambda key: None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[Result]:
    """Results of every method on every question: `full`, `no_context`, then the methods, question by question.

    Args:
        limit: only the first so many questions; neighbours are looked for in the whole set all the same.
        answer_tokens: length of an answer, for F1; at least `KL_TOKENS`.
        known: results of an earlier run by key; they are not computed again.
        progress: told what is done.

    Raises:
        InputError: a method does not exist, or a question does not fit into the model.
    """
    form = form or Form()
    for method in methods:
        method.check()
    asked = questions.questions[:limit]
    rows = [*BASELINES, *methods]
    done, total = 0, len(asked) * len(rows)
    fused = any(method.variant.fused for method in methods)
    for question in asked:
        run = _Question(subject, questions, question, form, max(answer_tokens, KL_TOKENS))
        for method in rows:
            key = run.key(method)
            result = known(key)
            if result is None:
                progress(Progress(done, total, f"{question.id} {method.variant.name} {method.label}"))
                if fused and run.corpus is None:
                    run.corpus = subject.corpus(
                        questions,
                        form,
                        lambda n, of: progress(Progress(done, total, f"embedding {n}/{of} passages")),  # noqa: B023 - called at once
                    )
                result = run.result(method, key)
            done += 1
            progress(Progress(done, total, question.id, result))
            yield result


class _Question:
    """One question: what its methods share is computed once, when the first of them needs it."""

    def __init__(
        self, subject: Subject, questions: QuestionSet, question: Question, form: Form, answer_tokens: int
    ) -> None:
        self.corpus: Any = None
        self._subject, self._set, self._question, self._form = subject, questions, question, form
        self._n = answer_tokens
        self._ids = subject.template.question_ids(question.question)
        self._passages: list[Passage] = subject.prompt_passages(question, form)
        self._plan = self._planned(self._passages)
        longest = subject.model.max_tokens - answer_tokens
        if self._plan.n_tokens > longest:
            raise InputError(
                f"question {question.id}: its prompt has {self._plan.n_tokens} tokens, the model takes {longest} "
                "before an answer; take fewer or shorter chunks"
            )
        self._reference: _Reference | None = None
        self._stitched: _Stitched | None = None

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
        return digest(facts)

    def result(self, method: Method, key: str) -> Result:
        """Run one method."""
        if method.policy == FULL:
            reference = self._full()
            zero = [0.0] * KL_TOKENS
            seconds = Seconds(first_step=reference.first_step_s)
            return self._result(method, key, reference.ids, zero, self._plan, 0, seconds)
        if method.policy == NO_CONTEXT:
            plan = self._planned([])
            ids, kl, first_step = self._answer(plan, None, None)
            return self._result(method, key, ids, kl, plan, 0, Seconds(first_step=first_step))
        policy = create_policy(method.policy, **dict(method.options))
        plan = composite_plan(self._plan) if policy.layout == "composite" else self._plan
        stitched = self._base(method.variant, plan)
        repair, selected = stitched.select(self._subject.model, policy, method.budget)
        ids, kl, first_step = self._answer(plan, stitched.base, repair)
        seconds = Seconds(stitched.load_s, stitched.stitch_s, selected, first_step)
        return self._result(method, key, ids, kl, plan, len(repair), seconds)

    def _planned(self, passages: Sequence[Passage]) -> Plan:
        return plan_prompt(self._subject.template, self._ids, [PlannedChunk(each.ids, True) for each in passages])

    def _full(self) -> _Reference:
        """Full attention's answer, from the disk where an earlier run left it."""
        if self._reference is not None:
            return self._reference
        plan = without_reuse(self._plan)
        fingerprint = self._subject.model.fingerprint.digest
        name = digest(["reference", RUN_FORMAT, fingerprint, list(plan.token_ids), self._n])
        packed = self._subject.cache.tensor(name, lambda: self._full_answer(plan))
        head = packed[0]
        n = int(head[0])
        self._reference = _Reference([int(x) for x in head[2 : 2 + n]], packed[1:], float(head[1]))
        return self._reference

    def _full_answer(self, plan: Plan) -> torch.Tensor:
        """`[1 + KL_TOKENS, vocab]`: number of ids, seconds and ids in the first row, then the log-probabilities."""
        with self._subject.model.session(plan, None, room=self._n) as session:
            begin = time.perf_counter()
            logits = [session.prompt()]
            seconds = time.perf_counter() - begin
            ids = self._greedy(session, [], logits, at_least=KL_TOKENS)
        head = torch.zeros(self._subject.model.spec.vocab_size)
        head[: 2 + len(ids)] = torch.tensor([float(len(ids)), seconds, *map(float, ids)])
        return torch.cat([head[None], torch.stack(logits[:KL_TOKENS]).log_softmax(-1)])

    def _answer(
        self, plan: Plan, base: Base | None, repair: torch.Tensor | None
    ) -> tuple[list[int], list[float], float]:
        """A method's own greedy answer, its KL along the reference's, and the seconds of the first pass."""
        reference = self._full()
        with self._subject.model.session(plan, base, repair=repair, room=self._n + KL_TOKENS) as session:
            begin = time.perf_counter()
            first = session.prompt()
            seconds = time.perf_counter() - begin
            forced = torch.cat([first[None], session.extend(reference.ids[: KL_TOKENS - 1])])
            kl = metrics.kl(reference.log_p, forced)
            own = forced.argmax(-1).tolist()
            same = next((n for n in range(KL_TOKENS) if own[n] != reference.ids[n]), KL_TOKENS - 1)
            ids = self._greedy(session, own[:same], [*forced[: same + 1]])  # where they part, it goes its own way
        return ids, kl, seconds

    def _greedy(self, session: Session, ids: list[int], logits: list[torch.Tensor], at_least: int = 0) -> list[int]:
        """Go on greedily from `ids` (whose rows are there) to a stop or the answer's length; fills `logits`."""
        stops = self._subject.template.tokenizer.stop_ids
        while True:
            ids = [*ids, int(logits[-1].argmax())]
            stopped = any(token in stops for token in ids)
            if len(ids) >= self._n or (stopped and len(ids) >= at_least):
                return ids
            logits.append(session.extend(ids[-1:], len(ids) - 1)[0])

    def _base(self, variant: Variant, plan: Plan) -> _Stitched:
        """The stitched rows of a variant; the last one is kept."""
        kept = self._stitched
        if kept is None or (kept.variant, kept.plan) != (variant, plan):
            kept = self._stitched = None  # its memory is needed
            self._subject.prepare(self._passages, variant, self.corpus)
            begin = time.perf_counter()
            rows = self._subject.load(self._passages, variant, self.corpus)
            loaded = time.perf_counter()
            base = self._subject.model.stitch(plan, rows, room=self._n + KL_TOKENS)
            end = time.perf_counter()
            kept = self._stitched = _Stitched(variant, plan, base, loaded - begin, end - loaded)
        return kept

    def _result(
        self, method: Method, key: str, ids: list[int], kl: list[float], plan: Plan, repaired: int, seconds: Seconds
    ) -> Result:
        tokenizer = self._subject.template.tokenizer
        stop = next((n for n, token in enumerate(ids) if token in tokenizer.stop_ids), len(ids))
        text = tokenizer.decode(ids[:stop]).rstrip("\ufffd").strip()  # an answer may end inside a character
        accepted = self._question.answers
        full = method.policy == FULL
        counts = count_tokens(plan)
        return Result(
            key=key,
            set=self._set.name,
            question=self._question.id,
            policy=method.policy,
            options=dict(method.options),
            variant="" if method.policy in (FULL, NO_CONTEXT) else method.variant.name,
            budget=method.budget,
            kl=sum(kl) / len(kl),
            kl_first=kl[0],
            f1=metrics.f1(text, accepted),
            right=metrics.right(text, accepted),
            answer=text,
            prompt_tokens=plan.n_tokens,
            chunk_tokens=sum(len(chunk) for chunk in plan.chunks),
            repaired_tokens=repaired,
            fresh_tokens=plan.n_tokens if full else counts.fresh,
            seconds=seconds,
        )
