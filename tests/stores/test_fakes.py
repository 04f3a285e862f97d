"""The shipped fakes: they go wrong when they are told to, and otherwise do what the real parts do."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading

import pytest

from schemas.errors import BlobError, EventError, TopicError
from schemas.head import CommitRecord
from schemas.ids import DocumentKey, canonical_bytes
from schemas.settings import KafkaSettings
from stores.blobs import open_blobs
from stores.clock import MovableClock
from stores.fakes import CrashPoint, SimulatedCrash, fake_artifact, fake_fingerprint, with_faults
from stores.memory_topics import MemoryTopics
from stores.topics import PartitionReader, Publisher, ensure_topics


@pytest.fixture
def store(request):
    return open_blobs(f"memory://{request.node.name}")


def test_a_crash_before_the_call_has_no_effect_and_one_after_it_has(store):
    """The two windows of every write: lost, and done but not acknowledged."""
    crashing = with_faults(store, CrashPoint("put_new", at=2), CrashPoint("put_new", at=3, after=True))
    assert crashing.put_new("a", b"1")
    for key in ("b", "c"):
        with pytest.raises(SimulatedCrash):
            crashing.put_new(key, b"1")
    assert [key for key, _ in store.list("")] == ["a", "c"]
    assert crashing.put_new("d", b"1")


def test_a_simulated_crash_passes_code_that_catches_every_exception(store):
    """A crash that a retry loop swallows tests nothing."""
    crashing = with_faults(store, CrashPoint("size"))

    def careful():
        try:
            crashing.size("a")
        except Exception:
            pytest.fail("a killed process handles nothing")

    with pytest.raises(SimulatedCrash):
        careful()


def test_a_fault_can_last_for_some_calls_and_pass(store):
    flaky = with_faults(store, CrashPoint("get", at=2, times=2, fault=BlobError("slow down")))
    store.put_new("a", b"1")
    outcomes = []
    for _ in range(4):
        try:
            outcomes.append(flaky.get("a"))
        except BlobError as error:
            outcomes.append(str(error))
    assert outcomes == [b"1", "slow down", "slow down", b"1"]
    assert flaky.calls == {"get": 4}


def test_a_crash_point_that_names_no_method_is_refused(store):
    """A misspelt name would make a chaos test that never crashes."""
    with pytest.raises(ValueError, match="Blobs has no method 'put_nwe'"):
        with_faults(store, CrashPoint("put_nwe"))


def test_kill_ends_the_process_without_a_word():
    code = "from stores.fakes import kill\ntry:\n    kill()\nfinally:\n    print('still here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-9, "")


def test_a_fake_artifact_depends_on_its_arguments_only():
    document = DocumentKey("t", "d")
    one, two = fake_artifact(document, [1, 2, 3]), fake_artifact(document, [1, 2, 3])
    assert (one[0], one[1].header, one[1].k) == (two[0], two[1].header, two[1].k)
    assert fake_artifact(document, [1, 2, 4])[1].k != one[1].k
    other = fake_fingerprint(model="other")
    assert fake_artifact(document, [1, 2, 3], fingerprint=other)[0] != one[0]


# --- topics in memory, beside the real ones


class Real:
    """The embedded broker, with the calls of `MemoryTopics`."""

    def __init__(self, kafka):
        self.kafka = kafka
        ensure_topics(kafka)

    def publisher(self):
        return Publisher(self.kafka)

    def reader(self, topic, group=None):
        return PartitionReader(self.kafka, topic, group)


@pytest.fixture(params=["fake", "real"])
def topics(request):
    """Topics with one partition."""
    name = "fakes-" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    settings = KafkaSettings(documents_topic=name, commits_topic=f"{name}-commits", group=name, partitions=1)
    if request.param == "fake":
        return MemoryTopics(), settings
    broker = request.getfixturevalue("memory_broker")
    settings = settings.model_copy(update={"bootstrap": broker.bootstrap})
    return Real(settings), settings


def take(reader, n):
    messages = []
    for _ in range(60):
        messages += reader.poll(n - len(messages), 0.5)
        if len(messages) == n:
            return messages
    pytest.fail(f"{len(messages)} of {n} messages came")


def test_messages_come_in_order_with_what_was_written(topics):
    made, settings = topics
    rows = [(b"a", b"1", ()), (b"a", None, (("h", b"x"),)), (b"b", b"", ()), (None, b"2", ())]
    counted = []
    with made.publisher() as publisher:
        told = [publisher.publish(settings.documents_topic, *rows[0])]
        publisher.publish_many(settings.documents_topic, rows[1:], counted.append)
    with made.reader(settings.documents_topic) as reader:
        read = take(reader, 4)
    assert [(m.key, m.value, m.headers) for m in read] == rows
    assert [m.offset for m in read] == [0, 1, 2, 3]
    assert (read[0].partition, read[0].offset) == (told[0].partition, told[0].offset)
    assert counted[-1] == 3


def test_a_group_goes_on_where_it_committed_and_not_where_it_read(topics):
    """What was read and not committed is read again: that is what crash tests rely on."""
    made, settings = topics
    with made.publisher() as publisher:
        for n in range(5):
            publisher.publish(settings.documents_topic, b"k", str(n).encode())
    with made.reader(settings.documents_topic, settings.group) as reader:
        assert [m.value for m in take(reader, 4)] == [b"0", b"1", b"2", b"3"]
        reader.commit({0: 2})
        assert reader.position() == {0: 4}
    with made.reader(settings.documents_topic, settings.group) as again:
        assert again.committed() == {0: 2}
        assert [m.value for m in take(again, 3)] == [b"2", b"3", b"4"]
        assert again.lag() == 0
    with made.reader(settings.documents_topic, settings.group + "-other") as other:
        assert len(take(other, 5)) == 5


def test_dead_letters_and_commit_records_are_those_of_the_real_publisher(topics, make_head):
    made, settings = topics
    record = CommitRecord.of(make_head(DocumentKey("acme", "d"), 3))
    with made.publisher() as publisher:
        bad = publisher.publish(settings.documents_topic, b"k", b"{", (("trace", b"7"),))
        publisher.dead_letter(settings, bad, EventError("not JSON"), "parse", 1)
        publisher.commit_record(settings, record)
    with made.reader(settings.dead_letter_topic) as reader:
        (letter,) = take(reader, 1)
    assert (letter.key, letter.value, letter.header("trace")) == (b"k", b"{", b"7")
    assert letter.header("kvquilt.error.message") == b"not JSON"
    with made.reader(settings.commits_topic) as reader:
        (commit,) = take(reader, 1)
    assert CommitRecord.from_bytes(commit.value) == record
    assert commit.key == canonical_bytes(["acme", "d", record.generation])


def test_memory_topics_wake_a_waiting_reader_and_keep_a_key_in_one_partition():
    topics = MemoryTopics(partitions=3, clock=MovableClock(5_000))
    reader = topics.reader("t")
    got = []
    waiting = threading.Thread(target=lambda: got.extend(reader.poll(10, 30)))
    waiting.start()
    topics.publisher().publish("t", b"k", b"1")
    waiting.join()
    assert [(m.value, m.timestamp_ms) for m in got] == [(b"1", 5_000)]
    places = {topics.publisher().publish("t", f"{n % 7}".encode(), b"x").partition: n for n in range(70)}
    assert len(places) > 1
    by_key = {(m.key, m.partition) for m in topics.messages("t") if m.value == b"x"}
    assert len(by_key) == 7


def test_a_closed_publisher_and_a_reader_without_a_group_say_so():
    topics = MemoryTopics()
    publisher = topics.publisher()
    publisher.close()
    with pytest.raises(TopicError, match="is closed"):
        publisher.publish("t", b"k", b"v")
    with pytest.raises(TopicError, match="has no group"):
        topics.reader("t").commit({0: 1})
