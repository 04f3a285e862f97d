"""Serving replicas that keep KV in memory: `replicas/<generation>/<name>=<expires>`, with what each says of itself.

A replica speaks before it keeps anything, and again before its word expires; one that cannot lets go of everything. So
whoever is not here keeps nothing, and a replica that was killed is waited for no longer than `LEASE_S`. Clocks that
differ shorten or lengthen that by as much.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from schemas.errors import BlobError, InputError
from schemas.ids import DocumentKey
from schemas.receipt import ReceiptPart, Tier, TierCount
from schemas.replica import Replica
from stores.blobs import Blobs
from stores.clock import Clock, SystemClock

ROOT = "replicas"
LEASE_S = 30.0
_TRIES = 20
_NAME = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)=(?P<expires_ms>\d+)")


class Said(NamedTuple):
    """What `schemas.receipt.judge` is to know of the replicas."""

    tiers: tuple[TierCount, ...]
    waiting: tuple[str, ...]


class Replicas:
    """The replicas of one generation. Safe to use from several threads; every failure is `BlobError`."""

    def __init__(self, blobs: Blobs, generation: str, clock: Clock | None = None) -> None:
        self._blobs, self._folder, self._clock = blobs, f"{ROOT}/{generation}", clock or SystemClock()

    def say(self, replica: Replica) -> None:
        """Put a replica's word in the place of its last one; remove those of others that have long expired."""
        now_ms = self._clock.now_ms()
        path = f"{self._folder}/{replica.name}={now_ms + round(LEASE_S * 1000)}"
        if not self._blobs.put_new(path, replica.to_bytes()):  # twice in one millisecond
            self._blobs.delete([path])
            self._blobs.put_new(path, replica.to_bytes())
        old_ms = now_ms - round(LEASE_S * 1000)
        self._blobs.delete(
            other
            for other, name, expires_ms in self._all()
            if (name == replica.name and other != path) or expires_ms < old_ms
        )

    def leave(self, name: str) -> None:
        """The replica keeps nothing any more."""
        self._blobs.delete([path for path, other, _ in self._all() if other == name])

    def live(self) -> list[Replica]:
        """Every replica whose word holds now, by name."""
        for _ in range(_TRIES):
            now_ms = self._clock.now_ms()
            last = {name: path for path, name, expires_ms in self._all() if expires_ms > now_ms}
            found = {name: self._blobs.get(path) for name, path in last.items()}
            if None not in found.values():  # else one has spoken again, or left, since the list was made
                return [_read(last[name], data) for name, data in sorted(found.items()) if data is not None]
        raise BlobError(f"{self._folder}: replicas come and go too quickly to be read; try again")

    def of(self, document: DocumentKey, version: int, part: ReceiptPart | None) -> Said:
        """What the replicas say of a deletion.

        Args:
            part: PREFILL's, which says where the tombstone stands; None: there is none, and nobody is waited for.
        """
        live = self.live()
        passed = [replica for replica in live if part is not None and replica.passed(part)]
        counts = [replica.counts(document, version) for replica in live]
        tiers = [
            TierCount(tier=tier, replicas=len(live), passed=len(passed), dropped=sum(c.get(tier, 0) for c in counts))
            for tier in Tier
        ]
        waiting = [] if part is None else [replica.name for replica in live if replica not in passed]
        return Said(tuple(tiers) if live else (), tuple(waiting))

    def _all(self) -> Iterator[tuple[str, str, int]]:
        names = []
        for path, _ in self._blobs.list(self._folder):
            match = _NAME.fullmatch(path.rpartition("/")[2])
            if match is not None:
                names.append((path, match["name"], int(match["expires_ms"])))
        yield from sorted(names, key=lambda each: each[2])


def _read(path: str, data: bytes) -> Replica:
    try:
        return Replica.from_bytes(data)
    except InputError as error:
        raise BlobError(f"{path}: {error}; it was damaged from outside: remove it") from error
