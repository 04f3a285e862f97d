"""How much is fetched at most."""

from __future__ import annotations

from schemas.errors import EventError
from schemas.settings import FetchSettings


def check_length(n_bytes: int, settings: FetchSettings, uri: str) -> None:
    """Raise `EventError` where content is longer than is allowed."""
    if n_bytes > settings.max_bytes:
        raise EventError(f"the content of {uri:.200} is larger than events.fetch.max_bytes, {settings.max_bytes:,}")
