"""Drift: where heads, points, objects and receipts do not agree. Reads only.

Two looks. The first goes over everything, cheaply, and finds suspects: while events are being indexed, some of what it
sees is on its way. The second looks at one suspect exactly, objects first and the head after, as `sinks.retire` does.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from ingest.parts import Stores
from schemas.head import Head
from schemas.ids import DocumentKey, digest
from schemas.receipt import Place, Stage
from stores.leftovers import leftovers, live_names
from stores.points import PointName
from stores.receipts import ReceiptName

Folder = tuple[str, str]  # tenant digest, document digest


@dataclass
class Overview:
    """What the first look found.

    Attributes:
        ahead: points of versions above their head's, or without a head.
        headless: folders of objects of documents that have no head.
        open: a part of each receipt that is not complete, or whose parts a killed run noted beside the complete one.
    """

    n_documents: int = 0
    n_points: int = 0
    n_objects: int = 0
    n_receipts: int = 0
    suspects: dict[DocumentKey, None] = field(default_factory=dict)  # in the order in which they were found
    ahead: set[uuid.UUID] = field(default_factory=set)
    headless: list[Folder] = field(default_factory=list)
    open: list[ReceiptName] = field(default_factory=list)


@dataclass(frozen=True)
class Drift:
    """One document, looked at exactly.

    Attributes:
        stale_points: of versions below the head's; of any up to a tombstone's; beyond the live version's number.
        stale_objects: that the live version does not name; of a tombstone also those that other documents' chunks had
            fused with it.
        ahead: points of versions above the head's, or without a head: an event that is being indexed, or was given up.
        lost: points that the live version has too few.
        vanished: artifacts that points say are there and are not.
        unmade: points whose artifacts are not there yet, or are there and not marked.
        unaccounted: a tombstone without a complete receipt.
    """

    document: DocumentKey
    head: Head | None
    stale_points: int
    stale_objects: int
    beyond: tuple[uuid.UUID, ...]
    ahead: tuple[PointName, ...]
    lost: int
    vanished: int
    unmade: int
    unaccounted: bool

    @property
    def any(self) -> bool:
        """Whether there is anything."""
        counts = (self.stale_points, self.stale_objects, self.ahead, self.lost, self.vanished, self.unmade)
        return any(counts) or self.unaccounted


def overview(parts: Stores, tenant: str | None) -> Overview:
    """Go over everything of a tenant, or of all; memory grows with the number of documents and objects."""
    tenant_digest = None if tenant is None else digest([tenant])
    present = {folder: set(keys) for folder, keys in parts.kv.folders(tenant_digest).items()}  # before the heads
    heads = {head.document.digest: head for head in parts.index.documents(tenant)}
    found = Overview(n_documents=len(heads), n_objects=sum(map(len, present.values())))
    unnamed = {folder: set(keys) for folder, keys in present.items()}
    live_points: dict[str, int] = {}
    for page in parts.index.points(tenant):
        found.n_points += len(page)
        for point in page:
            head = heads.get(point.document.digest)
            if head is None or not head.shows(point.version, point.content_digest):
                found.suspects[point.document] = None
                if head is None or point.version > head.version:
                    found.ahead.add(point.id)
                continue
            live_points[point.document.digest] = live_points.get(point.document.digest, 0) + 1
            folder = (point.document.tenant_digest, point.document.digest)
            there = present.get(folder, set())
            unnamed.get(folder, set()).difference_update(point.names)
            if set(point.ready) != there.intersection(point.names) or not point.ready:
                found.suspects[point.document] = None
    receipts = parts.receipts.all(tenant_digest)
    complete = {(name.document_digest, name.version) for name in receipts if _ours(parts, name) and name.stage is None}
    found.n_receipts = len(complete)
    for head in heads.values():
        if head.live and live_points.get(head.document.digest, 0) != head.n_chunks:
            found.suspects[head.document] = None
        if not head.live and (head.document.digest, head.version) not in complete:
            found.suspects[head.document] = None
    for folder, keys in unnamed.items():
        head = heads.get(folder[1])
        if head is not None and keys:
            found.suspects[head.document] = None
        elif head is None:
            found.headless.append(folder)
    open_: dict[tuple[str, int], ReceiptName] = {}
    for name in receipts:
        deletion = (name.document_digest, name.version)
        if _ours(parts, name) and (name.stage is Stage.FOUND or (name.stage is not None and deletion in complete)):
            open_.setdefault(deletion, name)
    found.open = list(open_.values())
    return found


def examine(parts: Stores, document: DocumentKey) -> Drift:
    """One document, as it is now."""
    present = set(parts.kv.keys(document))  # before the head
    head, named = live_names(parts.index, document)
    points = list(_points(parts, document))
    if head is None:
        return Drift(document, None, 0, 0, (), tuple(points), 0, 0, 0, False)
    ahead = tuple(point for point in points if point.version > head.version)
    if not head.live:
        left = leftovers(parts.index, parts.kv, document, head.version)
        objects = left[Place.OBJECTS] + left[Place.FUSED]
        closed = parts.receipts.get(document, head.version, parts.generation.name) is not None
        return Drift(document, head, left[Place.POINTS], objects, (), ahead, 0, 0, 0, not closed)
    live = [point for point in points if point.version == head.version]
    beyond = tuple(point.id for point in live if point.ordinal >= head.n_chunks)
    # what another writer wrote over is lost; not deleted: it is to be written again, under the same id
    inside = [p for p in live if p.ordinal < head.n_chunks and head.shows(p.version, p.content_digest)]
    below = sum(point.version < head.version for point in points)
    return Drift(
        document=document,
        head=head,
        stale_points=below + len(beyond),
        stale_objects=0 if named is None else len(present - named),
        beyond=beyond,
        ahead=ahead,
        lost=head.n_chunks - len(inside),
        vanished=len({key for point in inside for key in point.ready} - present),
        unmade=sum(not point.ready for point in inside),
        unaccounted=False,
    )


def _points(parts: Stores, document: DocumentKey) -> Iterator[PointName]:
    for indexed in parts.index.chunks(document):
        chunk = indexed.chunk
        fused = indexed.fusion.kv_key if indexed.fusion is not None and indexed.fusion.ready else None
        first_pass = tuple(key for key in indexed.kv_keys if indexed.fusion is None or key != indexed.fusion.kv_key)
        ready = (first_pass if indexed.kv_ready else ()) + ((fused,) if fused is not None else ())
        names, made_from = indexed.kv_keys, indexed.content_digest
        yield PointName(chunk.id, document, chunk.version, chunk.ordinal, names, ready, made_from)


def _ours(parts: Stores, name: ReceiptName) -> bool:
    return name.generation == parts.generation.name
