"""One run: a schedule carried out, everything drained, the audit; then what reconcile is for, and the audit again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from qdrant_client import models

from bench.chaos import audit
from bench.chaos.audit import Fault, Kind
from bench.chaos.questions import Asking
from bench.chaos.rig import PROCESSES, Rig
from bench.chaos.schedule import Action, GoWrong, Kill, Pause, Publish, RestartBroker, schedule
from bench.chaos.truth import Truth
from ingest.formats import EventReader
from ingest.reconcile import Reconciler
from schemas.errors import StoreError
from schemas.events import VERSION_HEADER, EventBody, message_key
from schemas.ids import DocumentKey
from stores.topics import read_all


@dataclass
class Result:
    """What a run gave."""

    seed: int
    faults: list[Fault] = field(default_factory=list)
    questions: int = 0
    cached: int = 0
    refused: int = 0
    events: int = 0
    left_for_reconcile: int = 0
    seconds: float = 0.0


def tenant_of(seed: int) -> str:
    """Each run has a tenant of its own."""
    return f"run-{seed}"


def run(rig: Rig, seed: int, broker_restarts: float) -> Result:
    """Carry the schedule of a seed out, and audit.

    Raises:
        RuntimeError: the pipelines do not get through what was published.
    """
    begin, result, truth = time.monotonic(), Result(seed), Truth()
    tenant, actions = tenant_of(seed), schedule(seed, broker_restarts)
    texts = [action.content for action in actions if isinstance(action, Publish) and action.content] or ["nothing"]
    with Asking(rig.url, tenant, texts, rig.log, truth, seed) as asking:
        for action in actions:
            _act(rig, truth, tenant, action)
            result.events += isinstance(action, Publish)
        rig.drain()  # through whatever faults have not found their call yet
        rig.clear()
        rig.drain()
        asked = asking.answered
        rig.until(lambda: asking.answered > asked + 1, "the service does not answer")
    result.faults += asking.faults
    result.questions, result.cached, result.refused = asking.answered, asking.cached, asking.refused
    found = audit.audit(rig.stores, truth, tenant)
    result.left_for_reconcile = sum(fault.drift for fault in found)
    result.faults += [fault for fault in found if not fault.drift]
    if result.left_for_reconcile:
        reconcile(rig, tenant)
        result.faults += [
            fault for fault in audit.audit(rig.stores, truth, tenant) if fault.kind is not Kind.RECEIPT
        ]  # receipts wait for replicas that were killed: they are judged at the end
    if not result.faults:
        wipe(rig, tenant)
    result.seconds = time.monotonic() - begin
    return result


def reconcile(rig: Rig, tenant: str | None) -> None:
    """Reconcile, and wait for what it announced."""
    Reconciler(
        rig.stores,
        lag=rig.lag,
        events=lambda: read_all(rig.kafka, rig.kafka.documents_topic),
        read=EventReader(),
    ).run(tenant)
    rig.drain()


def open_receipts(rig: Rig, tenants: list[str]) -> list[Fault]:
    """Deletions that are not closed, of runs that were audited; points and objects of those are gone."""
    heads = {head.document: head for tenant in tenants for head in rig.stores.index.documents(tenant)}
    return list(audit.receipts(rig.stores, heads))


def wipe(rig: Rig, tenant: str) -> None:
    """Forget a run that was clean, so that the next is as quick: all but tombstones and receipts."""
    stores, call = rig.stores, rig.qdrant.connection.call
    of_tenant = models.FieldCondition(key="tenant", match=models.MatchValue(value=tenant))
    live = models.FieldCondition(key="state", match=models.MatchValue(value="live"))
    heads = stores.index.collection.replace("_chunks", "_heads")
    for collection, conditions in ((stores.index.collection, [of_tenant]), (heads, [of_tenant, live])):
        selector = models.FilterSelector(filter=models.Filter(must=[*conditions]))
        call("delete", collection_name=collection, points_selector=selector)
    for folder in stores.kv.folders(DocumentKey(tenant, "-").tenant_digest):
        stores.kv.delete_folder(*folder)


def _act(rig: Rig, truth: Truth, tenant: str, action: Action) -> None:
    match action:
        case Publish(doc_id, version, content):
            document = DocumentKey(tenant, doc_id)
            truth.publish(document, version, content)
            _publish(rig, document, version, content)
        case Kill(process):
            assert process in PROCESSES
            rig.kill(process)
        case RestartBroker():
            rig.restart_broker()
        case GoWrong(process, store, fault):
            rig.gates[process, store].add(fault)
        case Pause(seconds):
            time.sleep(seconds)


def _publish(rig: Rig, document: DocumentKey, version: int, content: str | None) -> None:
    """A producer tries until the broker has it: it may have it twice then."""
    key, headers = message_key(document), ((VERSION_HEADER, str(version).encode()),)
    value = None
    if content is not None:
        body = EventBody(content=content, version=version, tenant=document.tenant, doc_id=document.doc_id)
        value = body.to_bytes()
    deadline = time.monotonic() + 60
    while True:
        try:
            rig.publisher.publish(rig.kafka.documents_topic, key, value, headers if value is None else ())
            return
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
