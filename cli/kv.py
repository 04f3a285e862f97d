"""`kvquilt kv`: KV artifacts in the object store."""

from __future__ import annotations

from typing import Any

from cli.context import Context
from engine import resolve_generation
from schemas.errors import ArtifactMiss, InputError
from schemas.ids import DocumentKey
from stores import KvStore, open_blobs


def inspect(context: Context, doc_id: str, *, tenant: str, ordinal: int | None) -> None:
    """Print the header of every KV artifact of a document, or of one chunk.

    Raises:
        InputError: there is none in the generation of the settings.
    """
    settings = context.settings
    generation = resolve_generation(settings).generation
    store = KvStore(open_blobs(settings.blobs_url, settings.blobs.options), generation.name)
    document = DocumentKey(tenant, doc_id)
    found = sorted((_look(store, document, key) for key in store.keys(document)), key=lambda row: row["ordinal"])
    rows = [row for row in found if ordinal is None or row["ordinal"] == ordinal]
    if not rows:
        which = f" of chunk {ordinal}" if ordinal is not None else ""
        raise InputError(f"no KV artifact{which} of document {doc_id!r} in generation {generation.name}")
    lines = [f"{document}  generation {generation.name}, {len(rows)} artifacts, {store.nbytes(document):,} bytes"]
    for row in rows:
        if "unreadable" in row:
            lines.append(f"  {row['key'][:16]}  unreadable ({row['unreadable']}): {row['why']}")
        else:
            lines.append(
                f"  {row['key'][:16]}  chunk {row['ordinal']} of version {row['version']}, {row['model']}, "
                f"{row['dtype']}, payload {row['payload_sha256'][:16]}"
            )
    context.result({"document": str(document), "generation": generation.name, "artifacts": rows}, "\n".join(lines))


def _look(store: KvStore, document: DocumentKey, key: str) -> dict[str, Any]:
    try:
        header = store.inspect(document, key)
    except ArtifactMiss as miss:
        return {"key": key, "ordinal": -1, "unreadable": miss.reason, "why": str(miss)}
    plain = header.model_dump(mode="json", exclude={"fingerprint"})
    model = header.fingerprint
    return {"key": key, **plain, "model": model.model, "dtype": model.dtype, "fingerprint": model.digest}
