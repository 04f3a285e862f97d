"""Questions that need no data: facts hidden in filler, after the tasks of RULER, made here from a seed.

    needle      one record among filler; which number does it give?
    multikey    every chunk holds records of the same form; only one is asked for
    hops        a chain of names across chunks, each passing a number on; the question names the last

Same seed, same set, on every machine. The words are ours; nothing is taken from any data set.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

from quality.questions import Question
from schemas.errors import InputError

TASKS = ("needle", "multikey", "hops")
_KEYS = 3  # records of a chunk, in multikey


def _listed(text: str) -> list[str]:
    return text.split("|") if "|" in text else text.split()


_PLACES = _listed("Arden Belmore Corvin Dunmere Eastwick Farrow Glenmoor Harlow Inver Jessop Kestrel Linden Norwood")
_PEOPLE = _listed("Ada Bruno Clara Diego Elif Farid Greta Hugo Irena Jonas Kaya Liam Mirela Noor Otto Petra Rosa Sven")
_THINGS = _listed("harbour library orchard market bridge mill quarry station archive garden tower school canal")
_ACTS = _listed("repaired painted measured visited described extended inspected reopened photographed surveyed")
_TIMES = _listed("in spring|before the storm|after the vote|for two weeks|on a Monday|without notice|at low tide")
_REASONS = _listed(
    "because the council had asked for it|although nobody expected a result|while the roads were closed|"
    "and wrote a short report|with the help of two neighbours|so that visitors could see it again"
)
_COLOURS = _listed("amber azure coral ivory jade scarlet silver violet copper indigo ochre teal")
_ANIMALS = _listed("heron otter falcon badger lynx marten swift viper bison crane gecko ibex")


def ruler(n_questions: int, *, n_chunks: int = 6, chunk_words: int = 130, tasks: str = "all") -> list[Question]:
    """Questions of the tasks in turn.

    Args:
        n_questions: how many.
        n_chunks: chunks of each.
        chunk_words: about so many words in each chunk; a token is about three quarters of one.
        tasks: one of `TASKS`, or `all`.

    Raises:
        InputError: there are not so many names for records.
    """
    most = len(_COLOURS) * len(_ANIMALS) // _KEYS
    if n_chunks > most:
        raise InputError(f"ruler makes prompts of at most {most} chunks (got {n_chunks})")
    kinds = TASKS if tasks == "all" else (tasks,)
    made = []
    for number in range(n_questions):
        kind = kinds[number % len(kinds)]
        draw = random.Random(f"ruler/1/{kind}/{number}/{n_chunks}/{chunk_words}")
        question, answer, records = _MAKERS[kind](draw, n_chunks)
        chunks = tuple(_chunk(draw, record, chunk_words) for record in records)
        made.append(Question(f"ruler-{kind}/{number}", question, (answer,), chunks))
    return made


def _needle(draw: random.Random, n_chunks: int) -> tuple[str, str, list[list[str]]]:
    name, number = _name(draw, set()), _number(draw)
    records: list[list[str]] = [[] for _ in range(n_chunks)]
    records[draw.randrange(n_chunks)].append(_record(name, number))
    return f"What is the access number of the {name}?", number, records


def _multikey(draw: random.Random, n_chunks: int) -> tuple[str, str, list[list[str]]]:
    used: set[str] = set()
    pairs = [[(_name(draw, used), _number(draw)) for _ in range(_KEYS)] for _ in range(n_chunks)]
    name, number = draw.choice(draw.choice(pairs))
    return (
        f"What is the access number of the {name}?",
        number,
        [[_record(*pair) for pair in chunk] for chunk in pairs],
    )


def _hops(draw: random.Random, n_chunks: int) -> tuple[str, str, list[list[str]]]:
    used: set[str] = set()
    names = [_name(draw, used) for _ in range(min(3, n_chunks))]
    number = _number(draw)
    chain = [_record(names[0], number)]
    chain += [f"The access number of the {b} is the same as that of the {a}." for a, b in pairwise(names)]
    records: list[list[str]] = [[] for _ in range(n_chunks)]
    places = draw.sample(range(n_chunks), len(chain))
    for place, sentence in zip(places, chain, strict=True):
        records[place].append(sentence)
    for chunk in records:
        chunk.append(_record(_name(draw, used), _number(draw)))
    return f"What is the access number of the {names[-1]}?", number, records


_MAKERS: dict[str, Callable[[random.Random, int], tuple[str, str, list[list[str]]]]] = {
    "needle": _needle,
    "multikey": _multikey,
    "hops": _hops,
}


def filler(draw: random.Random, n_words: int) -> list[str]:
    """Sentences that answer nothing, `n_words` words or a few more."""
    sentences: list[str] = []
    total = 0
    while total < n_words:
        sentence = (
            f"{draw.choice(_PEOPLE)} {draw.choice(_ACTS)} the {draw.choice(_THINGS)} of {draw.choice(_PLACES)} "
            f"{draw.choice(_TIMES)} {draw.choice(_REASONS)}."
        )
        sentences.append(sentence)
        total += len(sentence.split())
    return sentences


def _chunk(draw: random.Random, records: list[str], n_words: int) -> str:
    sentences = filler(draw, n_words - sum(len(record.split()) for record in records))
    for record in records:
        sentences.insert(draw.randrange(len(sentences) + 1), record)
    return " ".join(sentences)


def _record(name: str, number: str) -> str:
    return f"The access number of the {name} is {number}."


def _name(draw: random.Random, used: set[str]) -> str:
    while True:
        name = f"{draw.choice(_COLOURS)} {draw.choice(_ANIMALS)}"
        if name not in used:
            used.add(name)
            return name


def _number(draw: random.Random) -> str:
    return str(draw.randrange(10_000, 100_000))
