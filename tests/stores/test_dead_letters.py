"""Dead letters: found among the notes, sent again as they were, never twice by accident, never as a deletion."""

import pytest

from schemas.errors import EventError, InputError
from schemas.settings import KafkaSettings
from stores.clock import MovableClock
from stores.dead_letters import LetterId, in_its_place, newest, read_letters, replay
from stores.kafka_client import Message
from stores.memory_topics import MemoryTopics

KAFKA = KafkaSettings(bootstrap="nowhere:1")
VALUE = b"{not json"
HEADERS = (("traceparent", b"00-1"), ("kvquilt.version", b"7"))


@pytest.fixture
def topics():
    return MemoryTopics(partitions=3, clock=MovableClock())


@pytest.fixture
def publisher(topics):
    return topics.publisher()


def put_aside(topics, publisher, key=b"doc", value=VALUE, *, topic=None, stage="parse", headers=HEADERS, **options):
    message = publisher.publish(topic or KAFKA.documents_topic, key, value, headers)
    topics.clock.advance(1)
    return publisher.dead_letter(KAFKA, message, EventError("not JSON: é", stage), stage, 2, **options), message


def letters(topics, **options):
    return read_letters(topics.messages(KAFKA.dead_letter_topic), **options)


def send(topics, publisher, *wanted):
    found = letters(topics, values_of=[letter.id for letter in letters(topics)])
    changes = newest(topics.messages(KAFKA.documents_topic), found, KAFKA)
    return list(replay(publisher, KAFKA, [letter for letter in found if not wanted or letter.id in wanted], changes))


def test_a_letter_says_what_was_wrong_and_where_the_message_came_from(topics, publisher):
    record, message = put_aside(topics, publisher)
    (letter,) = letters(topics)
    assert letter.id == (record.partition, record.offset)
    assert (letter.error, letter.message, letter.stage, letter.attempts) == ("EventError", "not JSON: é", "parse", 2)
    assert (letter.topic, letter.partition, letter.offset) == ("documents", message.partition, message.offset)
    assert letter.timestamp_ms == message.timestamp_ms
    assert letter.put_aside_ms == message.timestamp_ms + 1000
    assert (letter.key, letter.headers, letter.nbytes) == (b"doc", HEADERS, len(VALUE))


def test_values_are_kept_only_where_they_are_asked_for(topics, publisher):
    """A topic of dead letters of 32 MB each does not fit into memory."""
    for key in (b"a", b"b"):
        put_aside(topics, publisher, key)
    first, second = letters(topics)
    kept = letters(topics, values_of=[second.id])
    assert [letter.value for letter in kept] == [None, VALUE]
    assert (first.nbytes, second.nbytes) == (len(VALUE), len(VALUE))


def test_letters_come_in_the_order_in_which_they_were_put_aside(topics, publisher):
    keys = [b"a", b"b", b"c", b"d", b"e"]
    for key in keys:
        put_aside(topics, publisher, key)
    assert [letter.key for letter in letters(topics)] == keys


def test_a_replay_sends_key_value_and_headers_as_they_were(topics, publisher):
    put_aside(topics, publisher)
    (sent,) = send(topics, publisher)
    message = topics.messages(KAFKA.documents_topic)[-1]
    assert (message.key, message.value) == (b"doc", VALUE)
    assert message.headers[: len(HEADERS)] == HEADERS
    assert (sent.topic, sent.offset) == ("documents", message.offset)


def test_a_replay_is_recorded(topics, publisher):
    """Otherwise the next `replay` sends everything again, and nobody knows what is still to be done."""
    put_aside(topics, publisher, b"a")
    put_aside(topics, publisher, b"b")
    first, second = letters(topics)
    send(topics, publisher, first.id)
    assert [letter.replayed for letter in letters(topics)] == [1, 0]
    send(topics, publisher, first.id, second.id)
    assert [letter.replayed for letter in letters(topics)] == [2, 1]


def test_a_replayed_event_keeps_its_place_in_the_order_of_changes(topics, publisher):
    """An old event without a version would get a new timestamp and win over what came after it."""
    _, message = put_aside(topics, publisher)
    topics.clock.advance(3600)
    send(topics, publisher)
    again = topics.messages(KAFKA.documents_topic)[-1]
    assert again.timestamp_ms > message.timestamp_ms
    placed = in_its_place(again)
    assert (placed.timestamp_ms, placed.offset) == (message.timestamp_ms, message.offset)
    assert in_its_place(message) is message


def test_a_replayed_event_that_fails_again_keeps_its_first_place(topics, publisher):
    _, message = put_aside(topics, publisher)
    topics.clock.advance(10)
    send(topics, publisher)
    publisher.dead_letter(KAFKA, topics.messages(KAFKA.documents_topic)[-1], EventError("again"), "parse", 1)
    first, second = letters(topics)
    send(topics, publisher, second.id)
    last = topics.messages(KAFKA.documents_topic)[-1]
    assert in_its_place(last).timestamp_ms == message.timestamp_ms
    assert [name for name, _ in last.headers] == [
        "traceparent", "kvquilt.version", "kvquilt.replay.timestamp", "kvquilt.replay.offset"
    ]  # fmt: skip
    assert (first.replayed, second.replayed) == (1, 0)


@pytest.mark.parametrize(
    "header",
    [
        ("kvquilt.replayed.letter", b"who?"),
        ("kvquilt.replayed.letter", b"0:0"),
        ("kvquilt.dismissed.letter", b"\xff"),
        ("kvquilt.dismissed.letter", b"0:0"),
    ],
)
def test_a_letter_is_a_letter_whatever_headers_its_message_has(topics, publisher, header):
    """Bug: an event with the headers of a note hid its own letter, or ended `dlq ls` for all of them."""
    put_aside(topics, publisher, headers=(header,))
    (letter,) = letters(topics)
    assert (letter.headers, letter.settled) == ((header,), False)


@pytest.mark.parametrize("about", [b"who?", b"\xff", b"9" * 5000 + b":0", None])
def test_a_note_that_names_no_letter_is_passed_over(topics, publisher, about):
    put_aside(topics, publisher)
    for name in ("kvquilt.replayed.letter", "kvquilt.dismissed.letter"):
        publisher.publish(KAFKA.dead_letter_topic, b"doc", None, ((name, about),))
    (letter,) = letters(topics)
    assert not letter.settled


def test_a_letter_whose_numbers_are_none_is_still_listed(topics, publisher):
    """Whoever may write to the topic may write anything."""
    numbers = (("kvquilt.error.offset", b"--5"), ("kvquilt.error.attempts", b"9" * 5000))
    publisher.publish(KAFKA.dead_letter_topic, b"doc", VALUE, (("kvquilt.error.class", b"E"), *numbers))
    (letter,) = letters(topics)
    assert (letter.offset, letter.attempts) == (-1, 1)


def test_a_letter_without_its_value_is_never_sent(topics, publisher):
    """It would arrive as a null value: a deletion of the document."""
    put_aside(topics, publisher, value=None, omitted_nbytes=40_000_000)
    (letter,) = letters(topics)
    assert (letter.omitted, letter.nbytes, letter.value) == (True, 40_000_000, None)
    before = len(topics.messages(KAFKA.documents_topic))
    (refusal,) = send(topics, publisher)
    assert isinstance(refusal, InputError)
    assert "without its value of 40,000,000 bytes" in str(refusal)
    assert len(topics.messages(KAFKA.documents_topic)) == before


def test_a_deletion_that_was_put_aside_is_sent_as_a_deletion(topics, publisher):
    put_aside(topics, publisher, value=None, headers=(("kvquilt.version", b"x"),))
    send(topics, publisher)
    assert topics.messages(KAFKA.documents_topic)[-1].value is None


@pytest.mark.parametrize(
    ("topic", "stage", "home"),
    [
        ("documents", "plan", "documents"),
        ("documents", "embed", "documents"),
        ("handbook.jsonl", "parse", "documents"),
        ("kvquilt.commits", "parse", "kvquilt.commits"),
        ("kvquilt.commits", "prefill", "kvquilt.commits"),
        ("backfill", "prefill", "kvquilt.commits"),
    ],
)
def test_a_letter_goes_back_to_the_pipeline_that_gave_it_up(topics, publisher, topic, stage, home):
    """A commit record in the documents topic would be the next dead letter."""
    put_aside(topics, publisher, topic=topic, stage=stage)
    (sent,) = send(topics, publisher)
    assert sent.topic == home


def test_one_letter_that_cannot_be_sent_does_not_hold_back_the_others(topics, publisher):
    put_aside(topics, publisher, b"a", None, omitted_nbytes=1)
    put_aside(topics, publisher, b"b")
    refused, sent = send(topics, publisher)
    assert isinstance(refused, InputError)
    assert isinstance(sent, Message)


@pytest.mark.parametrize("text", ["", "1", "1:", "a:b", "1:-2", "1:2:3", "1:٢", "1:" + "9" * 5000])
def test_what_is_no_id_of_a_letter_is_refused(text):
    with pytest.raises(InputError, match="names no dead letter; expected partition:offset"):
        LetterId.of(text)


def test_an_id_reads_as_it_is_written():
    assert LetterId.of("3:17") == LetterId(3, 17)
    assert str(LetterId(3, 17)) == "3:17"
