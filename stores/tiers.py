"""The host tier: KV artifacts in the memory of a serving process, read and checked once.

An artifact is kept under its document, version and key: what a question asks for has the version of a head that was
read for it, so an entry of an older version is never found. `Floors` knows below which version a document's entries
are out of date; what is below is dropped, and not taken in any more, however late its load ends.

What goes first when there is no room: the lowest `clock + uses x load seconds / bytes` (greedy dual size frequency; the
clock is the highest priority that ever went, so that what was used long ago does not stay for ever).
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from schemas.head import CommitRecord, DocumentState
from schemas.ids import DocumentKey
from schemas.kv_artifact import KvArtifact

Owner = tuple[DocumentKey, int]  # a version of a document

_REMEMBERED = 100_000  # documents; a question's loads are over long before so many others have changed


class Floors:
    """Of each document that changed lately, the lowest version that may be kept. Thread-safe."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._floors: OrderedDict[DocumentKey, int] = OrderedDict()
        self._lock, self._remembered = threading.Lock(), remembered

    def note(self, record: CommitRecord) -> Owner:
        """A commit or tombstone passed; returns the document and its floor."""
        floor = record.version + (record.state is DocumentState.DELETED)
        with self._lock:
            floor = max(floor, self._floors.pop(record.document, floor))
            self._floors[record.document] = floor
            if len(self._floors) > self._remembered:
                self._floors.popitem(last=False)
        return record.document, floor

    def below(self, owners: Iterable[Owner]) -> bool:
        """Whether any of these versions is out of date."""
        with self._lock:
            return any(version < self._floors.get(document, version) for document, version in owners)


class Name(NamedTuple):
    """Of an entry."""

    document: DocumentKey
    version: int
    kv_key: str


@dataclass(eq=False)
class _Entry:
    artifact: KvArtifact
    owners: tuple[Owner, ...]  # of its own document, and of those that it was fused with
    cost_s: float
    uses: int = 1
    pins: int = 0
    priority: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.artifact.nbytes


class HostTier:
    """Artifacts of at most `max_bytes`. Thread-safe.

    Attributes:
        nbytes: what they have now.
        evicted: how many had to go for others so far.
    """

    def __init__(self, max_bytes: int, floors: Floors) -> None:
        self.max_bytes, self._floors = max_bytes, floors
        self._entries: dict[Name, _Entry] = {}
        self._owned: defaultdict[DocumentKey, set[Name]] = defaultdict(set)
        self._lock = threading.Lock()
        self._clock = 0.0
        self.nbytes = self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: Name) -> bool:
        return name in self._entries

    def pin(self, name: Name) -> KvArtifact | None:
        """The artifact, which stays until `unpin`; None where it is not here."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return None
            entry.pins += 1
            entry.uses += 1
            self._rank(entry)
            return entry.artifact

    def unpin(self, name: Name, artifact: KvArtifact) -> None:
        """An artifact from `pin` may go, as far as this user of it is concerned."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and entry.artifact is artifact:  # else it was dropped, and perhaps read again
                entry.pins -= 1

    def keep(self, name: Name, artifact: KvArtifact, owners: Iterable[Owner], cost_s: float) -> bool:
        """Take in an artifact that was read and checked, unless it is out of date or there is no room for it.

        Args:
            owners: the versions of documents that its rows depend on.
            cost_s: what it took to read.
        """
        entry = _Entry(artifact, tuple(owners), cost_s)
        with self._lock:
            if name in self._entries or not self._make_room(entry.nbytes):
                return False
            self._entries[name] = entry
            self._rank(entry)
            self.nbytes += entry.nbytes
            for document, _ in entry.owners:
                self._owned[document].add(name)
            if self._floors.below(entry.owners):  # looked at last: a drop that comes later finds the entry
                self._remove(name)
                return False
            return True

    def drop(self, document: DocumentKey, floor: int) -> int:
        """Let go of what holds a version of `document` below `floor`; returns how many there were."""
        with self._lock:
            out = [
                name
                for name in self._owned.get(document, ())
                if any(owner == document and version < floor for owner, version in self._entries[name].owners)
            ]
            for name in out:
                self._remove(name)
            return len(out)

    def clear(self) -> int:
        """Let go of everything; returns how many there were."""
        with self._lock:
            n, self.nbytes = len(self._entries), 0
            self._entries.clear()
            self._owned.clear()
            return n

    def owners(self) -> set[Owner]:
        """The versions of documents that there is something of."""
        with self._lock:
            return {owner for entry in self._entries.values() for owner in entry.owners}

    def _rank(self, entry: _Entry) -> None:
        entry.priority = self._clock + entry.uses * entry.cost_s / max(1, entry.nbytes)

    def _make_room(self, nbytes: int) -> bool:
        pinned = sum(entry.nbytes for entry in self._entries.values() if entry.pins)
        if pinned + nbytes > self.max_bytes:
            return False
        while self.nbytes + nbytes > self.max_bytes:
            free = (name for name, entry in self._entries.items() if not entry.pins)
            victim = min(free, key=lambda name: self._entries[name].priority)
            self._clock = max(self._clock, self._entries[victim].priority)
            self._remove(victim)
            self.evicted += 1
        return True

    def _remove(self, name: Name) -> None:
        entry = self._entries.pop(name)
        self.nbytes -= entry.nbytes
        for document, _ in entry.owners:
            names = self._owned[document]
            names.discard(name)
            if not names:
                del self._owned[document]
