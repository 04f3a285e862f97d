"""Whatever is on the topic: a change event or an `EventError`, never another exception."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import EventError
from schemas.events import MAX_CONTENT_BYTES, ChangeEvent, ContentType
from schemas.ids import canonical_bytes
from schemas.settings import CloudEventSettings, FieldSettings
from tests.ingest.formats_cases import CE, PLACEHOLDER, STRUCTURED
from tests.ingest.formats_world import PDFS, framed, golden, message

fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NAMES = ["content", "content_type", "title", "uri", "sha256", "tenant", "version", "metadata", "doc_id",
         "schema_version",
         "op", "before", "after", "source", "lsn", "ts_ms", "payload", "schema", "specversion", "id", "type", "data",
         "data_base64", "datacontenttype", "time", "sequence", "dataref", "partitionkey"]  # fmt: skip
WORDS = ["", "a text", "html", "pdf", "text/plain", "application/json", "1.0", "u", "d", "7", "\ud800", "\x00",
         PLACEHOLDER, "https://elsewhere.example/a", "file:///etc/passwd", "0" * 64, "aGk="]  # fmt: skip
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=8)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=20,
)
objects = st.dictionaries(st.sampled_from(NAMES), values, max_size=10)
texts = st.sampled_from(WORDS) | st.text(max_size=8)
rows = st.fixed_dictionaries(  # near enough to a document that most of them are read
    {"content": st.just("a text") | texts},
    optional={
        "title": texts,
        "uri": texts,
        "tenant": texts | st.none(),
        "version": st.integers(0, 100) | st.integers(0, 1 << 64) | st.text("0123456789", max_size=20),
        "content_type": st.sampled_from(["text", "text", "markdown", "html", "pdf"]),
        "metadata": st.dictionaries(texts, values, max_size=3),
    },
)
sources = st.fixed_dictionaries({"lsn": st.integers(0, 1 << 64)}, optional={"ts_ms": st.integers(0, 1 << 50)})
keys = (
    st.none()
    | st.binary(max_size=12)
    | st.sampled_from(
        [
            b"d",
            b'{"id": 7}',
            b'{"a": 1, "b": 2}',
            b'{"id": null}',
            b'{"doc_id": "\\ud800", "tenant": "t"}',
            b'{"doc_id": "d", "tenant": "\\ud800"}',
            b"\x00\x00\x00\x00\x01ab",
        ]
    )
)
header_names = st.sampled_from(
    [*CE, "content-type", "ce_sequence", "ce_tenant", "kvquilt.version", "kvquilt.tenant", "ce_time"]
)
headers = st.lists(
    st.tuples(
        header_names,
        st.none()
        | st.binary(max_size=6)
        | st.sampled_from([b"1.0", b"7", b"text/html", b"application/pdf", b"application/cloudevents+json"]),
    ),
    max_size=6,
)


@pytest.fixture(scope="module")
def reader(formats):
    return formats.reader(
        fields=FieldSettings(metadata=("metadata", "data")), cloudevents=CloudEventSettings(deleting_types=("gone",))
    )


def read(reader, sent):
    """What the reader makes of a message; fails where it is neither of the two, or cannot be stored."""
    try:
        event = reader.read(sent)
    except EventError as error:
        check_letter(str(error))
        return
    assert isinstance(event, ChangeEvent)
    assert event.content_type in (ContentType.TEXT, ContentType.MARKDOWN)
    assert 0 <= event.version < 1 << 63
    if not event.deletes:
        assert event.content.strip()
        assert len(event.content.encode()) <= MAX_CONTENT_BYTES
    assert len(event.content_digest) == 64
    canonical_bytes([event.tenant, event.doc_id, event.title, event.uri, event.metadata])
    event.model_dump_json()


def check_letter(text):
    """It has to fit in a header of a dead letter."""
    assert 0 < len(text.encode()) < 2000


@fuzz
@given(value=st.none() | st.binary(max_size=200), key=keys, headers=headers)
def test_random_bytes(reader, value, key, headers):
    read(reader, message(value, key, headers))


@fuzz
@given(body=values, key=keys, headers=headers)
def test_random_json(reader, body, key, headers):
    read(reader, message(json.dumps(body).encode(), key, headers))


@settings(fuzz, max_examples=400)
@given(body=rows | objects, key=st.just(b"d") | keys)
def test_random_fields_of_our_own_json(reader, body, key):
    read(reader, message(body, key))


@fuzz
@given(attributes=st.just({}) | objects, headers=headers, data=rows | values)
def test_random_cloudevents(reader, attributes, headers, data):
    read(reader, message({**STRUCTURED, "data": data, **attributes}, b"d", headers))
    read(reader, message(json.dumps(data).encode(), b"d", [*CE.items(), *headers]))


@fuzz
@given(
    body=objects,
    before=st.none() | values,
    after=rows | objects,
    source=sources | objects,
    key=st.just(b'{"id": 7}') | keys,
    op=st.sampled_from("curdtm"),
)
def test_random_debezium_envelopes(reader, body, before, after, source, key, op):
    envelope = {**body, "op": op, "before": before, "after": after, "source": source}
    read(reader, message(envelope, key))
    read(reader, message({"schema": None, "payload": envelope}, key))


@fuzz
@given(kind=st.sampled_from(["avro", "json", "protobuf", "protobuf nested"]), data=st.data())
def test_framed_values_that_are_cut_or_changed(reader, kind, data):
    value = bytearray(golden(kind))
    for _ in range(data.draw(st.integers(0, 3))):
        value[data.draw(st.integers(5, len(value) - 1))] = data.draw(st.integers(0, 255))
    read(reader, message(bytes(value[: data.draw(st.integers(0, len(value)))]), b"d"))


@fuzz
@given(schema_id=st.integers(0, 5), payload=st.binary(max_size=60))
def test_framed_random_bytes(reader, schema_id, payload):
    read(reader, message(framed(schema_id, payload), b"d"))


@fuzz
@given(row=rows)
def test_framed_random_json(reader, row):
    read(reader, message(framed(2, json.dumps(row).encode()), b"d"))


@fuzz
@given(data=st.data())
def test_valid_messages_that_are_cut(reader, data):
    whole = json.dumps(
        {"op": "u", "before": None, "after": {"id": 7, "content": "a text"}, "source": {"lsn": 5, "ts_ms": 1}}
        if data.draw(st.booleans())
        else {**STRUCTURED, "data": {"content": "a text"}}
    ).encode()
    read(reader, message(whole[: data.draw(st.integers(0, len(whole)))], b'{"id": 7}'))


tags = st.sampled_from(["<p>", "</p>", "<h2>", "<li>", "<ul>", "</ul>", "<table>", "<tr>", "<td>", "</table>", "<pre>",
                        "</pre>", "<div hidden>", "<br>", "<!--", "-->", "<script>", "<", "&", "text ", "# ", "\x00",
                        "<title>", "</title>", "<dialog>", "<svg>", "<template>", "</body>", "</html>"])  # fmt: skip


@fuzz
@given(parts=st.lists(tags | st.text(max_size=5), max_size=40))
def test_random_html(reader, parts):
    read(reader, message({"content": "".join(parts), "content_type": "html"}))


@settings(fuzz, max_examples=60)
@given(data=st.data())
def test_pdfs_that_are_changed(reader, data):
    value = bytearray(PDFS[data.draw(st.sampled_from(sorted(PDFS)))])
    for _ in range(data.draw(st.integers(1, 5))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    read(reader, message(bytes(value), headers={**CE, "content-type": "application/pdf"}))
