"""How good reused KV is: question sets, evaluation tables, and a model's certificate.

Knows the engine, the schemas and the object store; no HTTP, no Beam. Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quality.methods import Method
    from quality.questions import Form, Question, QuestionSet
    from quality.report import Report, summarise
    from quality.results import Progress, Result
    from quality.run import evaluate
    from quality.sets import load_set
    from quality.subject import Subject, load_subject

_HOME = {
    "Form": "quality.questions",
    "Method": "quality.methods",
    "Progress": "quality.results",
    "Question": "quality.questions",
    "QuestionSet": "quality.questions",
    "Report": "quality.report",
    "Result": "quality.results",
    "Subject": "quality.subject",
    "evaluate": "quality.run",
    "load_set": "quality.sets",
    "load_subject": "quality.subject",
    "summarise": "quality.report",
}

__all__ = [
    "Form",
    "Method",
    "Progress",
    "Question",
    "QuestionSet",
    "Report",
    "Result",
    "Subject",
    "evaluate",
    "load_set",
    "load_subject",
    "summarise",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
