"""The edit test: a number in a document changes; does any answer still come from the old one?

    filler   a chunk of it, with a look-alike: the access number of another animal
    record   The access number of the amber heron is 48213.        <- edited: 48213 -> 70951
    filler   `distance` tokens that answer nothing
    alias    The night watch is another name of the amber heron.
    filler   more of it, so that there are several chunks, with another look-alike

Questions: `direct` asks for the record's name, `derived` for its alias. Rows that were not made again after the edit
keep the old number although the prompt's ids hold the new one: `stale` shows that the test can see it. kvquilt makes
the edited chunk again, and only that one; it is not the first, so that no policy finds its rows exact already.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine import KvRows, PlannedChunk, plan_prompt
from engine.policies import create_policy
from quality.ruler import filler
from quality.subject import Subject
from schemas.ids import token_digest

DISTANCES = (0, 250, 1500)
KINDS = ("direct", "derived")
CONDITIONS = ("full", "stale", "none", "closure 15%")
_NAMES = ("amber heron", "azure otter", "coral falcon", "ivory badger", "jade lynx", "scarlet marten", "copper bison")
_ALIASES = ("night watch", "stone gate", "north star", "old ferry", "glass tower", "salt road", "river house")


@dataclass(frozen=True)
class Edit:
    """One edited document: its chunks before and after, and a question about it."""

    kind: str
    distance: int
    question: str
    old: str
    new: str
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Judged:
    """One condition on one edit: which number the model finds more likely, and which one it says.

    `prefers_old`: the old number's tokens are likelier than the new one's behind `The access number is `.
    `says_old`: the old number is in the greedy answer.
    `relevant`: full attention prefers the new one: the model finds the record, so that the edit matters.
    """

    kind: str
    distance: int
    condition: str
    prefers_old: bool
    says_old: bool
    relevant: bool
    remade: int  # chunks that were made again after the edit


def edits(subject: Subject, per_cell: int = 4, chunk_tokens: int = 200) -> list[Edit]:
    """`per_cell` documents for each kind of question and distance, the same every time."""
    tokenizer = subject.template.tokenizer
    made = []
    for kind in KINDS:
        for distance in DISTANCES:
            for number in range(per_cell):
                draw = random.Random(f"edits/2/{kind}/{distance}/{number}")
                (name, *others), alias = draw.sample(_NAMES, 3), draw.choice(_ALIASES)
                old, new, *numbers = draw.sample(range(10_000, 100_000), 4)
                alike = [_record(other, value) for other, value in zip(others, numbers, strict=True)]
                front = tokenizer.encode(f"{alike[0]} " + " ".join(filler(draw, chunk_tokens)))[:chunk_tokens]
                between = tokenizer.encode(" " + " ".join(filler(draw, distance)))[:distance]
                tail = tokenizer.encode(
                    f" The {alias} is another name of the {name}. {alike[1]} " + " ".join(filler(draw, chunk_tokens))
                )
                versions = []
                for value in (old, new):
                    ids = [*front, *tokenizer.encode(f" {_record(name, value)}"), *between, *tail]
                    versions.append(
                        tuple(tuple(ids[at : at + chunk_tokens]) for at in range(0, len(ids), chunk_tokens))
                    )
                asked = f"What is the access number of the {alias if kind == 'derived' else name}?"
                made.append(Edit(kind, distance, asked, str(old), str(new), versions[0], versions[1]))
    return made


def _record(name: str, number: int) -> str:
    return f"The access number of the {name} is {number}."


def remade(subject: Subject, edit: Edit) -> tuple[list[KvRows], list[KvRows], int]:
    """Rows before the edit, rows after it, and how many chunks were made again: those whose token ids are new."""
    prefix = subject.template.prefix_ids
    before = subject.model.prefill_chunks(prefix, edit.before)
    kept = {token_digest(ids): rows for ids, rows in zip(edit.before, before, strict=True)}
    missing = [ids for ids in edit.after if token_digest(ids) not in kept]
    kept |= {
        token_digest(ids): rows
        for ids, rows in zip(missing, subject.model.prefill_chunks(prefix, missing), strict=True)
    }
    return before, [kept[token_digest(ids)] for ids in edit.after], len(missing)


def judge(subject: Subject, edit: Edit, conditions: Sequence[str] = CONDITIONS) -> list[Judged]:
    """Every condition on one edit; the prompt's ids are those after the edit in all of them."""
    before, after, n_remade = remade(subject, edit)
    same_lengths = [rows.n_tokens for rows in before] == [len(ids) for ids in edit.after]
    judged = {
        condition: _judge(subject, edit, condition, before if condition == "stale" else after, n_remade)
        for condition in dict.fromkeys(("full", *conditions))
        if condition != "stale" or same_lengths  # numbers may take another number of tokens; then nothing is stale
    }
    relevant = not judged["full"].prefers_old
    return [replace(judged[condition], relevant=relevant) for condition in conditions if condition in judged]


def _judge(subject: Subject, edit: Edit, condition: str, rows: list[KvRows], n_remade: int) -> Judged:
    model, template = subject.model, subject.template
    plan = plan_prompt(template, template.question_ids(edit.question), [PlannedChunk(ids, True) for ids in edit.after])
    base = None if condition == "full" else model.stitch(plan, rows)
    repair = None
    if base is not None and condition == "closure 15%":
        repair = model.select(plan, base, create_policy("closure"), 0.15)
    lead = template.tokenizer.encode("The access number is ")
    likelihoods = []
    with model.session(plan, base, repair=repair) as session:
        first = session.prompt()
        for value in (edit.old, edit.new):
            ids = [*lead, *template.tokenizer.encode(value)]
            log_p = session.extend(ids[:-1])[len(lead) - 1 :].log_softmax(-1)
            likelihoods.append(sum(float(row[token]) for row, token in zip(log_p, ids[len(lead) :], strict=True)))
        answer = [int(first.argmax())]
        while len(answer) < 24 and answer[-1] not in template.tokenizer.stop_ids:
            answer.append(int(session.extend(answer[-1:], len(answer) - 1)[0].argmax()))
    says = edit.old in template.tokenizer.decode(answer)
    return Judged(edit.kind, edit.distance, condition, likelihoods[0] > likelihoods[1], says, False, n_remade)
