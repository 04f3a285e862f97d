"""Values framed with a schema id, as confluent-kafka's serialisers and fastavro write them."""

import io
from dataclasses import replace

import fastavro
import pytest

from ingest.formats import EventReader
from schemas.errors import EventError, RegistryError
from schemas.settings import EventSettings, FieldSettings, RegistrySettings
from tests.ingest.formats_cases import PLACEHOLDER, avro, avro_document
from tests.ingest.formats_world import CONFLUENT, NOW_MS, RegistryServer, framed, golden, message

TEXT = "# Leave\n\nEverybody has 30 days."


@pytest.fixture
def registry():
    server = RegistryServer()
    yield server
    server.close()


@pytest.fixture
def reader(registry):
    reader = EventReader(EventSettings(registry=RegistrySettings(url=registry.url)))
    yield reader
    reader.close()


def test_avro_as_confluent_writes_it(formats):
    fields = FieldSettings(metadata=("metadata", "changed"))
    event = formats.reader(fields=fields).read(message(golden("avro")))
    assert (event.content, event.content_type.value, event.title, event.version) == (TEXT, "markdown", "Leave", 7)
    assert event.metadata == {"team": "people", "changed": "2025-01-02T00:00:00+00:00"}


def test_json_as_confluent_writes_it(formats):
    event = formats.reader().read(message(golden("json")))
    assert (event.content, event.title, event.version, event.metadata) == (TEXT, "Leave", 7, {"team": "people"})


def test_protobuf_as_confluent_writes_it_with_a_schema_that_refers_to_another(formats):
    fields = FieldSettings(metadata=("owner", "labels", "changed"))
    event = formats.reader(fields=fields).read(message(golden("protobuf")))
    assert (event.content, event.content_type.value, event.title, event.version) == (TEXT, "markdown", "Leave", 7)
    assert event.metadata == {"team": "people", "a": 1, "changed": "2025-01-02T00:00:00Z"}


def test_a_protobuf_message_within_another_is_found_by_its_indexes(formats):
    assert formats.reader().read(message(golden("protobuf nested"))).content == "nested text"


def test_ing_16_a_null_value_on_an_avro_topic_deletes_and_the_registry_is_not_asked(registry, reader):
    """Bug (redpanda-data/connect#3660): a tombstone has no magic byte, and the decoder failed on it."""
    assert reader.read(message(None)).deletes
    assert registry.asked == []


def test_ing_16_also_where_the_key_is_framed(registry, reader):
    key_schema = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}
    key = framed(registry.add(key_schema), avro(key_schema, {"id": 7}))
    event = reader.read(message(None, key))
    assert (event.deletes, event.doc_id) == (True, "7")
    assert reader.read(message(golden("avro"), key)).doc_id == "7"


ROW = {"type": "record", "name": "Value", "fields": [
    {"name": "id", "type": "long"},
    {"name": "content", "type": ["null", "string"], "default": None},
]}  # fmt: skip
ENVELOPE = {"type": "record", "name": "Envelope", "fields": [
    {"name": "before", "type": ["null", ROW], "default": None},
    {"name": "after", "type": ["null", "Value"], "default": None},
    {"name": "source", "type": {"type": "record", "name": "Source", "fields": [
        {"name": "lsn", "type": ["null", "long"]}, {"name": "ts_ms", "type": "long"}]}},
    {"name": "op", "type": "string"},
]}  # fmt: skip


def test_debezium_in_avro(registry, reader):
    number = registry.add(ENVELOPE)

    def sent(op, before, after, lsn):
        record = {"before": before, "after": after, "source": {"lsn": lsn, "ts_ms": NOW_MS}, "op": op}
        return reader.read(message(framed(number, avro(ENVELOPE, record)), b'{"id": 7}'))

    changed = sent("u", None, {"id": 7, "content": "a text"}, 5)
    assert (changed.doc_id, changed.version, changed.content) == ("7", 5, "a text")
    assert (sent("d", {"id": 7, "content": None}, None, 6).deletes, sent("d", None, None, 6).version) == (True, 6)
    assert sent("u", {"id": 7, "content": "old"}, {"id": 7, "content": PLACEHOLDER}, 7).content == "old"


def test_an_avro_schema_may_refer_to_others(registry, reader):
    part = {"type": "record", "name": "Part", "namespace": "a", "fields": [{"name": "team", "type": "string"}]}
    registry.subjects["part/1"] = registry.add(part)
    whole = {"type": "record", "name": "Doc", "namespace": "a", "fields": [
        {"name": "content", "type": "string"}, {"name": "metadata", "type": "a.Part"}]}  # fmt: skip
    number = registry.add(whole, references=[{"name": "a.Part", "subject": "part", "version": 1}])
    named = {}
    fastavro.parse_schema(part, named)
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(whole, named), {"content": "x", "metadata": {"team": "t"}})
    assert reader.read(message(framed(number, stream.getvalue()))).metadata == {"team": "t"}


def test_a_schema_is_asked_for_once(registry, reader):
    for _ in range(3):
        reader.read(message(golden("avro")))
    assert registry.asked == ["/schemas/ids/1"]


def test_a_registry_that_cannot_be_reached_is_no_fault_of_the_event(registry, reader):
    """Bug: an outage of the registry drained a whole topic into the dead letters."""
    registry.close()
    with pytest.raises(RegistryError, match="cannot be reached"):
        reader.read(message(golden("avro")))


def test_errors_show_no_password_of_the_registry():
    url = "http://svc:hunter2@127.0.0.1:9"
    reader = EventReader(EventSettings(registry=RegistrySettings(url=url)))
    with pytest.raises(RegistryError, match=r"registry http://127\.0\.0\.1:9 cannot be reached") as caught:
        reader.read(message(golden("avro")))
    assert "hunter2" not in str(caught.value)
    reader.close()


@pytest.mark.parametrize("status", [500, 503, 404, 403, 200])
def test_a_registry_that_answers_something_else_is_no_fault_of_the_event(registry, reader, status):
    registry.status = status
    if status == 200:
        registry.schemas[1]["schema"] = 7
    with pytest.raises(RegistryError, match=f"answered {status} when asked for schema 1"):
        reader.read(message(golden("avro")))
    registry.status = 200
    registry.schemas[1]["schema"] = CONFLUENT["schemas"]["1"]["schema"]
    assert reader.read(message(golden("avro"))).content == TEXT


def test_a_registry_that_has_protobuf_only_as_source_text_stops_the_pipeline_and_says_why(registry, reader):
    registry.schemas[4]["schema"] = 'syntax = "proto3"; message Document {}'
    with pytest.raises(RegistryError, match=r"does not hand over Protobuf schemas as descriptors"):
        reader.read(message(golden("protobuf")))


def test_the_registry_is_told_who_asks(registry):
    registry.token = "Bearer s3cr3t"
    for settings in (RegistrySettings(url=registry.url), RegistrySettings(url=registry.url, token="wrong")):
        with pytest.raises(RegistryError, match="answered 401"):
            EventReader(EventSettings(registry=settings)).read(message(golden("avro")))
    good = EventReader(EventSettings(registry=RegistrySettings(url=registry.url, token="s3cr3t")))
    assert good.read(message(golden("avro"))).content == TEXT
    registry.token = "Basic dXNlcjpwYXNz"
    basic = EventReader(EventSettings(registry=RegistrySettings(url=registry.url, username="user", password="pass")))
    assert basic.read(message(golden("avro"))).content == TEXT


def test_an_unknown_id_is_a_fault_of_the_event_and_not_remembered(registry, reader):
    with pytest.raises(EventError, match="does not know schema"):
        reader.read(message(framed(max(registry.schemas) + 1, avro(ROW, {"id": 1, "content": "x"}))))
    number = registry.add(ROW)
    assert reader.read(message(framed(number, avro(ROW, {"id": 1, "content": "x"})))).content == "x"


def test_an_outage_is_tried_again_and_the_event_is_indexed(world, registry):
    """An infrastructure fault: retried in place, and if it lasts the pipeline stops with the event unread."""
    reader = EventReader(EventSettings(registry=RegistrySettings(url=registry.url)))
    parts = replace(world.index_parts, events=reader)
    world.raw(golden("avro"))
    registry.status = 503
    with pytest.raises(RegistryError, match="reading an event failed 3 times, giving up"):
        world.index(parts)
    assert world.dead_letters() == []
    registry.status = 200
    world.index(parts)
    assert world.texts() == TEXT
    reader.close()


def test_records_of_a_plain_table_are_documents(formats):
    event = formats.reader().read(message(avro_document(formats, content="a text", price=3)))
    assert (event.content, event.metadata) == ("a text", {})
