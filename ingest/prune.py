"""Pruning: deletion of the documents that a source owns and no longer has.

Which they are is found before anything is ingested, so that somebody can say no; they are deleted after everything
else, by tombstones in the documents topic, and by the backfill itself at once. A document that changed after the
source was written is left alone, also if that is not known yet: a tombstone has the version right behind the head's,
so whatever change there is beyond that wins over it, read before or after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass

from ingest.connect import ConnectStores, connected
from ingest.formats import EventReader
from ingest.parts import Stores
from ingest.sources import Source
from ingest.sources.kinds import LINES, PARQUET
from schemas.errors import InputError
from schemas.events import TENANT_HEADER, VERSION_HEADER, message_key
from schemas.head import Head
from schemas.ids import DocumentKey
from schemas.settings import Settings
from stores.publisher import Item
from stores.topics import Message

EVERYTHING = "*"  # as a prefix: every document of the tenant


@dataclass(frozen=True)
class Prune:
    """What is to be deleted: documents by their heads, out of `n_owned` live ones that the source owns.

    Attributes:
        n_newer: of those that are missing from the source, how many changed after it was written: they stay.
    """

    heads: tuple[Head, ...]
    n_owned: int
    n_newer: int

    @property
    def takes_most(self) -> bool:
        """Whether more than half of the documents would go: more likely a source that lost something."""
        return 2 * len(self.heads) > self.n_owned


@dataclass(frozen=True)
class Deletions:
    """Tombstones as a piece of a source."""

    messages: tuple[Message, ...]

    @property
    def n_rows(self) -> int:
        """See `Piece`."""
        return len(self.messages)

    def read(self) -> Iterator[Message]:
        """See `Piece`."""
        return iter(self.messages)

    def documents(self, events: EventReader) -> Iterator[DocumentKey]:
        """See `Piece`."""
        return (events.parse(message).document for message in self.messages)


def plan_prune(settings: Settings, source: Source, tenant: str, owns: Sequence[str]) -> Prune:
    """Find what a source owns and no longer has; reads all of the source, and every head of the tenant.

    Args:
        owns: what the ids of the source's documents begin with; without any, what the source itself tells.

    Raises:
        InputError: nobody says what the source owns, or a row of it does not tell its document, or a file of rows was
            left out.
        StoreError: the index cannot be read.
    """
    stores = ConnectStores(settings)
    with connected(stores), closing(EventReader(settings.events)) as events:
        return missing(stores(), events, source, tenant, owns)


def missing(stores: Stores, events: EventReader, source: Source, tenant: str, owns: Sequence[str]) -> Prune:
    """`plan_prune` over stores that are given."""
    prefixes = tuple("" if prefix == EVERYTHING else prefix for prefix in owns or source.owns)
    if not owns and (not prefixes or "" in prefixes):
        raise InputError(
            "--prune: which documents are the source's? Files of rows, topics and a folder that is the root itself do "
            f"not tell. Say what their ids begin with, --owns PREFIX, or --owns '{EVERYTHING}' for all of the tenant's"
        )
    for left in source.left_out:
        if left.why.is_fault and left.doc_id.lower().endswith((*LINES, *PARQUET)):
            raise InputError(f"--prune: which documents are in {left.path} cannot be told: {left.why.value}")
    has = {document.digest for piece in source.pieces for document in piece.documents(events)}
    left_out = {left.doc_id for left in source.left_out}
    owned = [head for head in stores.index.documents(tenant) if head.live and head.doc_id.startswith(prefixes)]
    gone = [head for head in owned if head.document.digest not in has and not _within(head.doc_id, left_out)]
    older = tuple(head for head in gone if head.event_ms < source.as_of_ms)
    return Prune(older, len(owned), len(gone) - len(older))


def _within(doc_id: str, left_out: Set[str]) -> bool:
    """Whether a document, or a folder that it is in, was left out: it is still there, only not read."""
    return any(doc_id[:at] in left_out for at, letter in enumerate(doc_id + "/") if letter == "/")


def publish_deletions(stores: Stores, prune: Prune) -> Deletions:
    """Write the tombstones to the documents topic; gives them as they are there.

    A head that moved since it was planned keeps its document: in the compacted topic a tombstone would take the place
    of the change that moved it.
    """
    now = stores.retry(lambda: stores.index.heads([head.document for head in prune.heads]), "reading heads")
    items = [_tombstone(head) for head in prune.heads if now.get(head.document) == head]
    topic = stores.settings.kafka.documents_topic
    return Deletions(tuple(stores.publisher.publish_each(topic, items)) if items else ())


def _tombstone(head: Head) -> Item:
    headers = [(TENANT_HEADER, head.tenant.encode()), (VERSION_HEADER, str(head.version + 1).encode())]
    return message_key(head.document), None, headers
