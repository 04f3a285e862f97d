"""Every format in one topic, through the real graph and a real broker: the bad ones are put aside, the rest served."""

import base64
import json
from dataclasses import replace

import pytest

from stores.topics import ensure_topics, lag, read_all
from tests.ingest.formats_cases import CASES, CE, STRUCTURED, change
from tests.ingest.formats_world import PDFS, golden
from tests.ingest.test_streaming import running, until
from tests.ingest.world import World, document


@pytest.fixture
def mixed(memory_broker, formats):
    """A world whose topics are real and whose reader has a registry and a web server."""
    world = World()
    names = {"documents_topic": "mixed", "commits_topic": "mixed-commits", "group": "mixed", "partitions": 1}
    world.connect(world.kafka.model_copy(update={"bootstrap": memory_broker.bootstrap, **names}))
    world.index_parts = replace(world.index_parts, events=formats.reader())
    ensure_topics(world.kafka)
    yield world
    world.publisher.close()
    world.close()


def test_all_formats_in_one_topic_with_a_bad_event_of_each_between_them(mixed, formats):
    """One bad event that fails its batch, or a format that takes another's messages, takes the topic down."""
    structured = {**STRUCTURED, "sequence": "12", "data": {"content": "structured"}}
    html = formats.put("/page.html", b"<title>Page</title><h1>Page</h1><p>by reference</p>")
    pdf = {"content": base64.b64encode(PDFS["two pages"]).decode(), "content_type": "pdf"}
    good = [
        (b"own", b'{"content": "own"}', {}),
        (b"binary", b'{"content": "binary"}', {**CE, "ce_sequence": "11", "content-type": "application/json"}),
        (b"structured", json.dumps(structured).encode(), {"content-type": "application/cloudevents+json"}),
        (b"plain", "caf\u00e9".encode(), {**CE, "content-type": "text/plain"}),
        (b'{"id": 7}', change(after={"id": 7, "content": "a row"}).value, {}),
        (b"avro", golden("avro"), {}),
        (b"json", golden("json"), {}),
        (b"protobuf", golden("protobuf"), {}),
        (b"html", json.dumps({**html, "content_type": "html"}).encode(), {}),
        (b"pdf", json.dumps(pdf).encode(), {}),
        (b"gone", b'{"content": "soon gone"}', {}),
        (b"gone", None, {}),
    ]
    bad = [make(formats) for cases in CASES.values() for make, _ in list(cases.values())[:2]]
    sent = []
    for number, (key, value, headers) in enumerate(good):
        if number < len(bad):
            sent.append(mixed.raw(bad[number].value, bad[number].key, bad[number].headers))
        pairs = tuple((name, text.encode()) for name, text in headers.items())
        mixed.raw(value, key, pairs)
    with running(mixed):
        group = f"{mixed.kafka.group}.index"
        until(lambda: lag(mixed.kafka, group, "mixed") == 0)
        live = ["own", "binary", "structured", "plain", "7", "avro", "json", "protobuf", "html", "pdf"]
        until(lambda: all(point.kv_ready for name in live for point in mixed.qdrant.chunks(document(name))))
    texts = {name: mixed.texts(name) for name in live}
    assert texts["own"] == "own"
    assert (texts["binary"], texts["structured"], texts["plain"], texts["7"]) == (
        "binary",
        "structured",
        "café",
        "a row",
    )
    assert all("Everybody has 30 days." in texts[name] for name in ("avro", "json", "protobuf"))
    assert texts["html"] == "# Page\n\nby reference"
    assert texts["pdf"].startswith("Annual leave")
    assert mixed.texts("gone") is None
    heads = mixed.qdrant.heads([document(name) for name in live])
    versions = {key.doc_id: head.version for key, head in heads.items() if head.version < 1 << 60}
    assert versions == {"binary": 11, "structured": 12, "7": 100, "avro": 7, "json": 7, "protobuf": 7}
    mixed.assert_clean()
    letters = {int(letter.header("kvquilt.error.offset")): letter for letter in read_all(mixed.kafka, "mixed.dlq")}
    assert sorted(letters) == [message.offset for message in sent], "each bad one, and nothing else"
    for message in sent:
        letter = letters[message.offset]
        assert (letter.key, letter.value) == (message.key, message.value), "original bytes"
        assert letter.header("kvquilt.error.stage") == b"parse"
        for name, value in message.headers:
            assert letter.header(name) == value
