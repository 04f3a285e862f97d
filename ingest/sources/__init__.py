"""What a backfill reads: files of rows, folders of documents, topics. `survey` looks at them, nothing is read yet.

    paths, topic -> survey -> Source: pieces, what was left out and why, which ids it owns, how old it is
    piece.read() -> messages, as the documents topic would have them

Names are loaded on first use: the kinds of files are known without a Kafka client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingest.sources.base import LeftOut, Piece, Source, Why
    from ingest.sources.surveys import survey

_HOME = {"LeftOut": "base", "Piece": "base", "Source": "base", "Why": "base", "survey": "surveys"}

__all__ = ["LeftOut", "Piece", "Source", "Why", "survey"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ingest.sources' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ingest.sources.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
