"""The same methods over prompts of other shapes: size and number of chunks, their order, chunks that come twice.

A cell is one shape. Passages are joined and cut anew, and a question whose own passages do not fill the prompt gets
passages of other questions behind them, as a retriever with a larger k would give it: so that every prompt of a cell
has exactly its chunks, whatever set it is of. Larger cells begin with the text of smaller ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine import PromptTemplate, Tokenizer
from quality.answers import KL_TOKENS
from quality.methods import Method
from quality.questions import Form, Question, QuestionSet
from quality.report import Row
from quality.results import Result
from quality.run import evaluate
from quality.subject import Subject

Load = Callable[[int, int], QuestionSet]  # number of chunks, words of a chunk: for sets that are made


@dataclass(frozen=True)
class Cell:
    """One shape of a prompt."""

    chunk_tokens: int
    chunks: int
    order: str = "given"
    duplicates: int = 0

    @property
    def form(self) -> Form:
        """How passages become this shape.

        Raises:
            InputError: there is no such shape.
        """
        return Form(self.chunks, self.chunk_tokens, self.order, self.duplicates)

    def name(self, of: str) -> str:
        """What its results are filed under, for a set."""
        twice = f" +{self.duplicates}" if self.duplicates else ""
        return f"{of} {self.chunk_tokens}x{self.chunks} {self.order}{twice}"


def cells_of(
    sizes: Sequence[int], counts: Sequence[int], orders: Sequence[str], duplicates: Sequence[int], centre: Cell
) -> list[Cell]:
    """Every size with every count; then every order, and every number of duplicates, of the centre."""
    made = [Cell(size, count) for size in sizes for count in counts]
    made += [replace(centre, order=order) for order in orders]
    made += [replace(centre, duplicates=number) for number in duplicates]
    return list(dict.fromkeys(made))


def sweep(
    subject: Subject,
    load: Load,
    cells: Sequence[Cell],
    methods: Sequence[Method],
    *,
    limit: int | None = None,
    answer_tokens: int = 32,
    known: Callable[[str], Result | None] = lambda key: None,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Cell, Result]]:
    """Results of every method on every question, cell by cell; arguments as of `evaluate`.

    Args:
        load: the set, for so many chunks of so many words where it is one that is made.
        note: told each cell as it begins, and each that is left out: too long for the model, or for the set.
    """
    for cell in cells:
        questions = load(cell.chunks, round(0.7 * cell.chunk_tokens))
        asked = questions.questions[:limit]
        longest = max(prompt_tokens(cell, subject.template, question) for question in asked)
        room = subject.model.max_tokens - max(answer_tokens, KL_TOKENS)
        name = cell.name(questions.name)
        if longest > room:
            note(f"{name}: left out; its prompts have up to {longest} tokens, the model takes {room} before an answer")
            continue
        shaped = filled(questions, cell, subject.template.tokenizer, limit)
        if any(not _has(question, cell, subject.template.tokenizer) for question in shaped.questions[:limit]):
            note(f"{name}: left out; the whole set has too little text for such a prompt")
            continue
        note(f"{name}: {len(asked)} questions, prompts of up to {longest} tokens")
        for result in evaluate(
            subject, shaped, methods, form=cell.form, limit=limit, answer_tokens=answer_tokens, known=known
        ):
            yield cell, replace(result, set=name)


def prompt_tokens(cell: Cell, template: PromptTemplate, question: Question) -> int:
    """Length of a question's prompt in that shape."""
    chunks = (cell.chunks + min(cell.duplicates, cell.chunks)) * (cell.chunk_tokens + len(template.separator_ids))
    return len(template.prefix_ids) + chunks + len(template.question_ids(question.question))


def filled(questions: QuestionSet, cell: Cell, tokenizer: Tokenizer, limit: int | None = None) -> QuestionSet:
    """The set, whose first `limit` questions have passages for the cell's chunks, under the cell's name."""
    asked = [_filled(question, questions, cell, tokenizer) for question in questions.questions[:limit]]
    return QuestionSet(cell.name(questions.name), (*asked, *questions.questions[len(asked) :]))


def _filled(question: Question, questions: QuestionSet, cell: Cell, tokenizer: Tokenizer) -> Question:
    others = [text for each in questions.questions if each.id != question.id for text in each.chunks]
    own = set(question.chunks)
    others = [text for text in dict.fromkeys(others) if text not in own]
    random.Random(f"sweep/{question.id}").shuffle(others)
    chunks = list(question.chunks)
    missing = cell.chunk_tokens * (cell.chunks + 1) - sum(len(tokenizer.encode(text)) for text in chunks)
    while missing > 0 and others:
        chunks.append(others.pop())
        missing -= len(tokenizer.encode(chunks[-1]))
    return replace(question, chunks=tuple(chunks))


def _has(question: Question, cell: Cell, tokenizer: Tokenizer) -> bool:
    whole = [passage for passage in cell.form.passages(question, tokenizer) if len(passage.ids) == cell.chunk_tokens]
    return len(whole) >= cell.chunks


def rows_of(cells: Sequence[Cell], set_name: str, rows: Sequence[Row]) -> list[Row]:
    """The report's rows of that set, each with its cell's shape in front."""
    shapes = {cell.name(set_name): {"set": set_name, **asdict(cell)} for cell in cells}
    return [{**row, **shapes[row["set"]]} for row in rows if row["set"] in shapes]


def markdown(rows: Sequence[Row]) -> str:
    """A table of KL, for each set: cells down, methods across; the best of a cell with a budget is bold."""
    parts = []
    for set_name in dict.fromkeys(row["set"] for row in rows):
        of_set = [row for row in rows if row["set"] == set_name and row["policy"] != "full"]
        titles = list(dict.fromkeys(_title(row) for row in of_set))
        by_cell: dict[tuple[Any, ...], dict[str, Row]] = {}
        for row in of_set:
            shape = (row["chunk_tokens"], row["chunks"], row["order"], row["duplicates"])
            by_cell.setdefault(shape, {})[_title(row)] = row
        n = max(row["questions"] for row in of_set)
        parts.append(f"### {set_name}: KL, {n} questions\n")
        parts.append(f"| tokens | chunks | order | twice | prompt | {' | '.join(titles)} |")
        parts.append("|--:|--:|---|--:|--:|" + "--:|" * len(titles))
        for shape, methods in by_cell.items():
            prompt = max(row["prompt_tokens"] for row in methods.values())
            best = min((row["kl"] for row in methods.values() if row["budget"]), default=None)
            told = [_told(methods.get(title), best) for title in titles]
            parts.append(f"| {' | '.join(map(str, shape))} | {prompt:.0f} | {' | '.join(told)} |")
        parts.append("")
    return "\n".join(parts)


def _title(row: Row) -> str:
    budget = f"{row['budget']:.0%}" if row["budget"] else ""
    return " ".join(filter(None, (row["variant"], row["policy"].replace("_", " "), row["options"], budget)))


def _told(row: Row | None, best: float | None) -> str:
    if row is None:
        return ""
    text = f"{row['kl']:.4f}"
    return f"**{text}**" if row["budget"] and row["kl"] == best else text
