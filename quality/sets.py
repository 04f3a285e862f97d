"""Question sets by name or file: JSON Lines in four forms, and our own generator that needs no data.

    musique, hotpotqa   {"question", "answers", "chunks"}                        as they are
    rgb                 {"question" | "query", "answers" | "answer", "positive", "negative"}   mixed at a noise rate
    turborag            {"id", "text", "question"}                               its text, then others of the corpus
    ruler               nothing: made here (`ruler-needle`, `ruler-multikey`, `ruler-hops` for one task)

A file's form is told by the fields of its first row.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quality.questions import Question, QuestionSet
from quality.ruler import TASKS, ruler
from schemas.errors import InputError

NAMED = {"musique": "musique*.jsonl", "hotpotqa": "hotpotqa*.jsonl", "rgb": "rgb*.jsonl", "turborag": "turborag*.jsonl"}
RULER_QUESTIONS = 60
_PIECE_CHARS = 2400  # TurboRAG's documents are cut into passages of about 500 tokens, at spaces


def load_set(
    name: str,
    data_dir: Path | None,
    *,
    noise: float = 0.4,
    n_chunks: int = 6,
    chunk_words: int = 130,
) -> QuestionSet:
    """The set of that name, or in that file.

    Args:
        name: `musique`, `hotpotqa`, `rgb`, `turborag`, `ruler…`, or the path of a JSON Lines file.
        data_dir: where named sets are; subfolders too.
        noise: share of negative passages, for sets that have both.
        n_chunks: passages of a question, for sets that are put together here.
        chunk_words: words of a passage that is generated.

    Raises:
        InputError: there is no such set, no such file, or a row is not of its form; the line is named.
    """
    if not 0.0 <= noise <= 1.0:
        raise InputError(f"the noise rate is {noise}; expected the share of negative passages, 0 to 1")
    if name == "ruler" or name.removeprefix("ruler-") in TASKS:
        tasks = name.removeprefix("ruler").removeprefix("-") or "all"
        made = ruler(RULER_QUESTIONS, n_chunks=n_chunks, chunk_words=chunk_words, tasks=tasks)
        return QuestionSet(name, tuple(made))
    file = _file_of(name, data_dir)
    rows = list(_rows(file))
    if not rows:
        raise InputError(f"{file} holds no questions")
    parse = _form_of(rows[0][1], f"{file}, line {rows[0][0]}")
    set_name = name if name in NAMED else file.stem
    try:
        return QuestionSet(set_name, tuple(parse(set_name, rows, noise, n_chunks)))
    except _BadRowError as error:
        raise InputError(f"{file}, line {error}") from error


class _BadRowError(Exception):
    """Says which line, and what is wrong there."""


Rows = list[tuple[int, dict[str, Any]]]


def _file_of(name: str, data_dir: Path | None) -> Path:
    path = Path(name).expanduser()
    if path.suffix == ".jsonl":
        if not path.is_file():
            raise InputError(f"{name}: no such file; expected JSON Lines with questions")
        return path
    if name not in NAMED:
        raise InputError(f"there is no question set {name!r}; known are {', '.join(NAMED)}, ruler, and .jsonl files")
    if data_dir is None:
        raise InputError(
            f"the set {name} is not part of kvquilt; say where its file is with --data FOLDER (or the setting "
            "quality.data_dir), or take the set `ruler`, which needs no data"
        )
    found = sorted(data_dir.expanduser().rglob(NAMED[name])) if data_dir.expanduser().is_dir() else []
    if not found:
        raise InputError(f"{data_dir}: no file {NAMED[name]} in this folder; it should hold the set {name}")
    return found[0]


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{file}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"{file}, line {number}: expected an object with a question (got {type(row).__name__})")
        yield number, row


def _form_of(row: dict[str, Any], where: str) -> Callable[[str, Rows, float, int], Iterator[Question]]:
    if "chunks" in row:
        return _with_chunks
    if "positive" in row and "negative" in row:
        return _with_noise
    if "text" in row:
        return _with_documents
    raise InputError(
        f"{where}: a question set needs `chunks`, `positive` and `negative`, or `text` (got {', '.join(sorted(row))})"
    )


def _with_chunks(name: str, rows: Rows, _noise: float, _n_chunks: int) -> Iterator[Question]:
    for number, row in rows:
        yield Question(
            f"{name}/{number}",
            _text(number, row, "question"),
            _texts(number, row, "answers"),
            _texts(number, row, "chunks", at_least=1),
        )


def _with_noise(name: str, rows: Rows, noise: float, n_chunks: int) -> Iterator[Question]:
    """So many positive and negative passages as the noise rate says, mixed."""
    for number, row in rows:
        positive = _texts(number, row, "positive", at_least=1)
        negative = _texts(number, row, "negative")
        draw = random.Random(f"{name}/{number}/{noise}/{n_chunks}")
        n_negative = min(round(noise * n_chunks), len(negative))
        passages = [*positive[: max(1, n_chunks - n_negative)], *negative[:n_negative]]
        draw.shuffle(passages)
        question = _text(number, row, "question" if "question" in row else "query")
        answers = _texts(number, row, "answers" if "answers" in row else "answer")
        yield Question(f"{name}/{number}", question, answers, tuple(passages))


def _with_documents(name: str, rows: Rows, _noise: float, n_chunks: int) -> Iterator[Question]:
    """The passages of a question's document, then those of other documents up to `n_chunks`; no answers are known."""
    pieces = [_pieces(_text(number, row, "text")) for number, row in rows]
    for at, (number, row) in enumerate(rows):
        passages = list(pieces[at][: max(1, n_chunks // 2)])
        draw = random.Random(f"{name}/{number}/{n_chunks}")
        while len(passages) < n_chunks and len(rows) > 1:
            other = draw.randrange(len(rows))
            if other != at:
                passages.append(draw.choice(pieces[other]))
        draw.shuffle(passages)
        yield Question(f"{name}/{number}", _text(number, row, "question"), (), tuple(passages))


def _pieces(text: str) -> list[str]:
    pieces, rest = [], text.strip()
    while len(rest) > _PIECE_CHARS:
        cut = rest.rfind(" ", 0, _PIECE_CHARS) + 1 or _PIECE_CHARS
        pieces.append(rest[:cut].strip())
        rest = rest[cut:]
    return [*pieces, rest.strip()] if rest.strip() else pieces


def _text(number: int, row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise _BadRowError(f"{number}: `{field}` must be a text (got {_short(value)})")
    return value


def _texts(number: int, row: dict[str, Any], field: str, at_least: int = 0) -> tuple[str, ...]:
    """A list of texts. Nested lists are alternatives of one answer; a single text is a list of one."""
    value = row.get(field)
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list):
        raise _BadRowError(f"{number}: `{field}` must be a list of texts (got {_short(value)})")
    flat = [text for each in given for text in (each if isinstance(each, list) else [each])]
    for text in flat:
        if not isinstance(text, str) or not text.strip():
            raise _BadRowError(f"{number}: `{field}` holds {_short(text)}; expected texts")
    if len(flat) < at_least:
        raise _BadRowError(f"{number}: `{field}` is empty; expected at least {at_least}")
    return tuple(flat)


def _short(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:60]
