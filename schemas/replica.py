"""What a serving replica says of the KV that it keeps in memory, so that a deletion can be shown to have reached it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from schemas.ids import DocumentKey
from schemas.receipt import ReceiptPart, Tier
from schemas.stored import Frozen, Stored

CLOCK_SLACK_MS = 1_000  # between the clocks of two machines


class Dropped(Frozen):
    """What a replica let go of for one deletion; kept until the receipt is complete. Digests: it holds no content."""

    tenant_digest: str
    document_digest: str
    version: int
    counts: dict[Tier, int]


class Replica(Stored):
    """A serving replica's word; it holds until `expires_ms`, by when it has spoken again or keeps nothing any more.

    Attributes:
        name: of the replica.
        positions: of the commits topic, by partition: every record before them was acted on.
        clean_ms: nothing that was out of date at this time is kept; it started, or compared everything with the heads.
        dropped: what open receipts are to count.
    """

    what: ClassVar[str] = "a Replica"

    name: str
    positions: dict[int, int] = Field(default_factory=dict)
    clean_ms: int
    dropped: tuple[Dropped, ...] = ()

    def passed(self, part: ReceiptPart) -> bool:
        """Whether it keeps nothing of what `part` says was deleted."""
        if self.clean_ms > part.at_ms + CLOCK_SLACK_MS:
            return True
        if part.partition is None or part.offset is None:
            return False
        return self.positions.get(part.partition, 0) > part.offset

    def counts(self, document: DocumentKey, version: int) -> dict[Tier, int]:
        """What it let go of for that deletion."""
        wanted = (document.tenant_digest, document.digest, version)
        for one in self.dropped:
            if (one.tenant_digest, one.document_digest, one.version) == wanted:
                return one.counts
        return {}
