"""A cell's prompts have the shape that its name says, whatever the set, and a sweep can be killed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from quality import Method, QuestionSet, Result, Subject, load_set, summarise
from quality.results import ResultFile
from quality.ruler import ruler
from quality.sweep import Cell, cells_of, filled, markdown, prompt_tokens, rows_of, sweep
from schemas.errors import InputError
from tests.quality.conftest import QUESTIONS

CENTRE = Cell(20, 3)
METHODS = [Method("none"), Method("closure", 0.15), Method("infoflow", 0.15)]


def load(n_chunks: int, chunk_words: int) -> QuestionSet:
    return QUESTIONS


def test_the_grid_is_sizes_by_counts_and_one_thing_at_a_time_at_the_centre() -> None:
    cells = cells_of([10, 20], [2, 3], ["given", "reversed"], [0, 1], CENTRE)
    assert cells == [
        *(Cell(size, count) for size in (10, 20) for count in (2, 3)),
        Cell(20, 3, order="reversed"),
        Cell(20, 3, duplicates=1),
    ]


@pytest.mark.parametrize("cell", [Cell(7, 2), Cell(30, 9), Cell(30, 4, "shuffled"), Cell(30, 3, duplicates=2)])
def test_every_prompt_of_a_cell_has_exactly_its_chunks(subject: Subject, cell: Cell) -> None:
    """Short questions would make a cell of 9 chunks one of 7, and the table's trend that of another set."""
    tokenizer = subject.template.tokenizer
    short = load_set("ruler", None, n_chunks=2, chunk_words=10)
    shaped = filled(short, cell, tokenizer, 3)
    assert shaped.questions[3:] == short.questions[3:]
    for before, question in zip(short.questions[:3], shaped.questions, strict=False):
        passages = cell.form.prompt_passages(question, tokenizer)
        assert [len(passage.ids) for passage in passages] == [cell.chunk_tokens] * (cell.chunks + cell.duplicates)
        assert question.chunks[: len(before.chunks)] == before.chunks
        assert len(set(question.chunks)) == len(question.chunks)


def test_larger_cells_begin_with_the_text_of_smaller_ones(subject: Subject) -> None:
    tokenizer = subject.template.tokenizer
    sets = [filled(load_set("ruler", None, chunk_words=30), Cell(100, n), tokenizer, 2) for n in (2, 6, 12, 20)]
    for smaller, larger in pairwise(sets):
        for a, b in zip(smaller.questions[:2], larger.questions[:2], strict=True):
            assert b.chunks[: len(a.chunks)] == a.chunks


def test_a_sweep_measures_every_cell_and_says_which_does_not_fit(subject: Subject) -> None:
    cells = [CENTRE, Cell(2000, 3), Cell(20, 20), Cell(20, 3, "reversed"), Cell(20, 3, duplicates=1)]
    notes: list[str] = []
    results = list(sweep(subject, load, cells, METHODS, limit=1, note=notes.append))
    assert [cell for cell, _ in results] == [
        cell for cell in cells if cell.name("").startswith(" 20x3") for _ in range(5)
    ]
    assert notes[1].startswith("five 2000x3 given: left out; its prompts have up to 60")
    assert notes[2] == "five 20x20 given: left out; the whole set has too little text for such a prompt"
    assert len(notes) == 5
    for cell, result in results:
        assert result.set == cell.name("five")
        if result.policy != "no_context":
            assert result.chunk_tokens == 20 * (3 + cell.duplicates)
            assert result.prompt_tokens == prompt_tokens(cell, subject.template, QUESTIONS.questions[0])
    kl = {(cell, result.policy): result.kl for cell, result in results}
    assert len({value for (_, policy), value in kl.items() if policy == "none"}) == 3


def test_a_sweep_goes_on_where_it_was_killed_and_its_table_has_every_cell(subject: Subject, tmp_path: Path) -> None:
    cells = [CENTRE, Cell(20, 2)]
    file = ResultFile(tmp_path / "sweep.jsonl")
    made = [result for _, result in sweep(subject, load, cells, METHODS, limit=1)]
    for result in made[:7]:
        file.add(result)
    kept = ResultFile(tmp_path / "sweep.jsonl")
    found: list[Result] = []

    def known(key: str) -> Result | None:
        result = kept.known(key)
        found.extend([result] if result else [])
        return result

    again = [result for _, result in sweep(subject, load, cells, METHODS, limit=1, known=known)]
    assert len(found) == 7
    assert [(r.key, r.kl) for r in again] == [(r.key, r.kl) for r in made]
    rows = rows_of(cells, "five", summarise(made, {}).rows)
    assert json.loads(json.dumps(rows[0]))["chunk_tokens"] == 20
    table = markdown(rows)
    assert "| prompt | no context | shared_prefix none | shared_prefix closure 15% | shared_prefix info" in table
    lines = [line for line in table.splitlines() if line.startswith("| 20 |")]
    assert [line.split(" | ")[1] for line in lines] == ["3", "2"]
    assert all(line.count("**") == 2 for line in lines)


def test_ruler_has_so_many_names_and_says_so() -> None:
    """It looked for one more for ever."""
    assert len(ruler(3, n_chunks=48)) == 3
    with pytest.raises(InputError, match="at most 48 chunks"):
        ruler(3, n_chunks=49)
