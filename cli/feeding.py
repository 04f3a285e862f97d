"""Which generations a process feeds beside its own, and whose consumer groups say how far the live one is."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from cli.context import Context
from schemas.errors import SettingsError, UnsupportedModelError
from schemas.generations import GenerationState, KnownGeneration
from schemas.settings import Settings
from stores.generations import GenerationStore


def with_live_groups(settings: Settings) -> Settings:
    """The settings with the consumer groups of the live generation; unchanged where none is known here.

    Raises:
        StoreError: the object store does not answer.
    """
    from stores import open_blobs

    place = urlsplit(settings.blobs_url)
    if place.scheme == "file" and not Path(unquote(place.path)).is_dir():
        return settings  # a producer on a machine of its own: opening it would make the folder
    live = GenerationStore(open_blobs(settings.blobs_url, settings.blobs.options)).read().live
    return settings if live is None else live.bind(settings)


def others_to_feed(settings: Settings) -> list[KnownGeneration]:
    """The generations beside that of the settings that are live or may become live soon: within their grace."""
    from engine import resolve_generation
    from ingest.switching import open_generations

    store = open_generations(settings)
    own, now_ms = resolve_generation(settings).generation.name, store.clock.now_ms()
    grace_ms = settings.generations.grace_s * 1000
    return [
        entry
        for entry in store.read().known
        if entry.name != own
        and entry.state is not GenerationState.RECLAIMING
        and (entry.state is GenerationState.LIVE or now_ms - entry.since_ms < grace_ms)
    ]


def settings_beside(context: Context, settings: Settings, entry: KnownGeneration) -> Settings | None:
    """The settings that feed a generation beside the process's own; None, and said, where it cannot be made here."""
    from engine import resolve_generation

    try:
        adapted = entry.adapt(settings)
        made = resolve_generation(adapted).generation.name
    except (SettingsError, UnsupportedModelError) as error:
        context.say(f"generation {entry.name} ({entry.state}) is not fed here: {error}")
        return None
    if made != entry.name:
        context.say(f"generation {entry.name} ({entry.state}) is not fed here: its settings make {made} here")
        return None
    context.say(f"feeding generation {entry.name} ({entry.state}), too")
    return adapted
