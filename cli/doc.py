"""`kvquilt doc`: one document through the HTTP service."""

from __future__ import annotations

from datetime import UTC, datetime

from cli.context import Context
from cli.service import Service, document_path
from schemas.errors import InputError


def status(context: Context, doc_id: str) -> None:
    """Print version, state, chunks and KV of a document."""
    with Service.of(context.settings) as service:
        found = service.status(doc_id)
    if found is None:
        raise InputError(f"no document {doc_id!r}; ids are shown by `kvquilt publish` and in citations")
    times = {name: datetime.fromtimestamp(found[name] / 1000, UTC).isoformat(" ", "milliseconds") for name in _TIMES}
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


_TIMES = ("event_ms", "committed_ms")
