"""What the demo asks, changes and deletes: questions.yaml."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fact(_Part):
    """A question about one page; a right answer holds one of `expect`, in lower case."""

    question: str
    doc: str
    expect: tuple[str, ...]


class Change(_Part):
    """`old` stands in the page exactly once and becomes `new`; the question is about it."""

    doc: str
    old: str
    new: str
    question: str
    expect_before: tuple[str, ...]
    expect_after: tuple[str, ...]


class Deletion(_Part):
    """The page goes; an answer that holds one of `unexpected` would come from it."""

    doc: str
    question: str
    unexpected: tuple[str, ...]


class Long(_Part):
    """Asked with many passages."""

    question: str


class Script(_Part):
    """All of it; every question but the long one is answered from `k` chunks."""

    k: int
    questions: tuple[Fact, ...]
    change: Change
    delete: Deletion
    long: Long


def holds(answer: str, facts: tuple[str, ...]) -> bool:
    """Whether an answer says one of `facts`."""
    return any(fact in answer.lower() for fact in facts)


def load_script(file: Path) -> Script:
    """Read the file; pydantic names what does not fit."""
    return Script.model_validate(yaml.safe_load(file.read_text()))
