"""What the demo asks, changes and deletes: questions.yaml."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Change(_Part):
    """One document gets a new fact; the question is about it."""

    document: str
    old: str
    new: str
    question: str


class Deletion(_Part):
    """One document goes; the question is about it."""

    document: str
    question: str


class Script(_Part):
    """All of it."""

    questions: tuple[str, ...]
    change: Change
    delete: Deletion
    long: str


def load_script(file: Path) -> Script:
    """Read the file; pydantic names what does not fit."""
    return Script.model_validate(yaml.safe_load(file.read_text()))
