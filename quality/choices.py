"""Which chunks stand in front of a fused chunk while it is prefilled: the product's choice, and others to learn from.

    nearest    the nearest of the corpus: what kvquilt does
    outside    the nearest that are none of the question's own contexts
    prompt     the other chunks of the prompt: an oracle, nobody knows them beforehand
    random     chunks of other questions, drawn for each chunk
    fixed      chunks of other questions, the same for all
    shuffled   those of `fixed`, the tokens of each in random order
    other      chunks of another set, the same for all
    self       the chunk itself, again and again

What `nearest` has over `outside` is content that the prompt holds; what `fixed` has over `self` and `shuffled` is
company: text, and text of that kind (`other`). Draws have a seed; `fixed=5` begins with the chunks of `fixed=2`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quality.neighbours import Corpus
from quality.questions import Ids, Passage
from schemas.errors import InputError
from schemas.ids import token_digest


@dataclass(frozen=True)
class Neighbours:
    """How the neighbours of a fused chunk are chosen, and how many there are at most; None: as the settings say."""

    choice: str = "nearest"
    n: int | None = None

    @property
    def label(self) -> str:
        """As on a command line: `random`, `fixed=5`."""
        return self.choice if self.n is None else f"{self.choice}={self.n}"


NEAREST = Neighbours()


@dataclass(frozen=True)
class Around:
    """What is around a chunk of a prompt.

    Attributes:
        corpus: all passages of the set.
        prompt: chunks of the prompt.
        own: all contexts of its question, those that are not in the prompt too.
        other: all passages of another set, for the choice of that name.
    """

    corpus: Corpus
    prompt: tuple[Ids, ...]
    own: frozenset[Ids]
    other: Corpus | None = None


def choose(neighbours: Neighbours, ids: Ids, n: int, around: Around) -> list[Ids]:
    """Ids of the neighbours of chunk `ids`, the one that comes next to it first; at most `n` (or its own number)."""
    return CHOICES[neighbours.choice](ids, n if neighbours.n is None else neighbours.n, around)


def neighbours_named(text: str) -> Neighbours:
    """From `CHOICE` or `CHOICE=NUMBER`.

    Raises:
        InputError: there is no such choice, or the number is none.
    """
    choice, separator, number = text.partition("=")
    if choice not in CHOICES:
        raise InputError(f"neighbours cannot be chosen by {choice!r}; known are {', '.join(CHOICES)}")
    if separator and not (number.isdecimal() and int(number)):
        raise InputError(f"neighbours {text!r}: expected a number of chunks, such as {choice}=5")
    return Neighbours(choice, int(number) if separator else None)


def _nearest(ids: Ids, n: int, around: Around) -> list[Ids]:
    return [passage.ids for passage in around.corpus.nearest(ids, n)]


def _outside(ids: Ids, n: int, around: Around) -> list[Ids]:
    ranked = around.corpus.nearest(ids, len(around.corpus.passages))
    return [passage.ids for passage in ranked if passage.ids not in around.own][:n]


def _prompt(ids: Ids, n: int, around: Around) -> list[Ids]:
    return [chunk for chunk in dict.fromkeys(around.prompt) if chunk != ids][:n]


def _random(ids: Ids, n: int, around: Around) -> list[Ids]:
    return _drawn(around.corpus.passages, token_digest(ids), around.own)[:n]


def _fixed(_: Ids, n: int, around: Around) -> list[Ids]:
    return _drawn(around.corpus.passages, "fixed", around.own)[:n]


def _shuffled(ids: Ids, n: int, around: Around) -> list[Ids]:
    mixed = []
    for chunk in _fixed(ids, n, around):
        tokens = list(chunk)
        random.Random(f"shuffled/{token_digest(chunk)}").shuffle(tokens)
        mixed.append(tuple(tokens))
    return mixed


def _other(_: Ids, n: int, around: Around) -> list[Ids]:
    assert around.other is not None, "another set is needed"
    return _drawn(around.other.passages, "other", frozenset())[:n]


def _self(ids: Ids, n: int, _: Around) -> list[Ids]:
    return [ids] * n


CHOICES: dict[str, Callable[[Ids, int, Around], list[Ids]]] = {
    "nearest": _nearest,
    "outside": _outside,
    "prompt": _prompt,
    "random": _random,
    "fixed": _fixed,
    "shuffled": _shuffled,
    "other": _other,
    "self": _self,
}


def _drawn(passages: Sequence[Passage], seed: str, but: frozenset[Ids]) -> list[Ids]:
    """All passages in an order that the seed decides, without some."""
    order = [passage.ids for passage in passages]
    random.Random(f"neighbours/{seed}").shuffle(order)
    return [ids for ids in order if ids not in but]
