"""What a command knows about how it was called: settings, and where and how to write."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from schemas.settings import Settings


class Format(StrEnum):
    """How a command's result is written; progress and notes always go to stderr as text."""

    TERMINAL = "terminal"
    JSON = "json"


@dataclass(frozen=True)
class Context:
    """Settings and the two ways out: results to stdout (or `output`), everything else to stderr."""

    settings: Settings
    format: Format = Format.TERMINAL
    output: Path | None = None
    quiet: bool = False

    def say(self, text: str) -> None:
        """A note for people, on stderr; nothing with `-q`."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def result(self, data: Mapping[str, Any], text: str) -> None:
        """What the command was asked for: `data` as one line of JSON, or `text`."""
        line = json.dumps(data, ensure_ascii=False) if self.format is Format.JSON else text
        if self.output is None:
            print(line, flush=True)
            return
        try:
            self.output.write_text(line + "\n")
        except OSError as error:
            raise InputError(f"--output {self.output} cannot be written: {error.strerror}") from error

    def progress(self, *, rate: bool = False) -> Progress:
        """Bars on stderr; nothing with `-q`. With `rate`, also how many a second, and the time left."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            *(_rate_columns() if rate else ()),
            console=Console(stderr=True),
            disable=self.quiet,
        )


def _rate_columns() -> tuple[ProgressColumn, ...]:
    from rich.progress import ProgressColumn, Task, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        """How many a second, of late; over all once it is done."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.1f}/s", style="progress.data.speed")

    return Rate(), TimeRemainingColumn()
