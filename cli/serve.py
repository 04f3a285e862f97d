"""`kvquilt serve`: the HTTP service alone."""

from __future__ import annotations

from cli.context import Context
from cli.flags import settings_lines
from cli.start import say_identity
from cli.stop import stop_on_signals
from serve import build_parts, run
from serve.parts import Parts


def serve(context: Context) -> None:
    """Serve until SIGTERM or Ctrl-C; open answers are finished first."""
    context.say(settings_lines(context.settings))

    def parts() -> Parts:
        built = build_parts(context.settings)
        say_identity(context, built.generation)
        return built

    with stop_on_signals():  # once it has drained, uvicorn raises the signal again, which would end us with its number
        run(context.settings, parts, on_listening=lambda url: context.say(f"listening on {url}"))
    context.say("stopped")
