"""Debezium envelopes: rows to documents, and the tombstone behind a deletion."""

import base64
import json

import pytest

from schemas.ids import is_packed, packed_version
from schemas.settings import DebeziumSettings, FieldSettings
from tests.ingest.formats_cases import PLACEHOLDER, change
from tests.ingest.formats_world import NOW_MS, PDFS, message
from tests.ingest.world import document

ROW = {"id": 7, "content": "a text", "title": "T", "price": 1.5}
KEY = b'{"id": 7}'
WRAPPED_KEY = json.dumps({"schema": {"type": "struct"}, "payload": {"id": 7}}).encode()


def wrapped(payload):
    return {"schema": {"type": "struct", "name": "Envelope"}, "payload": payload}


@pytest.mark.parametrize("op", ["c", "u", "r"])
@pytest.mark.parametrize("wrap", [False, True])
def test_a_row_is_a_document_and_its_lsn_is_its_version(formats, op, wrap):
    sent = change(op, None, ROW, {"lsn": 4711, "ts_ms": NOW_MS}, WRAPPED_KEY if wrap else KEY)
    if wrap:
        sent = message(wrapped(json.loads(sent.value)), WRAPPED_KEY)
    event = formats.reader().read(sent)
    assert (event.doc_id, event.version, event.content, event.title) == ("7", 4711, "a text", "T")
    assert event.tenant == "default"
    assert event.metadata == {}, "other columns are nobody's business"


def test_columns_are_named_in_the_settings(formats):
    names = FieldSettings(
        id="nr",
        content="body",
        title="subject",
        uri="link",
        tenant="org",
        content_type="mime",
        metadata=("tags", "price"),
    )
    row = {
        "nr": 9,
        "x": 0,
        "body": "<h1>a</h1>",
        "subject": "S",
        "link": "https://x.test/9",
        "org": "acme",
        "mime": "text/html",
        "tags": {"a": 1},
        "price": 1.5,
    }
    event = formats.reader(fields=names).read(change("c", None, row, key=b'{"nr": 9, "part": 1}'))
    assert (event.document, event.content, event.title) == (document("9", "acme"), "# a", "S")
    assert (event.uri, event.metadata) == ("https://x.test/9", {"a": 1, "price": 1.5})


def test_a_key_of_several_columns_needs_a_name(formats):
    with pytest.raises(Exception, match=r"has 2 fields; name the one that is the document id in events\.fields\.id"):
        formats.reader().read(change(after=ROW, key=b'{"id": 7, "part": 1}'))


def test_a_plain_key_is_the_document_id(formats):
    assert formats.reader().read(change(after=ROW, key=b"seven")).doc_id == "seven"


def test_a_deletion_carries_the_lsn(formats):
    event = formats.reader().read(change("d", {"id": 7, "content": None}, None, {"lsn": 4712, "ts_ms": NOW_MS}, KEY))
    assert (event.deletes, event.doc_id, event.version, event.undated) == (True, "7", 4712, False)


def test_a_deletion_whose_row_tells_no_tenant_is_refused(formats):
    """Bug: it deleted a document of the tenant `default`, and the one that was meant stayed."""
    with pytest.raises(Exception, match="field 'tenant' must name the tenant"):
        formats.reader().read(change("d", {"id": 7, "tenant": None}, None, key=KEY))
    event = formats.reader(fields=FieldSettings(id="id")).read(
        change("d", {"id": 7, "tenant": None}, None, key=b'{"id": 7, "tenant": "acme"}')
    )
    assert event.document == document("7", "acme")


def test_databases_without_lsn_are_ordered_by_their_time(formats):
    source = {"ts_ms": 1_600_000_000_000, "file": "binlog.1", "pos": 5}
    for reader in (formats.reader(), formats.reader(debezium=DebeziumSettings(version="ts_ms"))):
        assert reader.read(change(after=ROW, source=source, key=KEY)).version == packed_version(1_600_000_000_000, 7)
    by_place = formats.reader(debezium=DebeziumSettings(version=""))
    assert by_place.read(change(after=ROW, key=KEY)).version == packed_version(NOW_MS, 7)


def test_a_large_column_that_an_update_left_alone_is_taken_from_before(formats):
    """Bug: the placeholder that Debezium writes for it was indexed as the document."""
    event = formats.reader().read(change("u", ROW, {**ROW, "content": PLACEHOLDER, "title": "U"}, key=KEY))
    assert (event.content, event.title) == ("a text", "U")
    event = formats.reader().read(change("u", None, {**ROW, "other": PLACEHOLDER}, key=KEY))
    assert event.content == "a text", "a column that is not ours may be missing"


def test_a_pdf_column_is_base64_as_connect_writes_bytes(formats):
    row = {"id": 7, "content": base64.b64encode(PDFS["two pages"]).decode(), "content_type": "application/pdf"}
    assert formats.reader().read(change(after=row, key=KEY)).content.startswith("Annual leave")


def test_a_tombstone_of_a_connector_is_an_undated_deletion(formats):
    for key in (KEY, WRAPPED_KEY):
        event = formats.reader().read(message(None, key))
        assert (event.deletes, event.undated, event.doc_id) == (True, True, "7")
    dated = formats.reader().read(message(None, KEY, {"kvquilt.version": "9"}))
    assert (dated.undated, dated.version) == (False, 9)


def row(world, text, lsn, op="u"):
    after = None if text is None else {"id": 7, "content": text}
    body = {"op": op, "before": {"id": 7}, "after": after, "source": {"lsn": lsn, "ts_ms": world.clock.now_ms()}}
    return world.raw(json.dumps(body).encode(), KEY)


def test_create_delete_tombstone_and_create_again(world):
    """Bug: a tombstone ordered by its timestamp is newer than every LSN, and the row never comes back."""
    row(world, "first", 10, "c")
    row(world, None, 20, "d")
    world.raw(None, KEY)
    row(world, "second", 30, "c")
    for _ in range(2):
        world.index(repeat=True)
        world.prefill(repeat=True)
        assert world.texts("7") == "second"
        assert not is_packed(world.qdrant.heads([document("7")])[document("7")].version)
    world.assert_clean()
    assert world.dead_letters() == []


def test_a_tombstone_deletes_where_compaction_took_the_deletion_away(world):
    """Bug: the deletion was compacted away before it was read, and the document stayed."""
    row(world, "first", 10, "c")
    world.index()
    world.prefill()
    world.clock.sleep(1)
    world.raw(None, KEY)
    world.index()
    head = world.qdrant.heads([document("7")])[document("7")]
    assert (head.live, head.version) == (False, 11)
    assert world.kv.keys(document("7")) == []
    world.clock.sleep(1)
    row(world, "late and older", 10)
    row(world, "again", 30, "c")
    world.index()
    assert world.texts("7") == "again"
    for _ in range(2):  # the tombstone once more, as after a crash
        world.index(repeat=True)
        assert world.texts("7") == "again"


def test_a_tombstone_that_was_interrupted_is_finished_by_reading_it_again(world):
    row(world, "first", 10, "c")
    world.index()
    world.prefill()
    world.clock.sleep(1)
    world.raw(None, KEY)
    (work,) = world.index()
    kept = world.qdrant.heads([document("7")])
    (again,) = [w for w in world.index(repeat=True) if w.message.value is None]
    assert work.outcome.value == "committed"
    assert again.outcome.value == "repeated", "retire and publish are done once more"
    assert world.qdrant.heads([document("7")]) == kept
