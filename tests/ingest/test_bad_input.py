"""Bad input: a dead letter that says what was wrong, and the documents around it are served."""

import json
from dataclasses import replace

import pytest

from schemas.errors import InputError
from schemas.events import TENANT_HEADER, VERSION_HEADER
from stores.fakes import CrashPoint, with_faults
from tests.ingest.world import document


def event(**fields):
    return json.dumps({"content": "a text", **fields}).encode()


BAD = {
    "malformed JSON": (b"d", b'{"content": "a text"', "not JSON"),
    "a missing key": (None, event(), "the message has no key"),
    "an empty key": (b"", event(), "the message has no key"),
    "a missing field": (b"d", b"{}", "content: Field required"),
    "a wrong type": (b"d", event(version="7"), "version: Input should be a valid integer"),
    "a list": (b"d", b"[]", "must be a JSON object or null"),
    "20 MB": (b"d", event(content="x " * 10_000_000), "20,000,015 bytes; at most 8,388,608"),
    "an empty document": (b"d", event(content=" \n"), "the document is empty"),
    "invalid UTF-8": (b"d", b'{"content": "\xff"}', "not UTF-8"),
    "an unknown field": (b"d", event(colour="blue"), "colour: Extra inputs are not permitted"),
    "a future schema version": (b"d", event(schema_version=2), "schema_version 2 is newer than 1"),
    "another document's id": (b"d", event(doc_id="e"), "they must agree"),
    "a NUL character": (b"d", event(content="a\x00b"), "NUL character"),
    "half a surrogate": (b"d", event(content="\ud800"), "surrogate"),
    "an unknown content type": (b"d", event(content_type="docx"), "content_type"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_event_is_put_aside_and_its_neighbours_are_served(world, name):
    """One bad event that fails its batch, or stops the pipeline, takes the whole topic down with it."""
    key, value, message = BAD[name]
    world.change("the one before", 1, doc_id="before")
    world.raw(value, key)
    world.change("the one after", 1, doc_id="after")
    world.index()
    world.prefill()
    assert (world.texts("before"), world.texts("after")) == ("the one before", "the one after")
    world.assert_clean()
    (letter,) = world.dead_letters()
    assert message in letter["message"]
    assert (letter["class"], letter["stage"], letter["attempts"]) == ("EventError", "parse", "1")
    assert (letter["topic"], letter["partition"], letter["offset"]) == ("documents", "0", "1")
    (record,) = world.topics.messages("documents.dlq")
    assert (record.key, record.value) == (key, value), "original bytes"
    assert world.qdrant.heads([document("d")]) == {}


def test_a_deletion_with_a_broken_version_is_put_aside(world):
    world.change("a text", 1)
    world.raw(None, headers=((VERSION_HEADER, b"two"),))
    world.index()
    assert world.texts() == "a text"
    assert len(world.dead_letters()) == 1


@pytest.mark.parametrize("tenant", [None, b"", b"acm\xe9"])
def test_a_deletion_of_a_tenant_that_it_does_not_name_deletes_nothing(world, tenant):
    """Bug: without a value it deleted the default tenant's document; what was not UTF-8 made a tenant of its own."""
    world.change("a text", 1)
    world.raw(None, headers=((TENANT_HEADER, tenant), (VERSION_HEADER, b"2")))
    world.index()
    assert [(head.tenant, head.live) for head in world.qdrant.documents()] == [("default", True)]
    (message,) = world.topics.messages("documents.dlq")
    assert b"header kvquilt.tenant" in message.header("kvquilt.error.message")


@pytest.mark.parametrize("number", [b"9" * 5000, b"9223372036854775808", b"-1", b"x", None])
@pytest.mark.parametrize("name", ["timestamp", "offset"])
def test_an_event_whose_headers_name_an_impossible_first_place_is_put_aside(world, name, number):
    """Bug: a number of 5,000 digits ended the pipeline, at every start; one of 30 was stored as a time."""
    place = {"kvquilt.replay.timestamp": b"1700000000000", "kvquilt.replay.offset": b"1"}
    world.raw(event(version=1), headers=tuple((place | {f"kvquilt.replay.{name}": number}).items()))
    world.change("the one after", 1, doc_id="after")
    world.index()
    assert (world.texts(), world.texts("after")) == (None, "the one after")
    (message,) = world.topics.messages("documents.dlq")
    assert b"must be decimal digits below 2^63" in message.header("kvquilt.error.message")


def test_a_record_of_the_commits_topic_that_is_none_is_put_aside(world):
    world.publisher.publish("kvquilt.commits", b"x", b"nonsense")
    world.publisher.publish("kvquilt.commits", b"x", None)
    world.change("a text", 1)
    world.index()
    world.prefill()
    world.assert_clean()
    assert ["not a commit record" in letter["message"] for letter in world.dead_letters()] == [True, True]


def test_ing_12_one_document_that_the_embedder_fails_on_does_not_fail_its_batch(world):
    """RunInference's unit of failure is the batch: with one bad document in 32, 32 fail."""

    def fails(text):
        if "poison" in text:
            raise ValueError("no such token")

    world.embedder.fails = fails
    for n in range(8):
        world.change(f"text {n}" if n != 5 else "poison", 1, doc_id=f"doc {n}")
    world.index()
    assert [world.texts(f"doc {n}") for n in range(8)] == [f"text {n}" if n != 5 else None for n in range(8)]
    (letter,) = world.dead_letters()
    assert (letter["stage"], letter["offset"], letter["attempts"]) == ("embed", "5", "4")


def test_ing_12_one_chunk_that_the_model_fails_on_does_not_fail_its_batch(world):
    poison = world.index_parts.chunker.tokenizer.encode("poison")[0]

    def fails(chunks):
        if any(poison in chunk for chunk in chunks):
            raise RuntimeError("index out of range in self")

    world.model.fails = fails
    for n in range(8):
        world.change(f"text {n}" if n != 5 else "poison", 1, doc_id=f"doc {n}")
    world.index()
    world.prefill()
    ready = [world.qdrant.chunks(document(f"doc {n}"))[0].kv_ready for n in range(8)]
    assert ready == [n != 5 for n in range(8)]
    assert world.texts("doc 5") == "poison", "its text stays servable"
    (letter,) = world.dead_letters()
    assert letter["stage"] == "prefill"
    assert "the model failed on chunk 0 of this document: RuntimeError: index out of range" in letter["message"]


def test_ing_12_a_batch_that_does_not_fit_into_memory_is_halved(world):
    sizes = []

    def fails(chunks):
        if len(chunks) > 2:
            raise MemoryError("out of memory")
        sizes.append(len(chunks))

    world.model.fails = fails
    for n in range(8):
        world.change(f"text {n}", 1, doc_id=f"doc {n}")
    world.index()
    world.prefill()
    world.assert_clean()
    assert sizes == [2, 2, 2, 2]
    assert world.dead_letters() == []


def test_a_document_whose_other_chunks_can_be_prefilled_keeps_those(world):
    poison = world.index_parts.chunker.tokenizer.encode("poison")[0]

    def fails(chunks):
        if any(poison in chunk for chunk in chunks):
            raise RuntimeError("bad chunk")

    world.model.fails = fails
    good = [f"Paragraph {n} has as many words as it takes to fill a chunk alone." for n in range(3)]
    world.change("\n\n".join([*good[:2], "poison " + good[2]]), 1)
    world.index()
    world.prefill()
    assert [point.kv_ready for point in world.qdrant.chunks(document())] == [True, True, False]
    assert len(world.kv.keys(document())) == 2


def test_a_broken_model_stops_the_pipeline_and_drains_nothing_into_dead_letters(world):
    """A GPU that is gone fails on every document: that is no document's fault."""

    def fails(_):
        raise RuntimeError("CUDA error: device lost")

    world.embedder.fails = fails
    world.change("a text", 1)
    with pytest.raises(RuntimeError, match="device lost"):
        world.index()
    assert world.dead_letters() == []
    world.embedder.fails = lambda text: None
    world.index()
    assert world.texts() == "a text"


def test_vectors_that_are_not_numbers_are_a_dead_letter_and_no_fault_of_the_index(world):
    good = world.embedder.embed

    def embed(texts):
        return [row * float("nan") if "poison" in text else row for text, row in zip(texts, good(texts), strict=True)]

    world.embedder.embed = embed
    world.change("poison", 1)
    world.change("a text", 1, doc_id="e")
    world.index()
    assert world.texts("e") == "a text"
    (letter,) = world.dead_letters()
    assert "not finite" in letter["message"]


def test_a_dead_letter_that_the_topic_refuses_is_written_without_its_value(world):
    """Otherwise the one event that is too large for everything stops the pipeline for good."""
    world.raw(b"far too large")
    refusal = CrashPoint("dead_letter", fault=InputError("the record is larger than the topic takes"))
    world.index(replace(world.index_parts, publisher=with_faults(world.publisher, refusal)))
    (letter,) = world.dead_letters()
    assert "not JSON" in letter["message"]
    assert "the value of 13 bytes is left out: the record is larger" in letter["message"]
