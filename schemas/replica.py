"""What a serving replica says of the KV that it keeps in memory, so that a deletion can be shown to have reached it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import InputError
from schemas.ids import DocumentKey
from schemas.receipt import ReceiptPart, Tier

CLOCK_SLACK_MS = 1_000  # between the clocks of two machines


class Dropped(BaseModel):
    """What a replica let go of for one deletion; kept until the receipt is complete. Digests: it holds no content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant_digest: str
    document_digest: str
    version: int
    counts: dict[Tier, int]


class Replica(BaseModel):
    """A serving replica's word; it holds until `expires_ms`, by when it has spoken again or keeps nothing any more.

    Attributes:
        name: of the replica.
        positions: of the commits topic, by partition: every record before them was acted on.
        clean_ms: nothing that was out of date at this time is kept; it started, or compared everything with the heads.
        dropped: what open receipts are to count.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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

    def to_bytes(self) -> bytes:
        """The object as it is stored."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Replica:
        """Read a stored object; raises `InputError` where it is none."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise InputError(f"not a Replica: {error.errors()[0]['msg']}") from error
