"""The source when something dies: the process that reads, or the broker that it reads from."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from ingest.source import Feed
from schemas.errors import TopicError
from stores.broker import EmbeddedBroker
from stores.topics import Publisher, ensure_topics, lag, read_all
from tests.ingest.source_parts import SINKS, Running
from tests.services.fixtures import kafka_settings

PATIENCE_S = 90

# Reads, and writes what it did into the topic of commits: a real effect in another process. Arguments: bootstrap,
# unique name, and the message at which the sink hangs before it writes anything of its bundle.
READER = """
import sys, threading
import apache_beam as beam
from ingest.source import Feed
from stores.topics import Publisher
from tests.ingest import source_parts
from tests.services.fixtures import kafka_settings

kafka = kafka_settings(sys.argv[1], sys.argv[2]).model_copy(update={"group_instance_id": "reader"})
publisher = Publisher(kafka)

class Effects:
    def write(self, messages):
        if any(message.value == sys.argv[3].encode() for message in messages):
            print("before the write", flush=True)
            threading.Event().wait()
        publisher.publish_many(kafka.commits_topic, [(message.value, b"done", ()) for message in messages])

source_parts.SINKS["effects"] = Effects()
with Feed(kafka, kafka.documents_topic, kafka.group, threading.Event(), poll_s=0.1, max_records=10) as feed:
    print("open", flush=True)
    source_parts.run(feed, "effects")
"""


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


def until(condition, what, feed=None):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        known = feed and feed.health()
        assert time.monotonic() < deadline, f"after {PATIENCE_S} s still not: {what}; health: {known}"
        time.sleep(0.01)


def reader_process(kafka, name, hang_on):
    command = [sys.executable, "-c", READER, kafka.bootstrap, name, hang_on]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ)
    assert process.stdout.readline() == b"open\n"
    return process


def test_ing_06_kill_9_before_the_write_loses_nothing(durable_broker, request):
    """The process dies with a bundle read and none of its effects written: the next one must read the bundle again."""
    name = request.node.nodeid
    # a static member: the next process need not wait until the group has given the dead one up
    kafka = kafka_settings(durable_broker.bootstrap, name).model_copy(update={"group_instance_id": "reader"})
    ensure_topics(kafka)
    values = [b"%d" % n for n in range(60)]
    with Publisher(kafka) as publisher:
        publisher.publish_many(kafka.documents_topic, [(value, value, ()) for value in values])
    done: set[bytes | None] = set()
    for _ in range(2):
        hang_on = next(value for value in values[20:] if value not in done)  # partitions are read in any order
        process = reader_process(kafka, name, hang_on.decode())
        assert process.stdout.readline() == b"before the write\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        done = {message.key for message in read_all(kafka, kafka.commits_topic)}
        assert hang_on not in done
        assert lag(kafka, kafka.group, kafka.documents_topic) >= len(values) - len(done)
    with Feed(kafka, kafka.documents_topic, kafka.group, threading.Event(), poll_s=0.1) as feed, Running(feed, name):
        until(lambda: lag(kafka, kafka.group, kafka.documents_topic) == 0, "everything read")
    done = {message.key for message in read_all(kafka, kafka.commits_topic)}
    assert done | set(SINKS.pop(name).values) == set(values)


def test_a_broker_that_is_killed_and_comes_back_costs_no_message(durable_broker, request):
    """The run must not end, nothing be lost or done twice; health tells that the broker is away."""
    name = request.node.nodeid
    kafka = kafka_settings(durable_broker.bootstrap, name)
    ensure_topics(kafka)
    sink = SINKS[name]
    with (
        Publisher(kafka) as publisher,
        Feed(kafka, kafka.documents_topic, kafka.group, threading.Event(), poll_s=0.1) as feed,
        Running(feed, name) as running,
    ):
        publisher.publish_many(kafka.documents_topic, [(b"%d" % n, b"%d" % n, ()) for n in range(100)])
        until(lambda: len(sink.written) == 100, "100 messages")
        # a commit may come later than its effects, by a rebalance: the broker must not die with one of these under way
        until(lambda: lag(kafka, kafka.group, kafka.documents_topic) == 0, "100 messages committed", feed)

        sink.gate.clear()  # effects are on their way when the broker dies: their commit has to wait for it
        sink.reached.clear()
        publisher.publish(kafka.documents_topic, b"during", b"during")
        assert sink.reached.wait(PATIENCE_S)
        kill(durable_broker)
        sink.gate.set()
        until(lambda: feed.health().uncommitted == 1, "an effect without a commit", feed)
        until(lambda: feed.health().contact_age_s > 3, "a contact age that grows", feed)
        assert running.error is None

        durable_broker.start()
        publish_when_back(publisher, kafka.documents_topic)
        until(lambda: b"after" in sink.values, "the message after the restart")
        until(lambda: feed.health().uncommitted == 0, "a commit after the restart", feed)
        until(lambda: feed.health().contact_age_s < 3, "contact after the restart", feed)
    assert Counter(sink.values) == Counter([b"%d" % n for n in range(100)] + [b"during", b"after"])
    assert lag(kafka, kafka.group, kafka.documents_topic) == 0
    SINKS.pop(name)


def kill(broker):
    if isinstance(broker, EmbeddedBroker):
        os.kill(broker.pid, signal.SIGKILL)
        broker.wait()
    else:
        broker.kill()


def publish_when_back(publisher, topic):
    """A producer may fail while its broker starts; trying again is the caller's part."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return publisher.publish(topic, b"after", b"after")
        except TopicError:
            if time.monotonic() > deadline:
                raise
