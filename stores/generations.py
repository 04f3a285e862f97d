"""The record of generations in the object store, and who uses which generation.

Only create-only puts are atomic in every object store that we know, folders too. So the record is a row of objects
that are never changed, `generations/record/<sequence>.json`, and the one with the highest number counts: a change is a
compare-and-set, because of two writers that read number n one cannot create n + 1. None is ever removed (a generation
makes about five of a few KB each): a writer that slept since n would find n + 1 free. So they are the history, too.

In the object store and not in Qdrant, because in local mode only one process at a time can open Qdrant, and because
the KV of a generation lies here.
"""

from __future__ import annotations

from schemas.errors import BlobError, InputError
from schemas.fingerprint import Generation
from schemas.generations import Change, Generations, KnownGeneration
from schemas.settings import Settings
from stores.blobs import Blobs
from stores.clock import Clock, SystemClock
from stores.leases import Lease, Leases

ROOT = "generations"
LEASE_S = 60.0
_TRIES = 20


class GenerationStore:
    """The record and the leases of one object store. Safe to use from several threads.

    Args:
        lease_s: how long a lease holds after it was renewed.
    """

    def __init__(self, blobs: Blobs, clock: Clock | None = None, lease_s: float = LEASE_S) -> None:
        self.blobs = blobs
        self.clock = clock or SystemClock()
        self.leases = Leases(blobs, f"{ROOT}/leases", self.clock, lease_s)

    def read(self) -> Generations:
        """The record as it is now; an empty one before the first use.

        Raises:
            BlobError: the store does not answer, or the record was damaged from outside.
        """
        found = [path for path, _ in self.blobs.list(f"{ROOT}/record")]
        if not found:
            return Generations()
        newest = max(found)
        data = self.blobs.get(newest)
        if data is None:
            raise BlobError(f"{newest} is listed and cannot be read")
        try:
            return Generations.from_bytes(data)
        except InputError as error:
            raise BlobError(f"{newest}: {error}; it was damaged from outside, or is of a newer release") from error

    def change(self, change: Change) -> Generations:
        """Compare-and-set: apply `change` to the record as it is now, again and again until nobody came between.

        Args:
            change: the next record from the one that is there; the same one where there is nothing to do. What it
                raises ends the attempt, and nothing is written.

        Returns:
            The record that is stored now.

        Raises:
            BlobError: the store does not answer; the change may have been made: read.
        """
        for _ in range(_TRIES):
            before = self.read()
            after = change(before)
            if after is before:
                return before
            if after.sequence != before.sequence + 1:
                raise ValueError(f"a change makes number {before.sequence + 1} (got {after.sequence})")
            if self.blobs.put_new(f"{ROOT}/record/{after.sequence:012d}.json", after.to_bytes()):
                return after
        raise BlobError(f"the record of generations changed {_TRIES} times while it was to be changed; try again")

    def claim(self, generation: Generation, settings: Settings, role: str) -> Claim:
        """Begin to use a generation: it becomes live where nothing is, and is not reclaimed while the claim is held.

        First the lease, then the record: `reclaim` writes the record first and looks for leases then, so one of the
        two sees the other.

        Args:
            role: `index`, `prefill`, `serve`, …: shown by `kvquilt generations`.

        Raises:
            SettingsError: the generation is not one that may be used, and why.
            BlobError: the store does not answer.
        """
        self.read().admit(generation)
        lease = self.leases.hold(generation.name, role)
        try:
            record = self.change(
                lambda now: now.add(generation, settings, self.clock.now_ms()) if now.live is None else now
            )
            record.admit(generation)
        except BaseException:
            lease.close()
            raise
        entry = record.get(generation.name)
        assert entry is not None
        return Claim(entry, lease)


class Claim:
    """The right to use a generation, until it is closed.

    Attributes:
        entry: the generation as it was when the claim was made.
    """

    def __init__(self, entry: KnownGeneration, lease: Lease) -> None:
        self.entry = entry
        self._lease = lease

    def expire(self) -> None:
        """Renew it no more: it holds for what is left of its time, as long as requests that are under way need it."""
        self._lease.expire()

    def close(self) -> None:
        """Give it back. Twice is harmless."""
        self._lease.close()
