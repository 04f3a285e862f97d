"""What one generation lacks of another: their heads compared document by document, and points without KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from schemas.head import Head
from schemas.ids import DocumentKey
from stores.vectors import VectorIndex

T = TypeVar("T")

_PAGE = 1000
_SHOWN = 3  # names in a sentence


@dataclass(frozen=True)
class Gap:
    """What a generation lacks of the live one.

    Attributes:
        n_documents: heads of the live one, tombstones too.
        missing: documents without a head.
        behind: documents at an older version, or at the same one with other content.
        without_kv: document -> visible chunks that have no KV; not those of documents whose KV the live one lacks too.
    """

    n_documents: int = 0
    missing: Sequence[DocumentKey] = ()
    behind: Sequence[DocumentKey] = ()
    without_kv: dict[DocumentKey, int] = field(default_factory=dict)

    @property
    def documents(self) -> list[DocumentKey]:
        """Those that the generation would answer wrongly about, or not at all."""
        return [*self.missing, *self.behind]

    def __bool__(self) -> bool:
        return bool(self.missing or self.behind or self.without_kv)

    def __str__(self) -> str:
        found = [
            (len(self.missing), "documents missing", self.missing),
            (len(self.behind), "documents at an older version", self.behind),
            (sum(self.without_kv.values()), "chunks without KV", list(self.without_kv)),
        ]
        said = [f"{what}: {n} ({_names(which)})" for n, what, which in found if n]
        return "; ".join(said) or f"nothing is missing (documents compared: {self.n_documents})"


def compare(live: VectorIndex, other: VectorIndex) -> Gap:
    """What `other` lacks of `live`; reads every head of the one and the name of every point of the other."""
    n_documents = 0
    missing: list[DocumentKey] = []
    behind: list[DocumentKey] = []
    for heads in _batched(live.documents()):
        n_documents += len(heads)
        found = other.heads([head.document for head in heads])
        for head in heads:
            _sort(head, found.get(head.document), missing, behind)
    return Gap(n_documents, missing, behind, _kv_gap(live, other))


def compare_again(live: VectorIndex, other: VectorIndex, gap: Gap) -> Gap:
    """As `compare`, of the documents of `gap` only: what was on its way then may have arrived."""
    missing: list[DocumentKey] = []
    behind: list[DocumentKey] = []
    for documents in _batched(gap.documents):
        wanted, found = live.heads(documents), other.heads(documents)
        for head in wanted.values():
            _sort(head, found.get(head.document), missing, behind)
    return Gap(gap.n_documents, missing, behind, _kv_gap(live, other) if gap.without_kv else {})


def without_kv(index: VectorIndex) -> dict[DocumentKey, int]:
    """Visible chunks whose point says that there is no KV, by document."""
    lacking: Counter[tuple[DocumentKey, int]] = Counter()
    for page in index.points():
        lacking.update((name.document, name.version) for name in page if name.names[0] not in name.ready)
    counted: dict[DocumentKey, int] = {}
    for part in _batched(sorted(lacking)):
        heads = index.heads([document for document, _ in part])
        for document, version in part:
            head = heads.get(document)
            if head is not None and head.live and head.version == version:
                counted[document] = lacking[document, version]
    return counted


def _kv_gap(live: VectorIndex, other: VectorIndex) -> dict[DocumentKey, int]:
    lacking = without_kv(other)
    if not lacking:
        return {}
    there_too = without_kv(live)  # a model that has no reuse, a chunk that it fails on
    return {document: n for document, n in lacking.items() if document not in there_too}


def _sort(head: Head, other: Head | None, missing: list[DocumentKey], behind: list[DocumentKey]) -> None:
    if other is None:
        missing.append(head.document)
    elif (other.version, other.content_digest) != (head.version, head.content_digest) and other.version <= head.version:
        behind.append(head.document)


def _batched(things: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(things)
    while batch := list(islice(rest, _PAGE)):
        yield batch


def _names(documents: Sequence[DocumentKey]) -> str:
    more = len(documents) - _SHOWN
    return ", ".join(map(str, documents[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
