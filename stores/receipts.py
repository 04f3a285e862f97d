"""Deletion receipts in the object store: `receipts/<tenant digest>/<document digest>/<version>.<generation>….json`.

Parts and the complete receipt are objects that are written once (`schemas.receipt` says which). When the complete one
is there its parts are removed, so that one object per deletion stays. A document's receipts outlive its content and
every generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from schemas.errors import BlobError, InputError
from schemas.ids import DocumentKey
from schemas.receipt import Receipt, ReceiptPart, ReceiptState, Stage
from stores.blobs import Blobs

T = TypeVar("T")

ROOT = "receipts"
SUFFIX = ".json"


class ReceiptName(NamedTuple):
    """One stored object: of which document (by digests), version and generation; `stage` None is the complete one."""

    tenant_digest: str
    document_digest: str
    version: int
    generation: str
    stage: Stage | None

    @property
    def path(self) -> str:
        """Its key in the object store."""
        stage = f".{self.stage}" if self.stage is not None else ""
        folder = f"{ROOT}/{self.tenant_digest}/{self.document_digest}"
        return f"{folder}/{self.version}.{self.generation}{stage}{SUFFIX}"


class Receipts:
    """The receipts in one object store. Safe to use from several threads; every failure is `BlobError`."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def note(self, part: ReceiptPart) -> ReceiptPart:
        """Keep a part, unless one of its stage is there already; returns the one that is kept."""
        path = _name(part.document, part.version, part.generation, part.stage).path
        if self._blobs.put_new(path, part.to_bytes()):
            return part
        stored = self._blobs.get(path)
        return part if stored is None else _readable(path, ReceiptPart.from_bytes, stored)

    def parts(self, document: DocumentKey, version: int, generation: str) -> dict[Stage, ReceiptPart]:
        """The parts that are kept of a deletion that is not complete."""
        found = {}
        for stage in Stage:
            path = _name(document, version, generation, stage).path
            data = self._blobs.get(path)
            if data is not None:
                found[stage] = _readable(path, ReceiptPart.from_bytes, data)
        return found

    def complete(self, receipt: Receipt) -> Receipt:
        """Keep a complete receipt and remove its parts; returns the one that is kept: the first.

        Raises:
            ValueError: it is not complete.
        """
        if receipt.state is not ReceiptState.COMPLETE:
            raise ValueError(f"the receipt of {receipt.document} version {receipt.version} is not complete")
        name = _name(receipt.document, receipt.version, receipt.generation, None)
        self._blobs.put_new(name.path, receipt.to_bytes())
        self._blobs.delete(name._replace(stage=stage).path for stage in Stage)
        return self.get(receipt.document, receipt.version, receipt.generation) or receipt

    def get(self, document: DocumentKey, version: int, generation: str) -> Receipt | None:
        """The complete receipt; None where the deletion is not complete, or never was."""
        path = _name(document, version, generation, None).path
        data = self._blobs.get(path)
        return None if data is None else _readable(path, Receipt.from_bytes, data)

    def of(self, document: DocumentKey) -> list[ReceiptName]:
        """What is kept of a document, complete receipts and parts, by version."""
        return sorted(self._list(f"{ROOT}/{document.tenant_digest}/{document.digest}"), key=lambda name: name.version)

    def all(self, tenant_digest: str | None = None) -> list[ReceiptName]:
        """What is kept of every document, or of one tenant's."""
        return list(self._list(ROOT if tenant_digest is None else f"{ROOT}/{tenant_digest}"))

    def part(self, name: ReceiptName) -> ReceiptPart | None:
        """The part of that name."""
        data = self._blobs.get(name.path)
        return None if data is None else _readable(name.path, ReceiptPart.from_bytes, data)

    def _list(self, folder: str) -> Iterator[ReceiptName]:
        for path, _ in self._blobs.list(folder):
            name = _parsed(path)
            if name is not None:
                yield name


def _name(document: DocumentKey, version: int, generation: str, stage: Stage | None) -> ReceiptName:
    return ReceiptName(document.tenant_digest, document.digest, version, generation, stage)


def _parsed(path: str) -> ReceiptName | None:
    """What a key stands for; None for what is not ours."""
    segments = path.split("/")
    if len(segments) != 4 or not path.endswith(SUFFIX):
        return None
    version, _, rest = segments[3].removesuffix(SUFFIX).partition(".")
    generation, _, stage = rest.partition(".")
    if not version.isdecimal() or not generation or stage not in ("", *Stage):
        return None
    return ReceiptName(segments[1], segments[2], int(version), generation, Stage(stage) if stage else None)


def _readable(path: str, read: Callable[[bytes], T], data: bytes) -> T:
    try:
        return read(data)
    except InputError as error:
        raise BlobError(
            f"{path}: {error}; it was damaged from outside: remove it and run `kvquilt reconcile`"
        ) from error
