"""Change events: what is accepted, what is refused, and that the refusal says what was wrong."""

import json

import pytest

from schemas.errors import EventError
from schemas.events import (
    MAX_CONTENT_BYTES,
    TENANT_HEADER,
    VERSION_HEADER,
    ChangeEvent,
    EventBody,
    parse_event,
    read_body,
)
from schemas.ids import packed_version

KEY = b"handbook/leave.md"


def parse(value, key=KEY, headers=(), timestamp_ms=1_700_000_000_000, offset=7) -> ChangeEvent:
    return parse_event(key, value, timestamp_ms=timestamp_ms, offset=offset, headers=headers)


def body(**fields) -> bytes:
    return json.dumps({"content": "Leave is 30 days.", **fields}).encode()


def test_an_event_carries_everything_that_the_producer_wrote():
    event = parse(body(tenant="acme", version=3, content_type="markdown", title="Leave", uri="u", metadata={"a": 1}))
    assert (event.tenant, event.doc_id, event.version) == ("acme", "handbook/leave.md", 3)
    assert (event.content_type.value, event.title, event.uri, event.metadata) == ("markdown", "Leave", "u", {"a": 1})
    assert not event.deletes


def test_what_the_producer_leaves_out_comes_from_the_message():
    """Bug: an event without a version got the time of arrival, so a replay made a new version."""
    event = parse(body())
    assert event.tenant == "default"
    assert event.version == packed_version(1_700_000_000_000, 7)
    assert event.event_ms == 1_700_000_000_000


def test_a_null_value_deletes_and_its_headers_name_version_and_tenant():
    event = parse(None, headers=[(VERSION_HEADER, b"12"), (TENANT_HEADER, "büro".encode())])
    assert event.deletes
    assert (event.version, event.tenant, event.content) == (12, "büro", None)


def test_a_version_in_the_body_wins_over_the_header():
    assert parse(body(version=5), headers=[(VERSION_HEADER, b"4")]).version == 5


def test_ing_11_headers_are_bytes_and_an_unknown_or_empty_one_is_ignored():
    """Bug (beam#28200): metadata rows with headers could not be read."""
    assert (
        parse(body(), headers=[("traceparent", b"\xff"), (VERSION_HEADER, None), (VERSION_HEADER, b"9")]).version == 9
    )


BAD_VALUES = {
    "malformed JSON": (b'{"content": "x"', "the value is not JSON"),
    "empty bytes": (b"", "the value is not JSON"),
    "a JSON array": (b"[1]", "must be a JSON object or null (got a JSON list)"),
    "a JSON string": (b'"text"', "must be a JSON object or null (got a JSON str)"),
    "nested too deep": (b"[" * 200_000, "the value is not JSON"),
    "a missing key": (b'{"title": "x"}', "content: Field required"),
    "a wrong type": (b'{"content": 5}', "content: Input should be a valid string (got 5)"),
    "a wrong type, quietly convertible": (
        b'{"content": "x", "version": "3"}',
        "version: Input should be a valid integer",
    ),
    "a boolean version": (b'{"content": "x", "version": true}', "version: Input should be a valid integer"),
    "a negative version": (b'{"content": "x", "version": -1}', "version: Input should be greater than or equal to 0"),
    "a version beyond int64": (
        b'{"content": "x", "version": 9223372036854775808}',
        "version: Input should be less than",
    ),
    "an unknown field": (b'{"content": "x", "contents": "y"}', "contents: Extra inputs are not permitted (got 'y')"),
    "a future schema version": (b'{"schema_version": 2, "content": "x"}', "schema_version 2 is newer than 1"),
    "an unknown content type": (
        b'{"content": "x", "content_type": "docx"}',
        "content_type: Input should be 'text', 'markdown', 'html' or",
    ),
    "an empty document": (b'{"content": ""}', "the document is empty; to delete it, send a null value"),
    "a document of white space": (b'{"content": " \\n\\t "}', "the document is empty"),
    "a NUL character": (b'{"content": "a\\u0000b"}', "NUL character"),
    "half of a surrogate pair": (b'{"content": "ab\\ud800"}', "half of a surrogate pair at character 2"),
    "invalid UTF-8": (b'{"content": "caf\xe9"}', "the value is not UTF-8: invalid continuation byte at byte"),
    "NaN": (b'{"content": "x", "metadata": {"a": NaN}}', "NaN is not a JSON number"),
    "another document's id": (
        b'{"content": "x", "doc_id": "other"}',
        "the message key says 'handbook/leave.md' and doc_id says",
    ),
    "an empty tenant": (b'{"content": "x", "tenant": ""}', "tenant: String should have at least 1 character"),
}


@pytest.mark.parametrize(("value", "said"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_bad_input_is_refused_with_a_sentence_that_names_the_fault(value, said):
    with pytest.raises(EventError) as refused:
        parse(value)
    assert said in str(refused.value)
    assert refused.value.stage == "parse"
    assert len(str(refused.value)) < 400, "the message must fit in a header and in a line of a log"


def test_a_document_of_20_mb_is_refused_before_it_is_decoded():
    """Bug: the JSON of an oversized document was parsed, and its memory taken, before the size was looked at."""
    with pytest.raises(EventError, match=f"at most {MAX_CONTENT_BYTES:,} are accepted"):
        parse(b"\xff" * 20_000_000)


@pytest.mark.parametrize(
    ("key", "said"),
    [(None, "the message has no key"), (b"", "the message has no key"), (b"caf\xe9", "the message key is not UTF-8")],
)
def test_a_message_without_a_usable_key_is_refused(key, said):
    with pytest.raises(EventError, match=said):
        parse(body(), key=key)


@pytest.mark.parametrize("raw", [b"", b"-1", b"1.5", b"nine", b"9223372036854775808", b"\xff"])
def test_a_version_header_that_is_no_int64_is_refused(raw):
    with pytest.raises(EventError, match="must be decimal digits below 2\\^63"):
        parse(body(), headers=[(VERSION_HEADER, raw)])


def test_a_key_of_two_kilobytes_is_refused_also_for_a_delete():
    with pytest.raises(EventError, match="doc_id: String should have at most 512 characters"):
        parse(None, key=b"k" * 2000)


def test_the_body_that_we_write_is_the_body_that_we_read():
    written = EventBody(content="Büro 🏠", title="T", version=2, metadata={"n": [1, None]})
    event = parse(written.to_bytes())
    assert (event.content, event.title, event.version, event.metadata) == ("Büro 🏠", "T", 2, {"n": [1, None]})


def test_equal_content_has_an_equal_digest_whatever_the_time_of_the_event():
    """Bug: a redelivered event of the same version counted as a conflict."""
    first, second = parse(body(version=1)), parse(body(version=1), timestamp_ms=1_800_000_000_000, offset=9)
    assert first.content_digest == second.content_digest
    assert parse(body(version=1, title="other")).content_digest != first.content_digest


def test_a_reference_is_no_deletion_and_its_digest_stands_for_its_content():
    """Bug: an event without inline content looked like a tombstone."""
    event = parse(b'{"uri": "s3://b/k", "content_type": "pdf", "sha256": "' + b"AB" * 32 + b'"}')
    assert not event.deletes
    assert (event.content, event.uri, event.source_sha256) == (None, "s3://b/k", "ab" * 32)
    resolved = event.model_copy(update={"content": "what one extractor made of it"})
    assert resolved.content_digest == event.content_digest


@pytest.mark.parametrize("value", [float("nan"), float("inf"), ["\ud800"]], ids=repr)
def test_metadata_that_json_cannot_say_is_refused_instead_of_becoming_null(value):
    """Bug: `kvquilt publish` took NaN from a file of JSON lines and published null."""
    with pytest.raises(EventError, match=r"metadata: .*cannot be written as JSON"):
        read_body({"content": "x", "metadata": {"a": value}})


def test_metadata_that_is_taken_can_be_published_however_deep():
    """The limit is that of what it is published in, not its own."""
    taken = 0
    for depth in range(200, 300):
        value = json.loads("[" * depth + "]" * depth)
        try:
            body = read_body({"content": "x", "metadata": {"a": value}})
        except EventError:
            break
        taken = depth
        assert parse(body.to_bytes()).metadata == {"a": value}
    assert taken > 240
