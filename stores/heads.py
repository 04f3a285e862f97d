"""The heads of the documents: which version is visible. One payload-only point each, moved by compare-and-set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qdrant_client import models

from schemas.errors import VectorIndexError
from schemas.head import Head
from schemas.ids import DocumentKey, head_id
from stores.points import head_point, labels, of_heads, older_than, read_head
from stores.qdrant import Connection

_PAGE = 1000


class Heads:
    """The collection of heads. Safe to use from several threads."""

    def __init__(self, connection: Connection, collection: str) -> None:
        self._connection = connection
        self.collection = collection

    def read(self, documents: Sequence[DocumentKey]) -> dict[DocumentKey, Head]:
        """The heads of `documents` as they are now, by id; a document that never was has no entry."""
        wanted = list(dict.fromkeys(documents))
        found: dict[DocumentKey, Head] = {}
        for start in range(0, len(wanted), _PAGE):
            ids = [str(head_id(document)) for document in wanted[start : start + _PAGE]]
            records = self._connection.call(
                "retrieve", collection_name=self.collection, ids=ids, with_payload=True, with_vectors=False
            )
            for record in records:
                head = read_head(record)
                found[head.document] = head
        return found

    def flip(self, head: Head) -> Head:
        """Store `head` if its version is higher than the stored one; mutates nothing otherwise.

        Qdrant does not tell the loser, so the head is read back: the caller compares version and content digest
        and learns whether it won, was overtaken, or was the same event.

        Returns:
            The head that is stored now: of `head.version` or of a higher one.

        Raises:
            VectorIndexError: the call failed (then the head may have moved or not: flip again), or the stored
                point is not a head.
        """
        self._connection.call(
            "upsert",
            collection_name=self.collection,
            points=[head_point(head)],
            update_filter=older_than(head.version),
            wait=True,
            ordering=models.WriteOrdering.STRONG,
        )
        stored = self.read([head.document]).get(head.document)
        if stored is None or stored.version < head.version:
            found = "nothing" if stored is None else f"version {stored.version}"
            raise VectorIndexError(
                f"the head of {head.document} was flipped to version {head.version} and read back as {found}"
            )
        return stored

    def all(self, tenant: str | None = None) -> Iterator[Head]:
        """Every head, tombstones too, or those of one tenant. Heads that are flipped meanwhile come as either."""
        after: str | None = None
        while True:
            heads, after = self.page(tenant, {}, after=after)
            yield from heads
            if after is None:
                return

    def page(
        self, tenant: str | None, metadata: Mapping[str, Any], *, after: str | None = None, limit: int = _PAGE
    ) -> tuple[list[Head], str | None]:
        """At most `limit` heads, tombstones too, and where the next page begins; None where there is none.

        Args:
            metadata: keys and values (strings, numbers, booleans) that a head's metadata has all of.
            after: what the page before gave.
        """
        records, following = self._connection.call(
            "scroll",
            collection_name=self.collection,
            scroll_filter=of_heads(tenant, metadata),
            limit=limit,
            offset=after,
            with_payload=True,
            with_vectors=False,
        )
        wanted = set(labels(metadata))
        found = [  # the index is trusted to find, not to exclude
            head
            for head in map(read_head, records)
            if tenant in (None, head.tenant) and wanted <= set(labels(head.metadata))
        ]
        return found, None if following is None else str(following)
