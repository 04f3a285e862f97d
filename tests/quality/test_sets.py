"""Question sets: what a row becomes, and one sentence with the line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quality import Form, load_set
from quality.questions import corpus_of
from quality.ruler import TASKS, ruler
from schemas.errors import InputError
from tests.engine.conftest import byte_tokenizer

GOOD = {"question": "Who?", "answers": ["Ada"], "chunks": ["one", "two", "three"]}


def written(folder: Path, *rows: object, name: str = "musique_3.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return file


def test_a_named_set_is_found_below_the_data_folder(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    written(tmp_path / "sets", GOOD, "\n", GOOD)
    found = load_set("musique", tmp_path)
    assert found.name == "musique"
    assert [question.id for question in found.questions] == ["musique/1", "musique/3"]
    assert found.questions[0].chunks == ("one", "two", "three")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{not json\n", "line 2: not JSON"),
        ("[1]\n", "line 2: expected an object with a question (got list)"),
        ({**GOOD, "question": " "}, "line 2: `question` must be a text (got ' ')"),
        ({**GOOD, "chunks": []}, "line 2: `chunks` is empty; expected at least 1"),
        ({**GOOD, "chunks": ["a", 3]}, "line 2: `chunks` holds 3; expected texts"),
        ({"question": "Who?", "chunks": ["a"]}, "line 2: `answers` must be a list of texts (got nothing)"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, row: object, says: str) -> None:
    """A bad row in the middle once ended a long run after an hour, with a KeyError."""
    with pytest.raises(InputError) as caught:
        load_set(str(written(tmp_path, GOOD, row)), None)
    assert says in str(caught.value)


def test_a_file_of_another_form_says_which_fields_are_needed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs `chunks`, `positive` and `negative`, or `text` \(got a, b\)"):
        load_set(str(written(tmp_path, {"a": 1, "b": 2})), None)


@pytest.mark.parametrize(
    ("name", "folder", "says"),
    [
        ("musque", True, "there is no question set 'musque'; known are musique, hotpotqa"),
        ("musique", False, "say where its file is with --data FOLDER"),
        ("hotpotqa", True, r"no file hotpotqa\*\.jsonl in this folder"),
        ("nowhere.jsonl", True, "nowhere.jsonl: no such file"),
    ],
)
def test_a_set_that_is_not_there_says_what_to_do(tmp_path: Path, name: str, folder: bool, says: str) -> None:
    with pytest.raises(InputError, match=says):
        load_set(name, tmp_path if folder else None)


def test_an_empty_file_and_a_wrong_noise_rate_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no questions"):
        load_set(str(written(tmp_path, "\n")), None)
    with pytest.raises(InputError, match=r"the noise rate is 1\.5"):
        load_set("ruler", None, noise=1.5)


def test_noise_is_the_share_of_negative_passages(tmp_path: Path) -> None:
    positive, negative = [f"good {n}" for n in range(9)], [f"bad {n}" for n in range(9)]
    row = {"query": "Where?", "answer": [["Here", "there"]], "positive": positive, "negative": negative}
    file = str(written(tmp_path, row))
    (question,) = load_set(file, None, noise=0.5, n_chunks=6).questions
    assert sum(text.startswith("bad") for text in question.chunks) == 3
    assert question.answers == ("Here", "there")
    assert load_set(file, None, noise=0.5, n_chunks=6).questions == (question,)
    (all_noise,) = load_set(file, None, noise=1.0, n_chunks=6).questions
    assert sum(text.startswith("good") for text in all_noise.chunks) == 1  # a question always has one that answers it


def test_documents_become_passages_of_their_own_and_of_others(tmp_path: Path) -> None:
    rows = [{"id": str(n), "text": f"document {n} " * 500, "question": f"What of {n}?"} for n in range(4)]
    first, *_ = load_set(str(written(tmp_path, *rows)), None, n_chunks=4).questions
    assert len(first.chunks) == 4
    assert sum("document 0" in text for text in first.chunks) == 2
    assert first.answers == ()


@pytest.mark.parametrize("task", TASKS)
def test_eng_08_generated_questions_are_the_same_every_time_and_hold_their_answer(task: str) -> None:
    made = ruler(8, n_chunks=4, chunk_words=60, tasks=task)
    assert made == ruler(8, n_chunks=4, chunk_words=60, tasks=task)
    for question in made:
        assert len(question.chunks) == 4
        name = question.question.removeprefix("What is the access number of the ").removesuffix("?")
        assert sum(question.answers[0] in text for text in question.chunks) == 1
        assert any(name in text for text in question.chunks)
        assert all(50 < len(text.split()) < 110 for text in question.chunks)
    assert len({question.chunks for question in made}) == 8


def test_a_chain_of_hops_needs_several_chunks() -> None:
    for question in ruler(6, n_chunks=5, chunk_words=40, tasks="hops"):
        name = question.question.removeprefix("What is the access number of the ").removesuffix("?")
        (answering,) = [text for text in question.chunks if question.answers[0] in text]
        assert name not in answering


def test_the_form_takes_reverses_shuffles_and_repeats_chunks(tmp_path: Path) -> None:
    (question,) = load_set(str(written(tmp_path, GOOD)), None).questions
    tokenizer = byte_tokenizer()

    def texts(form: Form) -> list[str]:
        return [passage.text for passage in form.prompt_passages(question, tokenizer)]

    assert texts(Form(chunks=2)) == ["one", "two"]
    assert texts(Form(chunks=2, duplicates=1)) == ["one", "two", "one"]
    assert texts(Form(order="reversed")) == ["three", "two", "one"]
    assert texts(Form(order="shuffled")) == texts(Form(order="shuffled"))
    assert texts(Form(chunk_tokens=4)) == ["one\n", "\ntwo", "\n\nth", "ree"]
    assert len(corpus_of([question, question], Form(), tokenizer)) == 3


@pytest.mark.parametrize("fields", [{"chunks": 0}, {"chunk_tokens": -1}, {"order": "random"}, {"duplicates": -1}])
def test_a_form_that_cannot_be_is_refused(fields: dict) -> None:
    with pytest.raises(InputError, match=r"must be at least|there is no order 'random'"):
        Form(**fields)
