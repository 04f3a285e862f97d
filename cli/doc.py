"""`kvquilt doc`: documents through the HTTP service: state, deletion, receipt."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cli.context import Context
from cli.service import Service, document_path
from cli.waiting import POLL_S
from schemas.errors import InputError, KvquiltError, RequestError
from schemas.ids import writable


def status(context: Context, doc_id: str) -> None:
    """Print version, state, chunks and KV of a document."""
    with Service.of(context.settings) as service:
        found = service.status(doc_id)
    if found is None:
        raise InputError(f"no document {doc_id!r}; ids are shown by `kvquilt publish` and in citations")
    times = {name: _time(found[name]) for name in _TIMES}
    lines = [
        f"{doc_id}  version {found['version']}  {found['state']}",
        f"  chunks {found['chunks']}, of them {found['kv_ready']} with KV; generation {found['generation']}",
        f"  changed {times['event_ms']}, committed {times['committed_ms']}",
    ]
    context.result(found, "\n".join(lines))


def delete(context: Context, doc_id: str) -> None:
    """Publish the deletion of a document; it is not answered from as soon as `doc status` says deleted."""
    with Service.of(context.settings) as service:
        accepted = service.delete(document_path(doc_id))
    where = f"{accepted['topic']}, partition {accepted['partition']}, offset {accepted['offset']}"
    context.result(accepted, f"deletion of {doc_id} published: {where}")


def delete_many(context: Context, filters: Sequence[str], confirm: str | None) -> None:
    """Publish the deletion of every document that has all of `filters` in its metadata, or of a whole tenant.

    Args:
        filters: `key=value` each; empty for the whole tenant.
        confirm: the tenant's name, where it is the whole tenant.
    """
    wanted = {"filter": dict(map(_pair, filters))} if filters else {"all": True, "confirm": confirm}
    deletions: list[dict[str, Any]] = []
    after = None
    with context.progress() as progress, Service.of(context.settings) as service:
        task = progress.add_task("deletions published", total=None)
        while True:
            page = service.post("/v1/documents/delete", {**wanted, "after": after})
            deletions += page["deletions"]
            progress.update(task, completed=len(deletions))
            after = page["next"]
            if after is None:
                break
        progress.update(task, total=len(deletions))
    lines = [f"{len(deletions)} deletions published; `kvquilt doc receipt ID` shows what becomes of each"]
    lines += [f"  {one['doc_id']}" for one in deletions]
    context.result({"deletions": deletions}, "\n".join(lines))


def receipt(context: Context, doc_id: str, version: int | None, wait_s: float | None) -> None:
    """Print the receipt of a deletion; with `wait_s`, wait so long at most until it is complete.

    Raises:
        KvquiltError: it is still pending after `wait_s`.
    """
    query = "" if version is None else f"?version={version}"
    deadline = time.monotonic() + (wait_s or 0)
    with Service.of(context.settings) as service:
        while True:
            try:
                got = service.get(f"{document_path(doc_id)}/receipt{query}")
            except RequestError as error:  # published, and not committed yet
                if error.status != _NOT_FOUND or wait_s is None or time.monotonic() > deadline:
                    raise
                got = None
            if wait_s is None or (got is not None and got["state"] == "COMPLETE") or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
    assert got is not None
    context.result(got, _receipt_lines(got))
    if wait_s is not None and got["state"] != "COMPLETE":
        raise KvquiltError(f"not complete after {wait_s:g} s: {'; '.join(got['missing'])}")


def _receipt_lines(got: Mapping[str, Any]) -> str:
    lines = [f"{got['doc_id']}  deletion at version {got['version']}  {got['state']}"]
    for name, what in (("asked_ms", "asked"), ("invisible_ms", "invisible by"), ("complete_ms", "complete")):
        lines.append(f"  {what:<13} {_time(got[name]) if got[name] is not None else 'not yet'}")
    lines += [
        f"  {count['place']:<13} {count['found']} found, {count['deleted']} deleted, {count['left']} left"
        for count in got["counts"]
    ]
    lines += [
        f"  memory/{tier['tier']:<6} {tier['dropped']} dropped; {tier['passed']} of {tier['replicas']} replicas passed"
        for tier in got.get("tiers", ())
    ]
    lines += [f"  missing: {what}" for what in got["missing"]]
    return "\n".join(lines)


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InputError(f"--filter {text}: expected key=value, such as team=blue, or year=2024 for a number")
    try:
        plain = json.loads(value)
    except ValueError:
        return key, value
    try:
        writable(plain)
    except ValueError as error:
        raise InputError(f"--filter {text} {error}") from error
    return key, plain if isinstance(plain, str | bool | int | float) else value


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(" ", "milliseconds")


_TIMES = ("event_ms", "committed_ms")
_NOT_FOUND = 404
