"""CloudEvents over Kafka: both modes, with JSON, documents and references as data."""

import base64
import json

import pytest

from schemas.ids import packed_version
from schemas.settings import CloudEventSettings
from tests.ingest.formats_cases import CE, STRUCTURED, binary, structured
from tests.ingest.formats_world import NOW_MS, PDFS, message


def test_a_binary_event_carries_json_with_our_names(formats):
    data = {"content": "a text", "title": "T", "metadata": {"team": "people"}, "colour": "blue"}
    headers = {"content-type": "application/json; charset=utf-8", "ce_sequence": "12", "ce_tenant": "acme"}
    event = formats.reader().read(binary(json.dumps(data).encode(), headers, key=b"leave"))
    assert (event.tenant, event.doc_id, event.version) == ("acme", "leave", 12)
    assert (event.content, event.title, event.metadata) == ("a text", "T", {"team": "people"})


def test_an_optional_attribute_whose_header_has_no_value_is_not_there(formats):
    nothing = {"ce_time": None, "ce_partitionkey": None, "ce_dataref": None, "content-type": None}
    event = formats.reader().read(binary(b'{"content": "a text"}', nothing))
    assert (event.content, event.event_ms) == ("a text", NOW_MS)


def test_a_structured_event_carries_the_same(formats):
    event = formats.reader().read(
        structured(sequence="12", tenant="acme", data={"content": "a text"}, time="2025-01-02T03:04:05.678Z")
    )
    assert (event.tenant, event.doc_id, event.version, event.content) == ("acme", "d", 12, "a text")
    assert event.event_ms == 1_735_787_045_678, "freshness counts from when the change happened"


def test_a_structured_event_is_known_without_its_header(formats):
    """Producers behind a REST proxy cannot set headers."""
    assert formats.reader().read(message({**STRUCTURED, "data": {"content": "x"}})).content == "x"


def test_ing_11_headers_and_offset_come_through_to_the_event(formats):
    """Bug (beam#28200): headers and timestamps of messages were lost on their way through the pipeline."""
    event = formats.reader().read(
        binary(b"caf\xe9", {"content-type": "text/plain; charset=iso-8859-1", "ce_tenant": "büro"}, offset=4711)
    )
    assert (event.content, event.tenant, event.version) == ("café", "büro", packed_version(NOW_MS, 4711))


@pytest.mark.parametrize(
    ("content_type", "data", "text", "kind"),
    [
        ("text/plain", "a text", "a text", "text"),
        ("text/markdown; charset=UTF-8", "# a", "# a", "markdown"),
        ("TEXT/HTML", "<h2>a</h2>", "## a", "markdown"),
    ],
)
def test_the_data_may_be_the_document_itself(formats, content_type, data, text, kind):
    for sent in (
        binary(data.encode(), {"content-type": content_type}),
        structured(datacontenttype=content_type, data=data),
        structured(datacontenttype=content_type, data_base64=base64.b64encode(data.encode()).decode()),
    ):
        event = formats.reader().read(sent)
        assert (event.content, event.content_type.value) == (text, kind)


def test_a_pdf_is_bytes_in_binary_mode_and_base64_in_structured_mode(formats):
    content = PDFS["two pages"]
    for sent in (
        binary(content, {"content-type": "application/pdf"}),
        structured(datacontenttype="application/pdf", data_base64=base64.b64encode(content).decode()),
    ):
        assert formats.reader().read(sent).content.startswith("Annual leave")


def test_data_may_lie_elsewhere(formats):
    reference = formats.put("/leave.html", b"<p>leave</p>")
    sent = structured(dataref=reference["uri"], sha256=reference["sha256"], datacontenttype="text/html")
    event = formats.reader().read(sent)
    assert (event.content, event.uri) == ("leave", reference["uri"])


def test_the_partition_key_is_the_key_of_the_message(formats):
    assert formats.reader().read(structured(partitionkey="d", data={"content": "x"})).doc_id == "d"


def test_a_null_value_deletes_in_the_order_of_its_sequence(formats):
    event = formats.reader().read(binary(None, {"ce_sequence": "13", "ce_tenant": "acme"}))
    assert (event.deletes, event.version, event.tenant) == (True, 13, "acme")


def test_a_null_value_without_attributes_deletes_as_everywhere(formats):
    assert formats.reader().read(message(None)).deletes


def test_types_that_are_named_delete(formats):
    reader = formats.reader(cloudevents=CloudEventSettings(deleting_types=("gone",)))
    assert reader.read(structured(type="gone", sequence="5")).deletes
    assert not reader.read(structured(type="changed", data={"content": "x"})).deletes


def test_header_names_in_title_case_are_the_same(formats):
    headers = {**CE, "Content-Type": "text/plain"}
    assert formats.reader().read(message(b"{}", headers=headers)).content == "{}"
