"""From the flags of one call to its settings; and how settings are shown at start."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from cli.context import Context, Format
from schemas.errors import SettingsError
from schemas.settings import Settings, load_settings


def make_context(
    *,
    flags: Mapping[str, Any],
    config: Path | None,
    assignments: Iterable[str] | None,
    format: Format,
    output: Path | None,
    quiet: bool,
) -> Context:
    """Load the settings (flag > environment > file > default) for one command.

    Args:
        flags: dotted setting -> value, from options that are short forms of a setting.
        assignments: `--set key=value`; a later one wins, and all win over `flags`.
    """
    nested: dict[str, Any] = {}
    for key, value in flags.items():
        _put(nested, key, str(value) if isinstance(value, Path) else value)
    for assignment in assignments or ():
        key, separator, value = assignment.partition("=")
        if not separator or not key:
            raise SettingsError(f"--set {assignment} is not of the form key=value, such as --set serve.port=9000")
        _put(nested, key, _value(key, value))
    return Context(load_settings(nested, config), format, output, quiet)


def _put(nested: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        nested = nested.setdefault(section, {})
        if not isinstance(nested, dict):
            raise SettingsError(f"--set {key}: {section} was set to a single value before")
    nested[name] = value


def _value(key: str, text: str) -> Any:
    if not text.startswith(("{", "[")):
        return text  # pydantic turns it into the number or truth value that the setting wants
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"--set {key}: {text!r} is not YAML: {error}") from error


def settings_lines(settings: Settings) -> str:
    """The merged settings without secrets, one line for each section: what is printed at start."""
    lines = [f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in settings.redacted().items()]
    return "\n".join(["settings", *lines])
