"""Results on disk, one JSON line each: a long table can be made in pieces, and killed at any time."""

from __future__ import annotations

import json
from pathlib import Path

from quality.run import Result
from schemas.errors import InputError


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
