"""Reconcile: drift found, repaired and reported.

What is found while events are being indexed may be on its way. So the pipelines are waited for first, and what is
still there afterwards is drift. `settled` says whether that moment came: both groups had committed everything there
was, after the first look. An event whose effects are not complete is not committed, so then nothing is on its way but
what was published since.

Without it only what is safe at any time is done, in the order that `sinks.retire` explains. Points above their head,
or without one, belong to an event that is being indexed, or to one that was given up: they are deleted only when
settled and if they were there before that, and put back if their head has moved to them meanwhile. A backfill is not
seen by the groups: run reconcile when none runs.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from ingest import deletion, telemetry
from ingest.connect import ConnectStores, connected
from ingest.drift import Drift, Folder, Overview, examine, overview
from ingest.formats import EventReader
from ingest.parts import Stores
from ingest.retry import store_retry
from ingest.sinks import announce, retire
from schemas.errors import EventError, InputError, StoreError
from schemas.head import CommitRecord, DocumentState, Head
from schemas.ids import DocumentKey
from schemas.settings import Settings
from stores.clock import SystemClock
from stores.dead_letters import in_its_place, placed_headers
from stores.receipts import ReceiptName
from stores.topics import Message, ensure_topics, lag, read_all

GRACE_S = 30.0  # how long the pipelines are waited for
_LOOK_AGAIN_S = 0.5
PIPELINES = ("index", "prefill")


class Kind(StrEnum):
    """What does not agree. The values are metric labels."""

    STALE_POINTS = "stale_points"  # of versions that are not live
    STALE_OBJECTS = "stale_objects"  # that no live point names
    POINTS_AHEAD = "points_ahead"  # of versions that were never committed
    HEADLESS_OBJECTS = "headless_objects"  # of documents that have no head
    LOST_POINTS = "lost_points"  # the live version has too few
    MISSING_KV = "missing_kv"  # live points without their artifact, or not marked
    LEFTOVERS = "leftovers"  # of a tombstone
    OPEN_RECEIPTS = "open_receipts"  # of a deletion


class Action(StrEnum):
    """What was done about it."""

    NONE = "none"  # a dry run, or it is left alone; `detail` says why
    DELETED = "deleted"
    ANNOUNCED = "announced"  # its commit record is published again: PREFILL does the rest
    CLOSED = "closed"  # its receipt
    RESUBMITTED = "resubmitted"  # its event is published again: INDEX does the rest


@dataclass(frozen=True)
class Finding:
    """One kind of drift of one document."""

    kind: Kind
    document: str
    n: int
    action: Action
    detail: str = ""


@dataclass
class Report:
    """What was looked at, and what was found. Without findings everything agrees."""

    settled: bool = False
    documents: int = 0
    points: int = 0
    objects: int = 0
    receipts: int = 0
    findings: list[Finding] = field(default_factory=list)

    def counts(self) -> dict[Kind, int]:
        """How much of each kind."""
        counted: Counter[Kind] = Counter()
        for finding in self.findings:
            counted[finding.kind] += finding.n
        return {kind: counted[kind] for kind in Kind}

    def plain(self) -> dict[str, Any]:
        """The report as JSON."""
        return {**asdict(self), "drift": self.counts()}


Lag = Callable[[str], int]  # pipeline -> offsets that its group has not committed
Events = Callable[[], Iterable[Message]]


def run_reconcile(
    settings: Settings, *, tenant: str | None = None, dry_run: bool = False, grace_s: float = GRACE_S
) -> Report:
    """Compare heads, points, objects and receipts of a generation, and repair what does not agree.

    Args:
        tenant: only this one's.
        dry_run: repair nothing, publish nothing.
        grace_s: how long the pipelines are waited for, where there is anything.

    Raises:
        StoreError: an outside system kept failing. Run it again: what is done is done.
        InputError: the index holds no document at all and the object store does: they do not belong together.
    """
    kafka = settings.kafka
    topics = {"index": kafka.documents_topic, "prefill": kafka.commits_topic}
    connect = ConnectStores(settings)
    store_retry(lambda: ensure_topics(kafka), "setting up topics", settings.ingest, SystemClock())
    with connected(connect), closing(EventReader(settings.events)) as reader:
        parts = connect()
        groups = parts.settings.kafka  # of this generation
        return Reconciler(
            parts,
            lag=lambda pipeline: lag(kafka, groups.group_of(pipeline), topics[pipeline]),
            events=lambda: read_all(kafka, kafka.documents_topic),
            read=reader,
        ).run(tenant, dry_run=dry_run, grace_s=grace_s)


class Reconciler:
    """One run over the stores of `parts`.

    Args:
        lag: what a pipeline's group has not committed.
        events: the documents topic from its beginning.
        read: reads an event; as the pipelines do.
    """

    def __init__(self, parts: Stores, *, lag: Lag, events: Events, read: EventReader) -> None:
        self._parts, self._lag, self._events, self._read = parts, lag, events, read
        self._report = Report()
        self._dry = False

    def run(self, tenant: str | None = None, *, dry_run: bool = False, grace_s: float = GRACE_S) -> Report:
        """Look, wait, look again, repair."""
        self._report, self._dry = Report(), dry_run
        found = self._parts.retry(lambda: overview(self._parts, tenant), "comparing the stores")
        report = self._report
        report.documents, report.points = found.n_documents, found.n_points
        report.objects, report.receipts = found.n_objects, found.n_receipts
        if found.headless and not found.n_documents:
            raise InputError(
                f"the index knows no document{f' of tenant {tenant!r}' if tenant else ''} and the object store holds "
                f"KV of {len(found.headless)}: is this the index that belongs to it? If it is, delete the folder "
                f"kv/{self._parts.generation.name} by hand"
            )
        if not (found.suspects or found.headless or found.open):
            report.settled = True
            return report
        report.settled = self._settle(grace_s)
        self._repair(found)
        for kind, count in report.counts().items():
            telemetry.DRIFT.labels(kind).inc(count)
        return report

    def _settle(self, grace_s: float) -> bool:
        """Wait until both groups have committed all there is, or until the time is over."""
        clock = self._parts.clock
        end_ms = clock.now_ms() + grace_s * 1000
        while True:
            try:  # prefill after index: what index did meanwhile is in its topic by then
                if all(self._lag(pipeline) == 0 for pipeline in PIPELINES):
                    return True
            except StoreError:
                if clock.now_ms() >= end_ms:
                    raise
            if clock.now_ms() >= end_ms:
                return False
            clock.sleep(_LOOK_AGAIN_S)

    def _repair(self, found: Overview) -> None:
        lost: list[Drift] = []
        for document in found.suspects:
            drift = self._parts.retry(partial(examine, self._parts, document), "comparing a document")
            if not drift.any:
                continue
            if drift.ahead:
                self._ahead(drift, found.ahead)
            if drift.head is None:
                continue
            if drift.head.live:
                self._live(drift, drift.head)
                lost += [drift] if drift.lost else []
            else:
                self._tombstone(drift, drift.head)
        for folder in found.headless:
            self._headless(folder)
        for name in found.open:
            self._open_receipt(name)
        if lost:
            self._resubmit(lost)

    def _live(self, drift: Drift, head: Head) -> None:
        document = drift.document
        if drift.stale_points or drift.stale_objects:
            action = self._do(Action.DELETED, lambda: self._retire(drift))
            self._add(Kind.STALE_POINTS, document, drift.stale_points, action)
            self._add(Kind.STALE_OBJECTS, document, drift.stale_objects, action)
        missing = drift.vanished + (drift.unmade if self._report.settled else 0)
        if missing:
            detail = (
                "the artifact is gone" if drift.vanished else "prefill has passed and it is not there or not marked"
            )
            self._add(
                Kind.MISSING_KV, document, missing, self._do(Action.ANNOUNCED, lambda: self._announce(head)), detail
            )

    def _tombstone(self, drift: Drift, head: Head) -> None:
        left = drift.stale_points + drift.stale_objects
        settled = self._report.settled
        if not (left or settled):
            if drift.unaccounted:
                why = "prefill may not have passed it yet"
                self._add(Kind.OPEN_RECEIPTS, drift.document, 1, Action.NONE, why)
            return
        if not (left or drift.unaccounted):
            return

        def erase() -> None:
            deletion.erase(self._parts, head)
            if settled:  # so PREFILL has passed the tombstone
                deletion.confirm(self._parts, CommitRecord.of(head))
            else:
                self._announce(head)

        action = self._do(Action.CLOSED if settled else Action.ANNOUNCED, erase)
        self._add(Kind.LEFTOVERS, drift.document, left, action)
        if drift.unaccounted:
            self._add(Kind.OPEN_RECEIPTS, drift.document, 1, action, f"version {head.version}")

    def _ahead(self, drift: Drift, before: Set[uuid.UUID]) -> None:
        """Delete those points that were there `before` the pipelines were waited for: others are being indexed now."""
        ids = [point.id for point in drift.ahead if point.id in before]
        if not self._report.settled or not ids:
            why = "an event may be being indexed; it goes when it is known that none is"
            self._add(Kind.POINTS_AHEAD, drift.document, len(drift.ahead), Action.NONE, why)
            return
        action = self._do(Action.DELETED, lambda: self._delete_ahead(drift.document, ids))
        self._add(Kind.POINTS_AHEAD, drift.document, len(ids), action)

    def _delete_ahead(self, document: DocumentKey, ids: Sequence[uuid.UUID]) -> None:
        parts, deleted = self._parts, set(ids)
        points = parts.retry(lambda: parts.index.chunks(document, vectors=True), "reading points")
        parts.retry(lambda: parts.index.delete(ids), "deleting points")
        head = parts.retry(lambda: parts.index.heads([document]), "reading a head").get(document)
        back = [p for p in points if head is not None and p.chunk.id in deleted and p.chunk.version == head.version]
        if back:  # committed in between: an event that came twice
            parts.retry(lambda: parts.index.upsert(back), "putting points back")

    def _headless(self, folder: Folder) -> None:
        parts = self._parts
        keys = parts.retry(lambda: parts.kv.folders(folder[0]), "listing KV artifacts").get(folder, [])
        makers = (parts.retry(partial(parts.kv.maker, *folder, key), "reading an artifact") for key in keys)
        document = next((maker for maker in makers if maker is not None), None)
        if document is not None and parts.retry(lambda: parts.index.heads([document]), "reading a head"):
            return  # it came since
        if keys:
            name = str(document) if document is not None else "/".join(folder)
            action = self._do(
                Action.DELETED, lambda: parts.retry(lambda: parts.kv.delete_folder(*folder), "deleting KV artifacts")
            )
            self._add(Kind.HEADLESS_OBJECTS, name, len(keys), action)

    def _open_receipt(self, name: ReceiptName) -> None:
        """A deletion that was never closed, of a document that came back or was deleted again."""
        parts = self._parts
        part = parts.retry(lambda: parts.receipts.part(name), "reading a receipt's part")
        if part is None:
            return  # it was closed since
        done = parts.retry(
            lambda: parts.receipts.get(part.document, part.version, part.generation), "reading a receipt"
        )
        if done is not None:
            remove = lambda: parts.retry(lambda: parts.receipts.complete(done), "writing a receipt")  # noqa: E731
            why = f"version {part.version}: parts beside the complete one"
            self._add(Kind.OPEN_RECEIPTS, part.document, 1, self._do(Action.CLOSED, remove), why)
            return
        head = parts.retry(lambda: parts.index.heads([part.document]), "reading a head").get(part.document)
        if head is None or head.version <= part.version:
            return  # that of the head itself: done with its document
        if not self._report.settled:
            self._add(Kind.OPEN_RECEIPTS, part.document, 1, Action.NONE, "prefill may not have passed it yet")
            return
        record = CommitRecord(
            tenant=part.tenant,
            doc_id=part.doc_id,
            version=part.version,
            state=DocumentState.DELETED,
            generation=part.generation,
            event_ms=part.asked_ms,
            committed_ms=part.at_ms,
        )

        def close() -> None:
            deletion.count_again(parts, record)
            deletion.confirm(parts, record)

        self._add(Kind.OPEN_RECEIPTS, part.document, 1, self._do(Action.CLOSED, close), f"version {part.version}")

    def _resubmit(self, lost: list[Drift]) -> None:
        """Publish the events of versions whose points were lost once more, in their place: INDEX makes them again."""
        wanted = {drift.document: drift.head.version for drift in lost if drift.head is not None}
        sent: dict[DocumentKey, Action] = {}
        for message, document in self._messages_of(wanted):
            sent[document] = self._do(Action.RESUBMITTED, partial(self._publish, message))
        for drift in lost:
            gone = "its event is no longer in the topic: publish the document again"
            why = "" if drift.document in sent else gone
            self._add(Kind.LOST_POINTS, drift.document, drift.lost, sent.get(drift.document, Action.NONE), why)

    def _messages_of(self, wanted: dict[DocumentKey, int]) -> Iterator[tuple[Message, DocumentKey]]:
        left = dict(wanted)
        for message in self._events():
            if not left:
                return
            try:
                event = self._read.parse(in_its_place(message))
            except (EventError, StoreError):
                continue
            if left.get(event.document) == event.version:
                del left[event.document]
                yield message, event.document

    def _publish(self, message: Message) -> None:
        topic = self._parts.settings.kafka.documents_topic
        headers = placed_headers(message)
        self._parts.retry(
            lambda: self._parts.publisher.publish(topic, message.key, message.value, headers), "publishing an event"
        )

    def _retire(self, drift: Drift) -> None:
        if drift.beyond:
            self._parts.retry(lambda: self._parts.index.delete(drift.beyond), "deleting points")
        retire(self._parts, drift.document)

    def _announce(self, head: Head) -> None:
        announce(self._parts, [head])

    def _do(self, action: Action, act: Callable[[], object]) -> Action:
        if self._dry:
            return Action.NONE
        act()
        return action

    def _add(self, kind: Kind, document: object, n: int, action: Action, detail: str = "") -> None:
        if n:
            self._report.findings.append(Finding(kind, str(document), n, action, detail))
