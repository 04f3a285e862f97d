"""Answers to one question: full attention's, and a method's own with its divergence from that."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from engine import Plan, without_reuse
from engine.rows import Base
from engine.session import Session
from quality import metrics
from quality.subject import Subject
from schemas.ids import digest

KL_TOKENS = 12  # of full attention's greedy answer, stop or no stop
RUN_FORMAT = 1  # raise it when a result means something else


@dataclass(frozen=True)
class Answer:
    """A greedy answer's ids, its KL along the reference's first tokens, and the seconds of the first pass."""

    ids: list[int]
    kl: list[float]
    first_step_s: float


@dataclass(frozen=True)
class _Reference:
    """Full attention on one question: its answer's ids, log-probabilities `[KL_TOKENS, vocab]`, and its time."""

    ids: list[int]
    log_p: torch.Tensor
    first_step_s: float


class Answers:
    """The reference is computed once, or found on the disk where an earlier run left it."""

    def __init__(self, subject: Subject, plan: Plan, n: int) -> None:
        """Answers of `n` tokens at most; the reference is full attention over the ids of `plan`."""
        self._subject, self._plan, self._n = subject, without_reuse(plan), n
        self._reference: _Reference | None = None

    def full(self) -> Answer:
        """Full attention's own."""
        reference = self._full()
        return Answer(reference.ids, [0.0] * KL_TOKENS, reference.first_step_s)

    def of(self, plan: Plan, base: Base | None, repair: torch.Tensor | None) -> Answer:
        """A method's: what it says by itself, and how it diverges along the reference's answer."""
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
        return Answer(ids, kl, seconds)

    def _full(self) -> _Reference:
        if self._reference is None:
            fingerprint = self._subject.model.fingerprint.digest
            name = digest(["reference", RUN_FORMAT, fingerprint, list(self._plan.token_ids), self._n])
            packed = self._subject.cache.tensor(name, self._compute)
            head = packed[0]
            n = int(head[0])
            self._reference = _Reference([int(x) for x in head[2 : 2 + n]], packed[1:], float(head[1]))
        return self._reference

    def _compute(self) -> torch.Tensor:
        """`[1 + KL_TOKENS, vocab]`: number of ids, seconds and ids in the first row, then the log-probabilities."""
        with self._subject.model.session(self._plan, None, room=self._n) as session:
            begin = time.perf_counter()
            logits = [session.prompt()]
            seconds = time.perf_counter() - begin
            ids = self._greedy(session, [], logits, at_least=KL_TOKENS)
        head = torch.zeros(self._subject.model.spec.vocab_size)
        head[: 2 + len(ids)] = torch.tensor([float(len(ids)), seconds, *map(float, ids)])
        return torch.cat([head[None], torch.stack(logits[:KL_TOKENS]).log_softmax(-1)])

    def _greedy(self, session: Session, ids: list[int], logits: list[torch.Tensor], at_least: int = 0) -> list[int]:
        """Go on greedily from `ids` (whose rows are there) to a stop or the answer's length; fills `logits`."""
        stops = self._subject.template.tokenizer.stop_ids
        while True:
            ids = [*ids, int(logits[-1].argmax())]
            stopped = any(token in stops for token in ids)
            if len(ids) >= self._n or (stopped and len(ids) >= at_least):
                return ids
            logits.append(session.extend(ids[-1:], len(ids) - 1)[0])
