"""`kvquilt up`: broker, both pipelines and the HTTP service on one machine, over one model and one embedder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from cli.context import Context
from cli.embedded import embedded
from cli.feeding import others_to_feed, settings_beside
from cli.flags import settings_lines
from cli.service import Service
from cli.start import say_identity
from cli.stop import stop_on_signals
from schemas.errors import KvquiltError, StoreError, TopicError, UnsupportedModelError
from schemas.settings import Settings

if TYPE_CHECKING:
    from serve import Parts

WATCH_S = 1.0  # how often it is looked whether the broker lives, and, at first, whether all is ready
READY_TIMEOUT_S = 5.0


def up(context: Context) -> None:
    """Run until SIGTERM or Ctrl-C, then drain: open answers first, the pipelines next, the broker last.

    Raises:
        InputError: the data folder is in use.
        KvquiltError: a part could not start, or ended on its own.
    """
    with stop_on_signals() as stop, embedded(context.settings) as own:
        # torch and Beam, late: a folder in use is said at once. And here: threads must not import the same at a time
        from ingest import run_index
        from serve import BackgroundServer
        from stores import ensure_topics

        settings = own.settings
        context.say(settings_lines(settings))
        ensure_topics(settings.kafka)
        workers = Workers(stop)
        # the pipelines' metrics are in the default registry: /metrics shows both
        server = BackgroundServer(settings, lambda: _parts(context, settings, workers), registry=REGISTRY)
        own.folder.announce(server.start(), settings.kafka.bootstrap)
        context.say(f"listening on {server.url}, broker at {settings.kafka.bootstrap}; Ctrl-C stops")
        workers.start("the index pipeline", lambda: run_index(settings, stop))
        workers.start("the prefill pipeline", lambda: _prefill(context, settings, stop))
        for entry in others_to_feed(settings):
            adapted = settings_beside(context, settings, entry)
            if adapted is not None:
                of = f"of generation {entry.name}"
                workers.start(f"the index pipeline {of}", partial(run_index, adapted, stop, beside=entry.name))
                workers.start(f"the prefill pipeline {of}", partial(_prefill, context, adapted, stop, entry.name))
        ready = False
        while not stop.wait(WATCH_S):
            try:
                own.check()
            except TopicError as error:
                workers.fail(error)
            if not ready and (ready := _ready(server.url)):
                context.say(f"ready: ask at {server.url}, or with `kvquilt ask --url {server.url} QUESTION`")
        context.say("stopping: finishing what is open")
        server.stop()
        workers.join()
    if workers.failure is not None:
        raise workers.failure
    context.say("stopped")


def _ready(url: str) -> bool:
    """Whether the pipelines are ready, and the service."""
    from ingest.health import not_ready

    if not_ready() is not None:
        return False
    try:
        with Service(url, timeout_s=READY_TIMEOUT_S) as service:
            service.check_ready()
    except KvquiltError:
        return False
    return True


def _prefill(context: Context, settings: Settings, stop: threading.Event, beside: str = "") -> None:
    from ingest import run_prefill

    try:
        run_prefill(settings, stop, beside=beside)
    except UnsupportedModelError as error:  # without reuse the service still answers, in exact mode
        context.say(f"no KV is made: {error}")
        stop.wait()


def _parts(context: Context, settings: Settings, workers: Workers) -> Parts:
    from serve import build_parts

    try:
        built = build_parts(settings)
    except StoreError:
        raise  # the service tries again
    except BaseException as error:
        workers.fail(error)
        raise
    say_identity(context, built.generation)
    return built


class Workers:
    """Threads that run until `stop`. The first fault sets it, so that everything else is drained too."""

    def __init__(self, stop: threading.Event) -> None:
        self.failure: BaseException | None = None
        self._stop = stop
        self._threads: list[threading.Thread] = []

    def start(self, name: str, run: Callable[[], None]) -> None:
        """Run in a thread. One that returns before it was asked to has failed."""

        def work() -> None:
            try:
                run()
            except BaseException as error:  # whatever it is, the main thread must hear of it
                self.fail(error)
            else:
                if not self._stop.is_set():
                    self.fail(KvquiltError(f"{name} ended before it was asked to"))

        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def fail(self, error: BaseException) -> None:
        """Keep the first fault, and stop."""
        if self.failure is None:
            self.failure = error
        self._stop.set()

    def join(self) -> None:
        """Wait for all of them."""
        for thread in self._threads:
            thread.join()
