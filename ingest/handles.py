"""Live objects of this process under a name that survives pickling.

Beam pickles its graph, also where it then runs it in the same process. What cannot be pickled (a stop event, a
progress callback, the parts that a test made) is held here and travels as a `Handle`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

_held: dict[int, Any] = {}
_names = itertools.count()


@dataclass(frozen=True)
class Handle(Generic[T]):
    """Finds a held object again; calling it returns the object.

    Raises:
        RuntimeError: on call, in another process, or after `held` was left.
    """

    name: int

    def __call__(self) -> T:
        """The object itself."""
        if self.name not in _held:
            raise RuntimeError(f"handle {self.name} names nothing in this process: it works in-process only")
        return cast(T, _held[self.name])


@contextmanager
def held(thing: T) -> Iterator[Handle[T]]:
    """Hold `thing` while the block runs."""
    handle: Handle[T] = Handle(next(_names))
    _held[handle.name] = thing
    try:
        yield handle
    finally:
        del _held[handle.name]
