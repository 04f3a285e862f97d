"""`kvquilt ingest index|prefill` and `backfill`: the pipelines, each in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from cli.context import Context
from cli.embedded import embedded
from cli.flags import settings_lines
from cli.running import with_broker
from cli.start import say_identity
from cli.stop import stop_on_signals
from engine import resolve_generation
from ingest import BackfillProgress, HealthServer, run_backfill, run_index, run_prefill
from schemas.errors import InputError
from schemas.settings import Settings
from stores import ensure_topics


def index(context: Context) -> None:
    """Run INDEX until SIGTERM or Ctrl-C; what was read is finished first."""
    _stream(context, run_index)


def prefill(context: Context) -> None:
    """Run PREFILL until SIGTERM or Ctrl-C; what was read is finished first."""
    _stream(context, run_prefill)


def _stream(context: Context, run: Callable[[Settings, threading.Event], None]) -> None:
    settings = with_broker(context.settings)
    with stop_on_signals() as stop, ExitStack() as stack:
        _say_start(context, settings)
        if settings.ingest.http_port:
            listening = stack.enter_context(HealthServer(settings.ingest.http_host, settings.ingest.http_port))
            context.say(f"/healthz, /readyz and /metrics at {listening.url}")
        ensure_topics(settings.kafka)
        run(settings, stop)
    context.say("stopped")


def _say_start(context: Context, settings: Settings) -> None:
    context.say(settings_lines(settings))
    context.say("runner FnApiRunner, in this process")
    say_identity(context, resolve_generation(settings).generation)


def backfill(context: Context, files: Sequence[Path]) -> None:
    """Ingest files in one batch run, with bars, and print what became of the rows."""
    with ExitStack() as stack:
        if context.settings.qdrant.url:
            settings = with_broker(context.settings)
        else:  # the local index is one process's: ours, for as long as this takes
            settings = stack.enter_context(embedded(context.settings)).settings
        _say_start(context, settings)
        with context.progress() as progress:
            text, rows = progress.add_task("text", total=None), progress.add_task("KV", total=None)

            def report(now: BackfillProgress) -> None:
                progress.update(text, completed=now.indexed, total=now.total)
                progress.update(rows, completed=now.prefilled, total=now.to_prefill)

            done = run_backfill(settings, files, report)
    context.result(
        asdict(done),
        f"{done.total} rows: {done.committed} committed, {done.repeated} already there, {done.superseded} older than "
        f"what is there, {done.dead} dead letters in {settings.kafka.dead_letter_topic}; "
        f"KV of {done.prefilled} documents",
    )
    if done.dead:
        raise InputError(f"{done.dead} rows were not taken; {settings.kafka.dead_letter_topic} says why")
