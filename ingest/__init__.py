"""The Beam pipelines: change events to chunks, vectors and KV, committed and retired.

The door of the package. Names are loaded on first use: importing `ingest` imports neither Beam nor a model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingest.backfill import BackfillProgress, run_backfill
    from ingest.http import HealthServer
    from ingest.reconcile import Report, run_reconcile
    from ingest.run import run_index, run_prefill

_HOME = {
    "BackfillProgress": "backfill",
    "HealthServer": "http",
    "Report": "reconcile",
    "run_backfill": "backfill",
    "run_index": "run",
    "run_prefill": "run",
    "run_reconcile": "reconcile",
}

__all__ = ["BackfillProgress", "HealthServer", "Report", "run_backfill", "run_index", "run_prefill", "run_reconcile"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ingest' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ingest.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
