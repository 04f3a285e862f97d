"""The audit after a schedule: heads, points, objects and receipts against what was published.

lost          a document does not end in its highest version with every chunk and its KV, or a search misses it
duplicate     a chunk is there twice
stale         an answer used a chunk, or KV made with one, of a version that was not visible while it was asked
orphan        a point or an object that no head names
resurrected   a deleted document, or one that nobody published, is visible
receipt       a receipt that says COMPLETE and is not true, or one that is missing or not closed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.chaos.truth import ABSENT, HeadLog, Truth
from ingest.parts import Stores
from schemas.chunk import IndexedChunk
from schemas.errors import ArtifactMiss
from schemas.head import Head
from schemas.ids import DocumentKey
from stores.leftovers import leftovers


class Kind(StrEnum):
    """What can be wrong. The values are names in the result's JSON."""

    LOST = "lost"
    DUPLICATE = "duplicate"
    STALE = "stale"
    ORPHAN = "orphans"
    RESURRECTED = "resurrected"
    RECEIPT = "receipts"


NOBODY = DocumentKey("-", "-")  # of no document in particular


@dataclass(frozen=True)
class Fault:
    """One thing that must not be.

    Attributes:
        drift: that a process which was killed, or cut off and then killed, may leave behind: reconcile repairs it.
    """

    kind: Kind
    document: DocumentKey
    what: str
    drift: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.document}: {self.what}"


def audit(stores: Stores, truth: Truth, tenant: str | None = None) -> list[Fault]:
    """Everything that is wrong now that nothing is on its way; of one tenant or of all."""
    heads = {head.document: head for head in stores.index.documents(tenant)}
    faults: list[Fault] = []
    for document, (version, content) in truth.final().items():
        if tenant in (None, document.tenant):
            faults += _document(stores, document, heads.get(document), version, content)
    for document, head in heads.items():
        if document not in truth.contents and head.live:
            faults.append(Fault(Kind.RESURRECTED, document, "nobody published it"))
    return faults + list(_orphans(stores, heads, tenant)) + list(receipts(stores, heads))


def count(faults: Iterable[Fault]) -> dict[Kind, int]:
    """How many there are of each kind."""
    counted = Counter(fault.kind for fault in faults)
    return {kind: counted[kind] for kind in Kind}


def _document(
    stores: Stores, document: DocumentKey, head: Head | None, version: int, content: str | None
) -> Iterator[Fault]:
    if head is None:
        yield Fault(Kind.LOST, document, f"it has no head; version {version} was published")
        return
    if head.live and content is None:
        yield Fault(Kind.RESURRECTED, document, f"version {head.version} is live; version {version} deleted it")
        return
    if (head.version, head.live) != (version, content is not None):
        yield Fault(Kind.LOST, document, f"it ends in version {head.version} ({head.state}), not in {version}")
        return
    if content is not None:
        points = stores.index.chunks(document, version)
        yield from _points(document, head, points, content)
        yield from _kv(stores, document, points)


def _points(document: DocumentKey, head: Head, points: Sequence[IndexedChunk], content: str) -> Iterator[Fault]:
    seen = Counter(point.chunk.ordinal for point in points)
    wanted = set(range(head.n_chunks))
    if missing := wanted - seen.keys():
        yield Fault(Kind.LOST, document, f"version {head.version} has no chunks {sorted(missing)}")
    if again := [ordinal for ordinal, times in seen.items() if times > 1 or ordinal not in wanted]:
        yield Fault(Kind.DUPLICATE, document, f"version {head.version} has chunks {again} beyond its {head.n_chunks}")
    if seen.keys() == wanted and " ".join(point.chunk.text for point in points).split() != content.split():
        yield Fault(Kind.LOST, document, f"the chunks of version {head.version} are not its text")


def _kv(stores: Stores, document: DocumentKey, points: Sequence[IndexedChunk]) -> Iterator[Fault]:
    fingerprint = stores.generation.fingerprint.digest
    for point in points:
        where = f"chunk {point.chunk.ordinal} of version {point.chunk.version}"
        if not point.kv_ready:
            yield Fault(Kind.LOST, document, f"{where} is not marked as having KV", drift=True)
        fused = [point.fusion] if point.fusion is not None and point.fusion.ready else []
        forms = [(point.kv_key, ())] + [(one.kv_key, tuple(n.kv_key for n in one.neighbours)) for one in fused]
        for key, neighbours in forms:
            try:
                stores.kv.get(
                    document, key, fingerprint=fingerprint, token_sha256=point.chunk.token_digest, neighbours=neighbours
                )
            except ArtifactMiss as miss:
                yield Fault(Kind.LOST, document, f"{where} has no KV that can be used: {miss}", drift=True)


def _orphans(stores: Stores, heads: dict[DocumentKey, Head], tenant: str | None) -> Iterator[Fault]:
    names: dict[tuple[str, str], set[str]] = {}
    for page in stores.index.points(tenant):
        for point in page:
            head = heads.get(point.document)
            if head is None or not head.live or head.version != point.version:
                now = "no head" if head is None else f"head {head.version} {head.state}"
                yield Fault(Kind.ORPHAN, point.document, f"a point of version {point.version} ({now})", drift=True)
                continue
            names.setdefault((point.document.tenant_digest, point.document.digest), set()).update(point.names)
    tenant_digest = None if tenant is None else DocumentKey(tenant, "-").tenant_digest
    known = {(document.tenant_digest, document.digest): document for document in heads}
    for folder, keys in stores.kv.folders(tenant_digest).items():
        document = known.get(folder, DocumentKey(folder[0][:8], folder[1][:8]))
        for key in set(keys) - names.get(folder, set()):
            yield Fault(Kind.ORPHAN, document, f"artifact {key[:12]} that no live point names", drift=True)
    for document in heads:
        if staged := stores.kv.staged(document):
            yield Fault(Kind.ORPHAN, document, f"{staged} files of killed writers", drift=True)
        for chunk in stores.index.fused_with(document):
            for one in chunk.fusion.neighbours if chunk.fusion is not None else ():
                head = heads.get(one.document)
                if head is None or not head.live or head.version != one.version:
                    what = f"fused KV of {chunk.chunk.document} made with version {one.version} of this"
                    yield Fault(Kind.ORPHAN, one.document, what, drift=True)


def receipts(stores: Stores, heads: dict[DocumentKey, Head]) -> Iterator[Fault]:
    """Deletions of these documents that are open, or have no receipt."""
    for document, head in heads.items():
        kept = [name for name in stores.receipts.of(document) if name.generation == stores.generation.name]
        complete = {name.version for name in kept if name.stage is None}
        for name in kept:
            if name.stage is not None:
                said = f"the deletion of version {name.version} is open ({name.stage})"
                yield Fault(Kind.RECEIPT, document, said, drift=True)
        if not head.live and head.version not in complete:
            said = f"version {head.version} is deleted and has no complete receipt"
            yield Fault(Kind.RECEIPT, document, said, drift=True)


def untrue(stores: Stores, document: DocumentKey, version: int) -> list[Fault]:
    """To be asked when a complete receipt is about to be written: what is left all the same."""
    left = leftovers(stores.index, stores.kv, document, version)
    what = ", ".join(f"{n} in {place}" for place, n in left.items() if n)
    return (
        [Fault(Kind.RECEIPT, document, f"the receipt of version {version} says COMPLETE, left are {what}")]
        if what
        else []
    )


def stale(
    log: HeadLog, truth: Truth, document: DocumentKey, version: int, text: str | None, begin: float, end: float
) -> list[Fault]:
    """What is wrong with an answer that used this chunk and was made between `begin` and `end`.

    Args:
        text: the chunk's; None for a neighbour whose KV is in an artifact, of which only the version is known.
    """
    visible = log.visible(document, begin, end)
    if version not in visible:
        now = "nothing" if visible == {ABSENT} else f"{sorted(visible)}"
        return [Fault(Kind.STALE, document, f"an answer used version {version} while {now} was visible")]
    if text is not None and not truth.holds(document, version, text):
        return [Fault(Kind.STALE, document, f"an answer used text that is not of version {version}")]
    return []
