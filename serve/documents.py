"""Documents over HTTP. Changes go to the documents topic, the one way in; their state is read from the index."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Executor

from pydantic import ValidationError

from schemas.api import Accepted, DeletedMany, DeleteMany, DocumentBody, DocumentStatus
from schemas.errors import EventError, RequestError
from schemas.events import (
    MAX_CONTENT_BYTES,
    TENANT_HEADER,
    VERSION_HEADER,
    EventBody,
    describe,
    message_key,
    parse_event,
)
from schemas.ids import DocumentKey, is_packed
from schemas.receipt import Receipt
from schemas.settings import KafkaSettings
from serve import threads
from serve.parts import Parts
from serve.receipts import receipt_of

_REMEMBERED = 10_000  # documents whose last version given out is kept
_TURNS = 64  # locks that documents share
_Headers = tuple[tuple[str, bytes | None], ...]


class Documents:
    """Publishes changes and reads their state.

    A change without a version gets one only where the document already has its producer's own numbers: the highest
    seen plus one. Otherwise the broker's timestamp and offset become its version.
    """

    def __init__(self, parts: Parts, kafka: KafkaSettings, *, reads: Executor, writes: Executor) -> None:
        self._parts, self._topic, self._reads, self._writes = parts, kafka.documents_topic, reads, writes
        # one change of a document at a time, from the choice of its version to the broker's answer
        self._turns = [threading.Lock() for _ in range(_TURNS)]
        self._given: OrderedDict[DocumentKey, int] = OrderedDict()
        self._giving = threading.Lock()

    async def status(self, document: DocumentKey) -> DocumentStatus:
        """What the head says, and how many of its chunks have KV.

        Raises:
            RequestError: 404; the document has no head, for this tenant.
        """
        return await threads.call(self._reads, self._status, document)

    async def put(self, document: DocumentKey, body: DocumentBody) -> Accepted:
        """Publish a new version.

        Raises:
            RequestError: the event would be a dead letter.
            TopicError: the broker did not take it.
        """
        return await threads.call(self._writes, self._put, document, body)

    async def delete(self, document: DocumentKey, version: int | None) -> Accepted:
        """Publish a tombstone, whether or not the document is known yet: its event may still be on its way."""
        return await threads.call(self._writes, self._delete, document, version)

    async def delete_many(self, tenant: str, body: DeleteMany) -> DeletedMany:
        """Publish a tombstone for each live document that the body names.

        Raises:
            RequestError: it names none, or all without a confirmation.
            TopicError: the broker did not take one; those before it are published: ask again.
        """
        return await threads.call(self._writes, self._delete_many, tenant, body)

    async def receipt(self, document: DocumentKey, version: int | None) -> Receipt:
        """The receipt of a deletion, of the newest one if no version is named; what is not complete is counted now.

        Raises:
            RequestError: 404; no deletion of the document is known, for this tenant.
        """
        return await threads.call(self._reads, self._receipt, document, version)

    def _status(self, document: DocumentKey) -> DocumentStatus:
        head = self._parts.index.heads([document]).get(document)
        if head is None:
            raise RequestError(
                f"no document {document.doc_id!r}; a change that was just published may not be committed yet",
                status=404,
                code="document_not_found",
                param="doc_id",
            )
        chunks = self._parts.index.live_chunks(head) if head.live else []
        shown = head.model_dump(exclude={"tenant", "content_digest", "n_chunks", "changes_ms"})
        n_chunks = head.n_chunks if head.live else 0
        return DocumentStatus(**shown, chunks=n_chunks, kv_ready=sum(chunk.kv_ready for chunk in chunks))

    def _put(self, document: DocumentKey, body: DocumentBody) -> Accepted:
        with self._turn(document):
            version = self._version(document, body.version)
            try:
                event = EventBody(tenant=document.tenant, **body.model_dump(exclude={"version"}), version=version)
                value = event.to_bytes()
            except ValidationError as error:
                raise RequestError(describe(error), code="invalid_document") from error
            except (
                ValueError,
                RecursionError,
            ) as error:  # what JSON let in and JSON cannot write: half surrogate pairs
                raise RequestError(
                    f"the document cannot be written as JSON: {error}", code="invalid_document"
                ) from error
            if len(value) > MAX_CONTENT_BYTES:
                raise RequestError(
                    f"the document has {len(value):,} bytes; at most {MAX_CONTENT_BYTES:,} are accepted. Split it",
                    status=413,
                    code="document_too_large",
                    param="content",
                )
            return self._publish(document, value, (), version)

    def _delete(self, document: DocumentKey, version: int | None) -> Accepted:
        with self._turn(document):
            version = self._version(document, version)
            headers: _Headers = ((TENANT_HEADER, document.tenant.encode()),)
            if version is not None:
                headers += ((VERSION_HEADER, str(version).encode()),)
            return self._publish(document, None, headers, version)

    def _delete_many(self, tenant: str, body: DeleteMany) -> DeletedMany:
        if bool(body.filter) == body.all:
            raise RequestError(
                "name the documents by `filter`, or all of them by `all`: exactly one of the two",
                code="nothing_named",
                param="filter",
            )
        if body.all and body.confirm != tenant:
            raise RequestError(
                f"`all` deletes every document of tenant {tenant!r}; to confirm, send that name as `confirm`",
                code="not_confirmed",
                param="confirm",
            )
        heads, following = self._parts.index.documents_page(tenant, body.filter, after=body.after, limit=body.limit)
        deletions = [self._delete(head.document, None) for head in heads if head.live]
        return DeletedMany(deletions=deletions, next=following)

    def _receipt(self, document: DocumentKey, version: int | None) -> Receipt:
        receipt = receipt_of(self._parts, document, version)
        if receipt is None:
            which = "" if version is None else f" at version {version}"
            raise RequestError(
                f"no deletion of document {document.doc_id!r}{which} is known; one that was just published may not be "
                "committed yet",
                status=404,
                code="receipt_not_found",
                param="doc_id",
            )
        return receipt

    def _version(self, document: DocumentKey, asked: int | None) -> int | None:
        if asked is not None:
            return asked
        head = self._parts.index.heads([document]).get(document)
        if head is not None and is_packed(head.version):
            return None
        own = [] if head is None else [head.version]
        with self._giving:
            given = self._given.get(document)
        if given is not None:  # published, and perhaps not committed yet
            own.append(given)
        return max(own) + 1 if own else None

    def _remember(self, document: DocumentKey, version: int) -> None:
        with self._giving:
            self._given[document] = max(version, self._given.pop(document, version))
            if len(self._given) > _REMEMBERED:
                self._given.popitem(last=False)

    def _turn(self, document: DocumentKey) -> threading.Lock:
        return self._turns[int(document.digest[:8], 16) % _TURNS]

    def _publish(self, document: DocumentKey, value: bytes | None, headers: _Headers, version: int | None) -> Accepted:
        try:  # with the parser of the pipeline: what is accepted here is no dead letter there
            parse_event(document.doc_id.encode(), value, timestamp_ms=0, offset=0, headers=headers)
        except EventError as error:
            raise RequestError(str(error), code="invalid_document") from error
        message = self._parts.publisher.publish(self._topic, message_key(document), value, headers)
        if version is not None and not is_packed(version):
            self._remember(document, version)
        return Accepted(
            doc_id=document.doc_id,
            topic=message.topic,
            partition=message.partition,
            offset=message.offset,
            version=version,
        )
