"""What an event refers to or wraps, as text: references are fetched, HTML becomes markdown, PDF becomes text.

Character ranges of chunks and citations count in this text.
"""

from __future__ import annotations

import base64
import hashlib

from ingest.formats.fetch import Fetcher
from ingest.formats.html import html_document
from ingest.formats.pdf import pdf_text
from schemas.errors import EventError
from schemas.events import MAX_CONTENT_BYTES, ChangeEvent, ContentType


def resolve(event: ChangeEvent, fetcher: Fetcher) -> ChangeEvent:
    """The event with its content as text or markdown; one that has it already, or deletes, as it is.

    Raises:
        EventError: the source is not allowed, too large, not what its digest says, or holds no text.
        FetchError: the source cannot be had now.
    """
    if event.deletes or (
        event.source_sha256 is None and event.content_type in (ContentType.TEXT, ContentType.MARKDOWN)
    ):
        return event
    source = _source(event, fetcher)
    digest = event.source_sha256 or hashlib.sha256(source).hexdigest()
    changes: dict[str, object] = {"source_sha256": digest}
    if event.content_type is ContentType.PDF:
        changes |= {"content": pdf_text(source), "content_type": ContentType.TEXT}
    elif event.content_type is ContentType.HTML:
        title, text = html_document(source)
        changes |= {"content": text, "content_type": ContentType.MARKDOWN, "title": event.title or title}
    else:
        changes["content"] = _decoded(source)
    return _checked(event.model_copy(update=changes), event)


def _source(event: ChangeEvent, fetcher: Fetcher) -> bytes:
    if event.content is None:
        assert event.uri is not None  # `ReferenceBody` has one
        assert event.source_sha256 is not None
        return fetcher.fetch(event.uri, event.source_sha256)
    if event.content_type is not ContentType.PDF:
        return event.content.encode()
    return base64.b64decode(event.content)  # `EventBody` made sure that it is


def _decoded(source: bytes) -> str:
    try:
        return source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EventError(f"what `uri` refers to is not UTF-8: {error.reason} at byte {error.start}") from error


def _checked(event: ChangeEvent, sent: ChangeEvent) -> ChangeEvent:
    text = (event.content or "").replace("\x00", "")
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # halves of pairs, from broken fonts
    if not text.strip():
        raise EventError(f"there is no text in the {sent.content_type.value}")
    if (n_bytes := len(text.encode())) > MAX_CONTENT_BYTES:
        raise EventError(
            f"the {sent.content_type.value} holds {n_bytes:,} bytes of text; at most {MAX_CONTENT_BYTES:,} are "
            "accepted. Split the document"
        )
    return event if text == event.content else event.model_copy(update={"content": text})
