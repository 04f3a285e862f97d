"""What was published, and which versions were visible when: what a schedule is judged by."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field

from schemas.head import Head
from schemas.ids import DocumentKey

ABSENT = -1  # the version of a document that is not visible: deleted, or never committed


@dataclass
class Truth:
    """The content of every version of every document that was published; None is a deletion."""

    contents: dict[DocumentKey, dict[int, str | None]] = field(default_factory=lambda: defaultdict(dict))

    def publish(self, document: DocumentKey, version: int, content: str | None) -> None:
        """Remember it; a version has one content."""
        self.contents[document][version] = content

    def final(self) -> dict[DocumentKey, tuple[int, str | None]]:
        """Version and content that each document must end in: the highest version's."""
        return {document: max(versions.items()) for document, versions in self.contents.items()}

    def holds(self, document: DocumentKey, version: int, text: str) -> bool:
        """Whether a chunk's text is from that version of the document."""
        content = self.contents.get(document, {}).get(version)
        return content is not None and _plain(text) in _plain(content)


class HeadLog:
    """Every move of every head, in order; times are whatever the caller counts in.

    `note` must be called before anybody can read the head that it notes, under the lock of the store: then a reader
    never knows more than the log.
    """

    def __init__(self) -> None:
        self._moves: dict[DocumentKey, list[tuple[float, int]]] = defaultdict(list)
        self._lock = threading.Lock()

    def note(self, head: Head, now: float) -> None:
        """The head is about to be, or is, this."""
        version = head.version if head.live else ABSENT
        with self._lock:
            moves = self._moves[head.document]
            if not moves or moves[-1][1] != version:
                moves.append((now, version))

    def visible(self, document: DocumentKey, begin: float, end: float) -> set[int]:
        """The versions that were visible at some moment of `begin..end`; `ABSENT` where none was."""
        with self._lock:
            moves = list(self._moves.get(document, ()))
        before = [version for now, version in moves if now <= begin]
        return {before[-1] if before else ABSENT} | {version for now, version in moves if begin < now <= end}


def _plain(text: str) -> str:
    return " ".join(text.split())
