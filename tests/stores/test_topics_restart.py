"""A broker that goes away and comes back: nothing lost, nothing read twice, nobody raises while reading."""

import os
import signal
import time

import pytest

from schemas.errors import TopicError
from stores.broker import EmbeddedBroker
from stores.clock import MovableClock, SystemClock
from stores.topics import PartitionReader, Publisher, ensure_topics, lag, read_all
from tests.services.fixtures import kafka_settings

PATIENCE_S = 90


@pytest.fixture(params=["folder", pytest.param("apache", marks=[pytest.mark.service, pytest.mark.slow])])
def durable_broker(request, tmp_path):
    """A broker that keeps its topics over a restart."""
    if request.param == "apache":
        kafka = request.getfixturevalue("apache_kafka")
        yield kafka
        kafka.start()
    else:
        with EmbeddedBroker(tmp_path) as broker:
            yield broker


def kill(broker):
    if isinstance(broker, EmbeddedBroker):
        os.kill(broker.pid, signal.SIGKILL)
        broker.wait()
    else:
        broker.kill()


def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"after {PATIENCE_S} s still not: {what}"


def publish_when_back(publisher, topic, key, value):
    """A producer may fail while its broker starts; trying again is the caller's part."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return publisher.publish(topic, key, value)
        except TopicError:
            if time.monotonic() > deadline:
                raise


def test_a_reader_comes_back_after_kill_9_of_the_broker(durable_broker, request):
    """Six restarts under load lost and repeated nothing; kafka-python must not be configured worse than that."""
    kafka = kafka_settings(durable_broker.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    topic, got = kafka.documents_topic, []
    with Publisher(kafka) as publisher, PartitionReader(kafka, topic, kafka.group) as reader:
        publisher.publish_many(topic, [(b"%d" % n, b"before", ()) for n in range(50)])
        until(lambda: got.extend(reader.poll(7, 0.5)) or len(got) >= 20, "20 messages")
        committed = reader.position()
        reader.commit(committed)

        kill(durable_broker)
        until(lambda: not reader.poll(500, 0.1), "what was fetched before is used up")
        with pytest.raises(TopicError, match=f"committing offsets of topic {topic}"):
            reader.commit({0: 1, 1: 1, 2: 1})
        silent_since = reader.last_contact_ms
        until(lambda: reader.poll(1, 0.5) == [] and SystemClock().now_ms() - silent_since > 3_000, "3 s of silence")
        assert reader.last_contact_ms == silent_since

        durable_broker.start()
        publish_when_back(publisher, topic, b"after", b"after")
        reader.seek(committed)  # as a crash of ours would
        got = [message for message in got if message.offset < committed[message.partition]]
        until(lambda: got.extend(reader.poll(500, 0.5)) or len(got) >= 51, "51 messages")
        assert sorted(message.key for message in got) == sorted([b"%d" % n for n in range(50)] + [b"after"])
        reader.commit(reader.position())
        assert reader.last_contact_ms > silent_since
    assert lag(kafka, kafka.group, topic) == 0


def test_a_topic_that_was_made_anew_is_read_from_its_beginning(request):
    """An in-memory broker forgets its topics: a reader at offset 30 of the old one would wait for ever."""
    with EmbeddedBroker() as broker:
        kafka = kafka_settings(broker.bootstrap, request.node.nodeid)
        ensure_topics(kafka)
        topic, got = kafka.documents_topic, []
        with Publisher(kafka) as publisher, PartitionReader(kafka, topic, kafka.group) as reader:
            publisher.publish_many(topic, [(b"doc", b"before", ()) for n in range(30)])
            until(lambda: got.extend(reader.poll(500, 0.5)) or len(got) == 30, "30 messages")
            broker.stop()
            broker.start()
            ensure_topics(kafka)
            told = publish_when_back(publisher, topic, b"doc", b"after")
            assert told.offset == 0
            got.clear()
            until(lambda: got.extend(reader.poll(500, 0.5)) or got, "the message of the new topic")
            assert [message.value for message in got] == [b"after"]


def test_silence_is_told_from_an_empty_topic(memory_broker, request):
    """A poll that returns nothing says nothing: the age of the last contact is what readiness can go by."""
    kafka = kafka_settings(memory_broker.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    clock = MovableClock()
    with PartitionReader(kafka, kafka.documents_topic, kafka.group, clock) as reader:
        clock.advance(60)
        assert reader.poll(1, 0.0) == []
        assert reader.last_contact_ms == clock.now_ms()


def test_an_unreachable_broker_is_an_error_at_start(request):
    """Start-up is loud; only what runs already waits."""
    with EmbeddedBroker() as broker:
        kafka = kafka_settings(broker.bootstrap, request.node.nodeid)
    kafka = kafka.model_copy(update={"security": {"bootstrap_timeout_ms": 500}})
    for start in (ensure_topics, lambda k: PartitionReader(k, "t"), lambda k: next(read_all(k, "t"))):
        with pytest.raises(TopicError, match=f"broker {kafka.bootstrap}"):
            start(kafka)
