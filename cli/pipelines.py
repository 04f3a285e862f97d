"""`kvquilt ingest index|prefill`: the streaming pipelines, each in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from cli.context import Context
from cli.flags import settings_lines
from cli.running import with_broker
from cli.start import say_identity
from cli.stop import stop_on_signals
from engine import resolve_generation
from ingest import HealthServer, run_index, run_prefill
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
        say_start(context, settings, "FnApiRunner, in this process")
        if settings.ingest.http_port:
            listening = stack.enter_context(HealthServer(settings.ingest.http_host, settings.ingest.http_port))
            context.say(f"/healthz, /readyz and /metrics at {listening.url}")
        ensure_topics(settings.kafka)
        run(settings, stop)
    context.say("stopped")


def say_start(context: Context, settings: Settings, runner: str) -> None:
    """Settings, the runner in use, and the generation."""
    context.say(settings_lines(settings))
    context.say(f"runner {runner}")
    say_identity(context, resolve_generation(settings).generation)
