"""What this process keeps in memory of documents: artifacts (`host`) and rows of whole prompts (`prefix`).

Both are told together what has changed. They take nothing in while they are closed: before the replica has said that it
keeps something, and when it could not say so again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import torch

from engine import Plan
from schemas.errors import StoreError
from schemas.head import CommitRecord
from schemas.ids import DocumentKey
from schemas.kv_artifact import KvArtifact
from schemas.receipt import Tier
from serve.prefixes import ExactPrefixes
from serve.retrieve import Found
from serve.telemetry import Telemetry
from stores import VectorIndex
from stores.tiers import Floors, HostTier, Name, Owner

_FIRST_WAIT_S = 1.0  # for the replica's first word: what the first question computed is worth that


class Tiers:
    """Both tiers of one generation. Thread-safe.

    Args:
        generation: its name, a label of their metrics.

    Attributes:
        followed: whether the commits topic is being read, so that what goes out of date will be dropped.
    """

    def __init__(
        self,
        generation: str,
        host: HostTier,
        prefixes: ExactPrefixes,
        floors: Floors,
        index: VectorIndex,
        telemetry: Telemetry,
    ) -> None:
        self.host, self.prefixes = host, prefixes
        self._generation, self._floors, self._index, self._telemetry = generation, floors, index, telemetry
        self._open, self._told = False, threading.Event()
        self.followed = False
        self._evicted, self._counting = dict.fromkeys(Tier, 0), threading.Lock()
        telemetry.watch_tiers(generation, {Tier.HOST: lambda: host.nbytes, Tier.PREFIX: lambda: prefixes.nbytes})

    @property
    def is_open(self) -> bool:
        """Whether something may be taken in; waits a moment where that is not known yet."""
        self._told.wait(_FIRST_WAIT_S)
        return self._open

    @property
    def keeps(self) -> bool:
        """Whether something may be in memory."""
        return self._open

    def open(self) -> None:
        """Take in from now on."""
        self._open = True
        self._told.set()

    def told(self) -> None:
        """Whether they open is not known, but nobody shall wait for it any longer."""
        self._told.set()

    def shut(self) -> None:
        """Let go of everything, and take nothing in."""
        self._open = False
        self._told.set()
        self.host.clear()
        self.prefixes.clear()

    def keep(self, name: Name, artifact: KvArtifact, owners: Iterable[Owner], cost_s: float) -> bool:
        """As `HostTier.keep`."""
        owners = tuple(owners)
        if not self.is_open or not self.host.keep(name, artifact, owners, cost_s):
            return False
        self._taken_in(owners)
        return True

    def looked_up(self, tier: Tier, hits: int, misses: int) -> None:
        """Count: so many chunks of a prompt were in a tier, so many were not."""
        self._telemetry.tier_looked_up(self._generation, tier, hits, misses)

    def passed(self, record: CommitRecord) -> dict[Tier, int]:
        """A commit record: drop what it puts out of date; returns how much there was."""
        return self._drop(*self._floors.note(record))

    def keeper(
        self, tenant: str, plan: Plan, kept: Sequence[Found]
    ) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """As `ExactPrefixes.keeper`."""
        keep = self.prefixes.keeper(tenant, plan, kept)
        if keep is None:
            return None

        def guarded(k: torch.Tensor, v: torch.Tensor) -> None:
            if self.is_open:
                keep(k, v)
                self._taken_in({(one.indexed.chunk.document, one.indexed.chunk.version) for one in kept})

        return guarded

    def check(self, owners: Collection[Owner] | None = None) -> None:
        """Compare with the heads, and drop what is not live at its version.

        Args:
            owners: compare these only.

        Raises:
            StoreError: the heads cannot be read; nothing is dropped.
        """
        owners = self.host.owners() | self.prefixes.owners() if owners is None else owners
        heads = self._index.heads(sorted({document for document, _ in owners})) if owners else {}
        for document, version in owners:
            head = heads.get(document)
            if head is None or not head.live or head.version != version:
                self._drop(document, version + 1)

    def _taken_in(self, owners: Collection[Owner]) -> None:
        """What was taken in may have gone out of date since its head was read; records that pass would say so."""
        self._count_evicted()
        if not self._open:  # shut meanwhile
            self.shut()
        elif not self.followed:
            with suppress(StoreError):  # the next round looks again
                self.check(owners)

    def _drop(self, document: DocumentKey, floor: int) -> dict[Tier, int]:
        dropped = {Tier.HOST: self.host.drop(document, floor), Tier.PREFIX: self.prefixes.drop(document, floor)}
        self._telemetry.dropped(self._generation, dropped)
        return {tier: n for tier, n in dropped.items() if n}

    def _count_evicted(self) -> None:
        with self._counting:
            for tier, total in ((Tier.HOST, self.host.evicted), (Tier.PREFIX, self.prefixes.evicted)):
                self._telemetry.evicted(self._generation, tier, total - self._evicted[tier])
                self._evicted[tier] = total
