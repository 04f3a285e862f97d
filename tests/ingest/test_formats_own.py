"""Our own JSON through the reader: as before, and with HTML, PDF and references."""

import base64

import pytest

from schemas.errors import EventError
from schemas.events import VERSION_HEADER, ContentType, EventBody, message_key, parse_event
from schemas.ids import DocumentKey, is_packed, packed_version
from tests.ingest.formats_world import NOW_MS, PDFS, framed, message, sha256


@pytest.mark.parametrize(
    ("value", "headers"),
    [
        (b'{"content": "a text", "title": "T", "version": 3, "metadata": {"a": [1, null]}}', {}),
        (b'{"content": "# H", "content_type": "markdown", "uri": "u", "tenant": "acme"}', {VERSION_HEADER: "9"}),
        (None, {VERSION_HEADER: "9", "kvquilt.tenant": "acme"}),
        (None, {}),
    ],
)
def test_our_own_json_reads_as_it_always_did(formats, value, headers):
    sent = message(value, b"handbook/leave.md", headers)
    read = formats.reader().read(sent)
    assert read == parse_event(sent.key, value, timestamp_ms=NOW_MS, offset=7, headers=sent.headers)


def test_a_plain_event_has_the_digest_that_it_had_in_earlier_releases(formats):
    """Bug: a new field in the digest would make every stored version a conflict."""
    event = formats.reader().read(message({"content": "a text"}))
    assert event.content_digest == "746985690f6cabdf2ac81efe946c96dbd7eeafaf829c22005bd372bb3c2ada09"


@pytest.mark.parametrize("doc_id", ["handbook/leave.md", '{"id": 7}', "{"])
@pytest.mark.parametrize("tenant", ["default", "acme"])
def test_a_document_key_comes_back_from_the_message_key(formats, tenant, doc_id):
    """Two tenants with one id must not share a key: compaction would keep the event of one of them."""
    document = DocumentKey(tenant, doc_id)
    key = message_key(document)
    assert key != message_key(DocumentKey("other", doc_id))
    changed = formats.reader().read(message({"content": "x", "tenant": tenant}, key))
    headers = {} if tenant != "default" or doc_id.startswith("{") else {"kvquilt.tenant": tenant}
    deleted = formats.reader().read(message(None, key, headers))
    assert changed.document == deleted.document == document
    assert is_packed(deleted.version), "ordered among events, not undated like a connector's tombstone"


def test_a_key_and_an_event_of_two_tenants_are_refused(formats):
    key = message_key(DocumentKey("acme", "d"))
    for value, headers in (({"content": "x", "tenant": "other"}, {}), (None, {"kvquilt.tenant": "other"})):
        with pytest.raises(EventError, match="the message key says tenant 'acme' and the event says 'other'"):
            formats.reader().read(message(value, key, headers))


def test_the_key_of_a_plain_event_is_its_document_whatever_it_looks_like(formats):
    for key in ("7", "[1]", "{not json", "a{}", '"x"', "büro/ä"):
        assert formats.reader().read(message({"content": "x"}, key.encode())).doc_id == key
        assert formats.reader().read(message(None, key.encode())).doc_id == key


def test_a_change_and_a_tombstone_of_a_record_key_name_one_document(formats):
    """Bug: a deletion that names its document otherwise than its changes did deletes nothing."""
    reader = formats.reader()
    key = b'{"id": "leave"}'
    assert reader.read(message({"content": "x"}, key)).document == reader.read(message(None, key)).document


def test_html_becomes_markdown_and_a_title(formats):
    page = "<html><head><title>Leave</title></head><body><h1>Annual</h1><p>30 days</p></body></html>"
    event = formats.reader().read(message({"content": page, "content_type": "html"}))
    assert (event.content, event.content_type, event.title) == ("# Annual\n\n30 days", ContentType.MARKDOWN, "Leave")
    assert event.source_sha256 == sha256(page.encode())
    assert event.version == packed_version(NOW_MS, 7)


def test_a_pdf_in_base64_becomes_text(formats):
    body = EventBody(content=base64.b64encode(PDFS["two pages"]).decode(), content_type=ContentType.PDF, title="Leave")
    event = formats.reader().read(message(body.to_bytes()))
    assert event.content.startswith("Annual leave\nEverybody has 10 days of it every year, café and all.")
    assert "\n\nSick leave\nEverybody has 20 days" in event.content
    assert (event.content_type, event.title, event.source_sha256) == (
        ContentType.TEXT,
        "Leave",
        sha256(PDFS["two pages"]),
    )


def test_content_by_reference_is_fetched(formats):
    reference = formats.put("/leave.md", "# Büro".encode())
    event = formats.reader().read(message({**reference, "content_type": "markdown", "version": 2, "content": None}))
    assert (event.content, event.content_type, event.version, event.uri) == ("# Büro", "markdown", 2, reference["uri"])


def test_what_a_reference_says_is_the_same_content_by_its_digest_alone(formats):
    """Bug: a release of an extractor that spaces words otherwise would make a repeated event a conflict."""
    reader, reference = formats.reader(), formats.put("/leave.html", b"<p>leave</p>")
    first = reader.read(message({**reference, "content_type": "html", "version": 2}))
    assert first.content_digest == first.model_copy(update={"content": "leave, otherwise"}).content_digest
    other = reader.read(message({**formats.put("/leave.html", b"<p>no</p>"), "content_type": "html", "version": 2}))
    assert other.content_digest != first.content_digest


def test_without_settings_nothing_is_fetched_and_no_registry_is_asked(formats):
    from ingest.formats import EventReader

    reader = EventReader()
    with pytest.raises(EventError, match=r"events\.fetch\.allow does not list its place"):
        reader.read(message(formats.put("/a", b"x")))
    with pytest.raises(EventError, match=r"events\.registry\.url is not set"):
        reader.read(message(framed(1, b"x")))
    assert is_packed(reader.read(message(None, framed(1, b"x"))).version), "a key like that is plain text then"
