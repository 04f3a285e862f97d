"""`kvquilt ingest index|prefill` and `backfill`: the pipelines, each in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cli.context import Context
from cli.flags import settings_lines
from cli.logs import set_up_logging
from cli.running import with_broker
from cli.start import say_identity
from cli.stop import stop_on_signals
from engine import resolve_generation
from ingest import run_index, run_prefill
from schemas.settings import Settings
from stores import ensure_topics


def index(context: Context) -> None:
    """Run INDEX until SIGTERM or Ctrl-C; what was read is finished first."""
    _stream(context, run_index)


def prefill(context: Context) -> None:
    """Run PREFILL until SIGTERM or Ctrl-C; what was read is finished first."""
    _stream(context, run_prefill)


def _stream(context: Context, run: Callable[[Settings, threading.Event], None]) -> None:
    set_up_logging(context.quiet)
    settings = with_broker(context.settings)
    with stop_on_signals() as stop:
        _say_start(context, settings)
        ensure_topics(settings.kafka)
        run(settings, stop)
    context.say("stopped")


def _say_start(context: Context, settings: Settings) -> None:
    context.say(settings_lines(settings))
    context.say("runner FnApiRunner, in this process")
    say_identity(context, resolve_generation(settings).generation)
