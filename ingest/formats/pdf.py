"""PDF to text, with pypdf: page after page, an empty line between them."""

from __future__ import annotations

import logging
from io import BytesIO

from schemas.errors import EventError
from schemas.events import MAX_CONTENT_BYTES

MAX_PAGES = 5000


def pdf_text(source: bytes) -> str:
    """The text of all pages.

    Raises:
        EventError: it is no PDF, encrypted, damaged, or holds no text (a scan).
    """
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of every oddity in every file
    if b"%PDF-" not in source[:1024]:
        raise EventError("the content is no PDF: it does not begin with %PDF-")
    try:
        reader = pypdf.PdfReader(BytesIO(source), strict=False)
        encrypted = reader.is_encrypted
        n_pages = 0 if encrypted else len(reader.pages)
    except Exception as error:  # pypdf raises what its parts raise on damaged files: KeyError, RecursionError, …
        raise _damaged(error) from error
    if encrypted:
        raise EventError("the PDF is encrypted; send it without a password")
    if not 0 < n_pages <= MAX_PAGES:
        raise EventError(f"the PDF has {n_pages:,} pages; from 1 to {MAX_PAGES:,} are accepted")
    pages: list[str] = []
    n_characters = 0
    try:
        for page in reader.pages:
            text = page.extract_text().strip()
            n_characters += len(text)
            if n_characters > MAX_CONTENT_BYTES:
                raise EventError(
                    f"the PDF holds more than {MAX_CONTENT_BYTES:,} characters of text. Split the document"
                )
            if text:
                pages.append(text)
    except EventError:
        raise
    except Exception as error:
        raise _damaged(error) from error
    if not pages:
        raise EventError(f"the PDF has no text, only images (pages: {n_pages}); run OCR over it first")
    return "\n\n".join(pages)


def _damaged(error: Exception) -> EventError:
    told = " ".join(str(error).split())[:200]
    return EventError(f"the PDF cannot be read: {type(error).__name__}{f': {told}' if told else ''}")
