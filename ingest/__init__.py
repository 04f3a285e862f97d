"""The Beam pipelines: change events to chunks, vectors and KV, committed and retired.

The door of the package. Names are loaded on first use: importing `ingest` imports neither Beam nor a model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingest.backfill import BackfillProgress, run_backfill
    from ingest.http import HealthServer
    from ingest.prune import Prune, plan_prune
    from ingest.reconcile import Report, run_reconcile
    from ingest.reindex import Reindexed, ReindexProgress, run_reindex
    from ingest.run import run_index, run_prefill
    from ingest.runners import Runner

_HOME = {
    "BackfillProgress": "backfill",
    "HealthServer": "http",
    "Prune": "prune",
    "Report": "reconcile",
    "Runner": "runners",
    "plan_prune": "prune",
    "run_backfill": "backfill",
    "Reindexed": "reindex",
    "ReindexProgress": "reindex",
    "run_index": "run",
    "run_prefill": "run",
    "run_reconcile": "reconcile",
    "run_reindex": "reindex",
}

__all__ = [
    "BackfillProgress",
    "HealthServer",
    "Prune",
    "ReindexProgress",
    "Reindexed",
    "Report",
    "Runner",
    "plan_prune",
    "run_backfill",
    "run_index",
    "run_prefill",
    "run_reconcile",
    "run_reindex",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ingest' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ingest.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
