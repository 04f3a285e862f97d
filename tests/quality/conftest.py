"""A tiny model to evaluate, with vectors of words instead of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.model import Model
from engine.variants import company_ids
from quality import Form, Question, QuestionSet, Subject
from quality.row_cache import RowCache
from tests.engine.conftest import REUSABLE, template_of, tiny_model

WORDS = 64


def embed(texts: Sequence[str]) -> list[np.ndarray]:
    """Counts of words by the sum of their bytes: texts with the same words are near."""
    rows = []
    for text in texts:
        row = np.zeros((1, WORDS), np.float32)
        for word in text.split():
            row[0, sum(word.encode()) % WORDS] += 1
        rows.append(row)
    return rows


@pytest.fixture(scope="session")
def model() -> Model:
    return tiny_model(REUSABLE["llama"]())


@pytest.fixture
def make_subject(model: Model, tmp_path: Path) -> Callable[..., Subject]:
    def make(folder: str = "cache", max_bytes: int = 1 << 30, **fields: object) -> Subject:
        cache = RowCache(tmp_path / folder, max_bytes, model.fingerprint)
        company = company_ids(model.tokenizer, "Some people met at the harbour and talked about the weather.")
        return Subject(model, template_of(model), lambda: (embed, "0" * 64), cache, company, 3, **fields)

    return make


@pytest.fixture
def subject(make_subject: Callable[..., Subject]) -> Subject:
    return make_subject()


TEXTS = (
    "The amber heron lives near the old mill.",
    "Bruno painted the bridge of Arden in spring.",
    "The old mill is near the bridge of Arden.",
    "Clara visited the archive after the vote.",
    "The heron was seen near the bridge.",
)
QUESTIONS = QuestionSet(
    "five",
    tuple(Question(f"five/{n}", f"Who is at number {n}?", (f"Bruno {n}",), TEXTS[n:] + TEXTS[:n]) for n in range(3)),
)
FORM = Form(chunks=3)
