"""Waiting until published changes are servable: first their text, then their KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from schemas.errors import KvquiltError, RequestError

POLL_S = 0.25
LOOKS_PER_ROUND = 16  # documents are done roughly in the order they were published in: no need to ask for all of them


class Statuses(Protocol):
    """Where the state of a document can be read: the HTTP service."""

    def status(self, doc_id: str) -> dict[str, Any] | None:
        """`GET /v1/documents/{id}`; None for a document that was never seen."""
        ...


@dataclass(frozen=True)
class Wanted:
    """A change that was published: the version that the document is to reach."""

    version: int
    deleted: bool = False


@dataclass
class Servable:
    """How far a set of changes is; ids move from one list to the next."""

    text: list[str] = field(default_factory=list)
    kv: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # document -> what its dead letter says
    superseded: dict[str, int] = field(default_factory=dict)  # document -> the newer version that it has


def wait_servable(
    service: Statuses,
    wanted: Mapping[str, Wanted],
    *,
    timeout_s: float,
    report: Callable[[Servable], None] = lambda _: None,
    refusals: Callable[[], Mapping[str, str]] = dict,
    poll_s: float = POLL_S,
) -> Servable:
    """Return when text and KV of every wanted version are servable, or when it was refused or superseded.

    A service that is not ready yet (its model is being loaded) is waited for.

    Args:
        report: told after every round.
        refusals: documents whose event is in the dead-letter topic, with the cause; asked when nothing moves.

    Raises:
        KvquiltError: not everything was servable within `timeout_s`.
    """
    reached = Servable()
    pending = dict(wanted)
    deadline = time.monotonic() + timeout_s
    idle = 0
    while pending:
        before = len(pending), len(reached.text)
        for doc_id in list(pending)[:LOOKS_PER_ROUND]:
            found = _status(service, doc_id)
            if found is None or found["version"] < pending[doc_id].version:
                continue
            if found["version"] > pending[doc_id].version:
                reached.superseded[doc_id] = found["version"]
                del pending[doc_id]
                continue
            if doc_id not in reached.text:
                reached.text.append(doc_id)
            if pending[doc_id].deleted or found["kv_ready"] >= found["chunks"]:
                reached.kv.append(doc_id)
                del pending[doc_id]
        idle = 0 if (len(pending), len(reached.text)) != before else idle + 1
        if idle and idle % 8 == 0:
            for doc_id, cause in refusals().items():
                if pending.pop(doc_id, None):
                    reached.refused[doc_id] = cause
        report(reached)
        if not pending:
            break
        if time.monotonic() > deadline:
            first = next(iter(pending))
            raise KvquiltError(
                f"{len(pending)} of {len(wanted)} documents are not servable after {timeout_s:g} s, {first!r} among "
                "them; is the ingest running? `kvquilt doctor` tells"
            )
        time.sleep(poll_s)
    return reached


def _status(service: Statuses, doc_id: str) -> dict[str, Any] | None:
    try:
        return service.status(doc_id)
    except RequestError as error:
        if error.code == "not_ready":
            return None
        raise
