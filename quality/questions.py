"""A question with its passages, and how a prompt is formed from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from schemas.errors import InputError

if TYPE_CHECKING:
    from engine import Tokenizer

Ids = tuple[int, ...]  # of a chunk
ORDERS = ("given", "reversed", "shuffled")


@dataclass(frozen=True)
class Question:
    """One row of a set. `answers` is empty where none is known; `chunks` are all its passages, best first."""

    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one set, of all of which the passages are the corpus that neighbours are looked for in."""

    name: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Passage:
    """A chunk as it goes into the prompt."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """What is made of a question's passages.

    Attributes:
        chunks: at most so many, the first ones.
        chunk_tokens: passages are joined and cut anew into chunks of so many tokens; 0 leaves them as they are.
        order: `given`, `reversed` or `shuffled` (from the question's id).
        duplicates: so many of the chunks come a second time, at the end.
    """

    chunks: int = 6
    chunk_tokens: int = 0
    order: str = "given"
    duplicates: int = 0

    def __post_init__(self) -> None:
        if self.chunks < 1 or self.chunk_tokens < 0 or self.duplicates < 0:
            raise InputError(f"chunks must be at least 1, chunk tokens and duplicates at least 0 (got {asdict(self)})")
        if self.order not in ORDERS:
            raise InputError(f"there is no order {self.order!r} of chunks; known are {', '.join(ORDERS)}")

    def passages(self, question: Question, tokenizer: Tokenizer) -> list[Passage]:
        """All passages of a question, before the first few are taken."""
        if not self.chunk_tokens:
            return [Passage(text, tuple(tokenizer.encode(text))) for text in question.chunks]
        ids = tokenizer.encode("\n\n".join(question.chunks))
        pieces = [tuple(ids[at : at + self.chunk_tokens]) for at in range(0, len(ids), self.chunk_tokens)]
        return [Passage(tokenizer.decode(piece, skip_special=False), piece) for piece in pieces]

    def prompt_passages(self, question: Question, tokenizer: Tokenizer) -> list[Passage]:
        """Those that go into the prompt, in its order."""
        taken = self.passages(question, tokenizer)[: self.chunks]
        taken += taken[: self.duplicates]
        if self.order == "reversed":
            taken.reverse()
        if self.order == "shuffled":
            random.Random(question.id).shuffle(taken)
        return taken

    def as_dict(self) -> dict[str, Any]:
        """For identities and reports."""
        return asdict(self)


def corpus_of(questions: Sequence[Question], form: Form, tokenizer: Tokenizer) -> list[Passage]:
    """Every different passage of a set, in order."""
    seen: dict[tuple[int, ...], Passage] = {}
    for question in questions:
        for passage in form.passages(question, tokenizer):
            if passage.ids:
                seen.setdefault(passage.ids, passage)
    return list(seen.values())
