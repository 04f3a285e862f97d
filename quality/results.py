"""What was measured of one method on one question; and a file of that, one JSON line each.

So a long table can be made in pieces, and killed at any time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from schemas.errors import InputError


@dataclass(frozen=True)
class Seconds:
    """Where the time to the first token went; everything is warm, the prompt's ids are known. 0: does not apply.

    `load` reads rows from disk (in the page cache), `first_step` is the pass that repairs and answers the prompt. A
    selection pass that several methods share is run once and charged to each, as if the method were alone.
    """

    load: float = 0.0
    stitch: float = 0.0
    select: float = 0.0
    first_step: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.load + self.stitch + self.select + self.first_step


@dataclass(frozen=True)
class Result:
    """One question, one method."""

    key: str
    set: str
    question: str
    policy: str
    options: dict[str, Any]
    variant: str
    budget: float
    kl: float  # mean over the answer's first tokens
    kl_first: float
    f1: float | None
    right: bool | None
    answer: str
    prompt_tokens: int
    chunk_tokens: int
    repaired_tokens: int
    fresh_tokens: int
    seconds: Seconds = field(default_factory=Seconds)

    def as_dict(self) -> dict[str, Any]:
        """One line of a results file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """Back from a line.

        Raises:
            TypeError: fields are missing, or unknown.
        """
        return cls(**{**values, "seconds": Seconds(**values["seconds"])})


@dataclass(frozen=True)
class Progress:
    """Told after every result: how many of how many are done, and the last one (None while things are prepared)."""

    done: int
    total: int
    doing: str
    result: Result | None = None


class ResultFile:
    """A file of results that grows; what is in it is not computed again."""

    def __init__(self, path: Path) -> None:
        """Read what is there. A last line that a killed run left torn is cut off.

        Raises:
            InputError: the file holds something else.
        """
        self._path = path
        self._known: dict[str, Result] = {}
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise InputError(f"the results file {path} cannot be used: {error.strerror}") from error
        sound = 0
        for number, line in enumerate(lines, start=1):
            try:
                result = Result.from_dict(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines) and not line.endswith(b"\n"):
                    break
                raise InputError(
                    f"{path}, line {number}: not a result of `kvquilt eval` ({error}); name another file"
                ) from error
            self._known[result.key] = result
            sound += len(line)
        if lines and sound < sum(map(len, lines)):
            with path.open("r+b") as file:
                file.truncate(sound)

    def known(self, key: str) -> Result | None:
        """The result of that key, if an earlier run left it."""
        return self._known.get(key)

    def add(self, result: Result) -> None:
        """Append a result that is not there yet."""
        if result.key in self._known:
            return
        self._known[result.key] = result
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result.as_dict(), ensure_ascii=False) + "\n")
