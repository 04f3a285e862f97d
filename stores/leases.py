"""Leases: who uses a generation now, so that it is not reclaimed under them.

A lease is one empty object whose name says all: `<folder>/<generation>/<role>@<holder>=<expires>`, in ms.
Renewing writes a new name and removes the old one. One that is past its time is ignored, whoever held it: a process
that was killed blocks nothing for longer than that. Clocks that differ shorten or lengthen it by as much.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import threading
from typing import NamedTuple

from schemas.errors import BlobError
from stores.blobs import Blobs
from stores.clock import Clock

log = logging.getLogger(__name__)

_RENEWALS = 3  # in the time of a lease: two may fail
_NAME = re.compile(r"(?P<role>[a-z]+)@(?P<holder>[A-Za-z0-9_.-]+)=(?P<expires_ms>\d+)")
_numbers = itertools.count(1)


class Held(NamedTuple):
    """A lease that is not past its time."""

    role: str
    holder: str
    expires_ms: int


class Leases:
    """The leases of all generations. Safe to use from several threads; failures are `BlobError`.

    Args:
        folder: where they lie.
        lease_s: how long one holds after it was renewed.
    """

    def __init__(self, blobs: Blobs, folder: str, clock: Clock, lease_s: float) -> None:
        self._blobs, self._folder, self._clock = blobs, folder, clock
        self.lease_s = lease_s

    def hold(self, generation: str, role: str) -> Lease:
        """A lease of this process, renewed in a thread of its own until it is closed or left to expire."""
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:60] or "host"
        lease = Lease(self, generation, role, f"{host}-{os.getpid()}-{next(_numbers)}")
        lease.start()
        return lease

    def held(self, generation: str) -> list[Held]:
        """Who holds a generation now."""
        now_ms = self._clock.now_ms()
        return [lease for _, lease in self._all(generation) if lease.expires_ms > now_ms]

    def renew(self, generation: str, role: str, holder: str) -> None:
        """Write the lease with a new time, then remove its older names."""
        expires_ms = self._clock.now_ms() + round(self.lease_s * 1000)
        path = f"{self._folder}/{generation}/{role}@{holder}={expires_ms}"
        self._blobs.put_new(path, b"")
        self._drop(generation, role, holder, keep=path)

    def release(self, generation: str, role: str, holder: str) -> None:
        """Remove it before its time."""
        self._drop(generation, role, holder, keep="")

    def forget(self, generation: str) -> int:
        """Remove every lease of a generation that is gone; returns how many there were."""
        return self._blobs.delete([path for path, _ in self._all(generation)])

    def _drop(self, generation: str, role: str, holder: str, keep: str) -> None:
        mine = [path for path, lease in self._all(generation) if lease[:2] == (role, holder) and path != keep]
        self._blobs.delete(mine)

    def _all(self, generation: str) -> list[tuple[str, Held]]:
        found = []
        for path, _ in self._blobs.list(f"{self._folder}/{generation}"):
            match = _NAME.fullmatch(path.rpartition("/")[2])
            if match is not None:
                found.append((path, Held(match["role"], match["holder"], int(match["expires_ms"]))))
        return found


class Lease:
    """One lease of this process. `Leases.hold` makes them."""

    def __init__(self, leases: Leases, generation: str, role: str, holder: str) -> None:
        self.generation = generation
        self._leases, self._name = leases, (generation, role, holder)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease of {generation}", daemon=True)

    def start(self) -> None:
        """Write it, and begin to renew it. Raises `BlobError` where it cannot be written."""
        self._leases.renew(*self._name)
        self._thread.start()

    def expire(self) -> None:
        """Renew it no more; it holds for what is left of its time."""
        self._ended.set()

    def close(self) -> None:
        """Give it back now. Twice is harmless."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._leases.release(*self._name)
        except BlobError as error:
            log.warning("the lease on generation %s was not removed and runs out: %s", self.generation, error)

    def _renew(self) -> None:
        while not self._ended.wait(self._leases.lease_s / _RENEWALS):
            try:
                self._leases.renew(*self._name)
            except BlobError as error:
                log.warning("the lease on generation %s was not renewed: %s", self.generation, error)
