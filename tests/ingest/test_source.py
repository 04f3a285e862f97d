"""The Kafka source on Beam's local runner and on every broker: it emits, it commits after the effects, it drains."""

import pickle
import threading
import time
from collections import Counter

import pytest
from apache_beam import coders
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP
from kafka import KafkaAdminClient

from ingest.source import Feed, KafkaSource, OffsetMark, OffsetMarkCoder
from schemas.errors import TopicError
from stores.clock import MovableClock
from stores.topics import Message, Publisher, ensure_topics, lag
from tests.ingest.source_parts import SINKS, Running, run
from tests.services.fixtures import kafka_settings

PATIENCE_S = 30


@pytest.fixture
def publisher(kafka):
    ensure_topics(kafka)
    with Publisher(kafka) as opened:
        yield opened


@pytest.fixture
def sink(request):
    """The name of a sink of this test's own."""
    yield request.node.nodeid
    SINKS.pop(request.node.nodeid, None)


def feed_of(kafka, **options):
    return Feed(kafka, kafka.documents_topic, kafka.group, threading.Event(), poll_s=0.1, **options)


def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"after {PATIENCE_S} s still not: {what}"
        time.sleep(0.005)


def messages(n, prefix=b""):
    return [(b"key %d" % number, prefix + b"%d" % number, ()) for number in range(n)]


def test_ing_01_ing_02_an_open_topic_is_emitted_without_a_record_limit(kafka, publisher, sink):
    """apache/beam#25114, #31400: the read hangs, or makes consumers for ever, and nothing comes out meanwhile."""
    publisher.publish_many(kafka.documents_topic, messages(3))
    with feed_of(kafka) as feed, Running(feed, sink):
        assert feed.health().record_age_s is None
        until(lambda: len(SINKS[sink].written) == 3, "3 messages in the sink")
        publisher.publish(kafka.documents_topic, b"late", b"late")
        until(lambda: b"late" in SINKS[sink].values, "a message that came later")
        health = feed.health()
        assert health.messages == 4
        assert health.record_age_s < PATIENCE_S  # the watchdog: records in the last N seconds


def test_ing_11_messages_reach_the_sink_as_they_were_written(kafka, publisher, sink):
    """apache/beam#28200: headers and timestamps that Python could not encode."""
    headers = (("kvquilt.version", b"3"), ("trace", b"\x00\xff"))
    told = publisher.publish(kafka.documents_topic, b"doc", None, headers)
    with feed_of(kafka) as feed, Running(feed, sink):
        until(lambda: SINKS[sink].written, "the message")
        coder = KafkaSource.of(feed).default_output_coder()
    assert SINKS[sink].written == [told]
    assert coder.decode(coder.encode(told)) == told


def test_all_partitions_are_read_and_every_message_once(kafka, publisher, sink):
    """Partitions read one after the other would each wait for the others' silence."""
    publisher.publish_many(kafka.documents_topic, messages(2_000))
    with feed_of(kafka) as feed, Running(feed, sink):
        until(lambda: len(SINKS[sink].written) >= 2_000, "2,000 messages")
    written = SINKS[sink].written
    assert Counter(message.key for message in written) == Counter(key for key, _, _ in messages(2_000))
    assert {message.partition for message in written} == {0, 1, 2}
    for partition in range(3):
        offsets = [message.offset for message in written if message.partition == partition]
        assert offsets == sorted(offsets)
    assert lag(kafka, kafka.group, kafka.documents_topic) == 0


def test_ing_06_offsets_move_only_after_the_effects(kafka, publisher, sink):
    """apache/beam#21742: a commit before the effect loses what a crash interrupts."""
    publisher.publish_many(kafka.documents_topic, messages(20))
    target = SINKS[sink]
    target.gate.clear()
    with feed_of(kafka) as feed, Running(feed, sink):
        assert target.reached.wait(PATIENCE_S)
        assert lag(kafka, kafka.group, kafka.documents_topic) == 20
        target.gate.set()
        until(lambda: lag(kafka, kafka.group, kafka.documents_topic) == 0, "the commit")
        assert feed.health().commit_age_s is not None
        assert feed.health().uncommitted == 0


def test_ing_07_ing_15_a_failed_effect_is_read_again(kafka, publisher, sink):
    """apache/beam#21465: the failure comes after the poll and before the commit; the next run must see the message."""
    publisher.publish_many(kafka.documents_topic, messages(10))
    SINKS[sink].fail_on = b"7"
    with feed_of(kafka) as feed:
        with pytest.raises(RuntimeError, match="the sink failed"):
            run(feed, sink)
        assert b"7" not in SINKS[sink].values
        with Running(feed, sink):
            until(lambda: len(SINKS[sink].written) >= 10, "all 10")
    assert sorted(SINKS[sink].values) == sorted(value for _, value, _ in messages(10))


def test_a_drain_ends_the_run_and_nothing_is_read_again(kafka, publisher, sink):
    """SIGTERM: the last bundle's offsets must be committed although Beam closes the reader before it finalizes."""
    publisher.publish_many(kafka.documents_topic, messages(50))
    with feed_of(kafka) as feed, Running(feed, sink):
        until(lambda: len(SINKS[sink].written) == 50, "50 messages")
    assert lag(kafka, kafka.group, kafka.documents_topic) == 0
    publisher.publish(kafka.documents_topic, b"new", b"new")
    with feed_of(kafka) as feed, Running(feed, sink):
        until(lambda: b"new" in SINKS[sink].values, "the new message")
    assert len(SINKS[sink].written) == 51


def test_a_drain_leaves_what_was_fetched_and_not_begun(kafka, publisher, sink):
    """The drain of a long queue must be quick, and must not commit what it leaves."""
    publisher.publish_many(kafka.documents_topic, messages(400))
    target = SINKS[sink]
    target.gate.clear()
    with feed_of(kafka, max_records=50) as feed, Running(feed, sink):
        assert target.reached.wait(PATIENCE_S)
        feed.stop.set()
        target.gate.set()
    assert len(target.written) == 50
    assert lag(kafka, kafka.group, kafka.documents_topic) == 350
    with feed_of(kafka, max_records=50) as feed, Running(feed, sink):
        until(lambda: len(target.written) >= 400, "the rest")
    assert Counter(target.values) == Counter(value for _, value, _ in messages(400))
    assert max(target.bundles) == 50


def test_rounds_follow_each_other_without_a_gap_or_a_repeat(kafka, publisher, sink):
    """The local runner leaks by the bundle, so it is run in rounds; a round must not cost a message."""
    publisher.publish_many(kafka.documents_topic, messages(300))
    with feed_of(kafka, max_records=20) as feed:
        rounds = 0
        while len(SINKS[sink].written) < 300:
            before = len(SINKS[sink].written)
            feed.start_round(max_bundles=3, max_s=600)
            run(feed, sink)
            assert len(SINKS[sink].written) <= before + 60
            rounds += 1
            assert rounds < 50
        feed.start_round(max_bundles=600, max_s=0)
        run(feed, sink)
    assert Counter(SINKS[sink].values) == Counter(value for _, value, _ in messages(300))


@pytest.mark.service
def test_a_round_sees_partitions_that_were_added(apache_kafka, request, sink):
    """Partitions that are added to a topic would be read by nobody. (The embedded broker cannot add any.)"""
    kafka = kafka_settings(apache_kafka.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    with feed_of(kafka) as feed:
        feed.start_round(1, 600)
        run(feed, sink)
        admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        admin.create_partitions({kafka.documents_topic: 12})
        admin.close()
        with Publisher(kafka) as fresh:
            fresh.publish_many(kafka.documents_topic, messages(200))
        feed.start_round(10_000, 600)
        with Running(feed, sink):
            until(lambda: len(SINKS[sink].written) == 200, "messages of all 12 partitions")
    assert {message.partition for message in SINKS[sink].written} == set(range(12))


def test_ing_13_ing_14_a_trickle_with_slow_effects_is_delivered_once(kafka, publisher, sink):
    """dpkp/kafka-python#1401, #2610: slow handlers and nearly idle topics lost their partitions or their commits."""
    with feed_of(kafka) as feed, Running(feed, sink):
        for n in range(5):
            SINKS[sink].gate.clear()
            bundles = feed.health().bundles
            until(lambda b=bundles: feed.health().bundles >= b + 4, "some idle bundles")
            SINKS[sink].reached.clear()
            publisher.publish(kafka.documents_topic, b"doc", b"%d" % n)
            assert SINKS[sink].reached.wait(PATIENCE_S)
            SINKS[sink].gate.set()
            until(lambda k=n: lag(kafka, kafka.group, kafka.documents_topic) == 0 and len(SINKS[sink].written) > k, "n")
    assert SINKS[sink].values == [b"0", b"1", b"2", b"3", b"4"]


def test_two_pipelines_in_two_threads_do_not_disturb_each_other(kafka, publisher, sink):
    """`kvquilt up` runs both in one process; Beam's parked readers must not be mixed up."""
    other = kafka.model_copy(update={"group": kafka.group + ".other"})
    with feed_of(kafka) as one, feed_of(other) as two, Running(one, sink), Running(two, sink + "2"):
        publisher.publish_many(kafka.documents_topic, messages(500))
        for name in (sink, sink + "2"):
            until(lambda name=name: len(SINKS[name].written) >= 500, "500 messages in both")
    expected = Counter(value for _, value, _ in messages(500))
    assert Counter(SINKS[sink].values) == Counter(SINKS.pop(sink + "2").values) == expected


def test_a_missing_topic_is_an_error_at_start(kafka):
    """kafka-python reads a topic that does not exist as an empty one, for ever."""
    with pytest.raises(TopicError, match="does not exist"), feed_of(kafka):
        pass


def reader_of(kafka, feed, mark=None):
    source = pickle.loads(pickle.dumps(KafkaSource.of(feed)))
    assert source == KafkaSource.of(feed)
    return source.create_reader(None, mark)


def read(reader, n):
    """The next `n` messages of a Beam reader."""
    got = []
    has = reader.start()
    deadline = time.monotonic() + PATIENCE_S
    while len(got) < n and time.monotonic() < deadline:
        if has:
            got.append(reader.get_current())
        if len(got) < n:
            has = reader.advance()
    return got


def test_a_mark_stands_behind_what_was_emitted_and_not_behind_what_was_fetched(kafka, publisher):
    """A mark at the consumer's position would commit what still waits in the reader."""
    publisher.publish_many(kafka.documents_topic, [(b"doc", b"%d" % n, ()) for n in range(10)])
    with feed_of(kafka) as feed:
        reader = reader_of(kafka, feed)
        got = read(reader, 4)
        mark = reader.get_checkpoint_mark()
        assert mark.positions[got[0].partition] == 4
        coder = OffsetMarkCoder()
        resumed = reader_of(kafka, feed, coder.decode(coder.encode(mark)))
        assert [message.value for message in read(resumed, 6)] == [b"4", b"5", b"6", b"7", b"8", b"9"]
        assert lag(kafka, kafka.group, kafka.documents_topic) == 10
        mark.finalize_checkpoint()
        assert lag(kafka, kafka.group, kafka.documents_topic) == 6


def test_the_watermark_promises_nothing_until_the_drain(kafka, publisher):
    """MAX_TIMESTAMP is what ends the run: reported a moment too early it would end it with messages in hand."""
    publisher.publish(kafka.documents_topic, b"doc", b"v")
    with feed_of(kafka) as feed:
        reader = reader_of(kafka, feed)
        (message,) = read(reader, 1)
        assert reader.get_current_timestamp().micros == message.timestamp_ms * 1000
        feed.stop.set()
        assert reader.get_watermark() == MIN_TIMESTAMP
        assert not reader.advance()
        assert reader.get_watermark() == MAX_TIMESTAMP


def test_a_late_mark_does_not_take_offsets_back(kafka, publisher):
    """Finalizing is best effort and, beyond one machine, in no order."""
    publisher.publish_many(kafka.documents_topic, [(b"doc", b"%d" % n, ()) for n in range(3)])
    with feed_of(kafka) as feed:
        reader = reader_of(kafka, feed)
        read(reader, 1)
        older = reader.get_checkpoint_mark()
        assert reader.advance()
        newer = reader.get_checkpoint_mark()
        for mark in (newer, older, newer):
            mark.finalize_checkpoint()
            assert lag(kafka, kafka.group, kafka.documents_topic) == 1


def test_marks_are_encoded_as_they_are_compared():
    """Beam finds its parked reader by these bytes: order of partitions must not matter."""
    coder = OffsetMarkCoder()
    one, same = OffsetMark({2: (5, 1), 0: (1, 0)}), OffsetMark({0: (1, 0), 2: (5, 1)})
    assert coder.encode(one) == coder.encode(same) == b"[[0, 1, 0], [2, 5, 1]]"
    assert coder.is_deterministic()
    decoded = coder.decode(b"[[0, 1, 0], [2, 5, 1]]")
    assert decoded.positions == {0: 1, 2: 5}
    decoded.finalize_checkpoint()  # another process's mark commits nothing, and does not fail


def test_ages_are_told_by_the_clock(memory_broker, request):
    """A pipeline that stopped looks like an idle one; the ages are what alerts go by."""
    kafka = kafka_settings(memory_broker.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    clock = MovableClock()
    with Publisher(kafka) as publisher, feed_of(kafka, clock=clock) as feed:
        publisher.publish(kafka.documents_topic, b"doc", b"v")
        reader = reader_of(kafka, feed)
        read(reader, 1)
        reader.get_checkpoint_mark().finalize_checkpoint()
        clock.advance(7)
        health = feed.health()
        assert (health.record_age_s, health.commit_age_s, health.contact_age_s) == (7.0, 7.0, 7.0)
        assert (health.lag, health.uncommitted, health.messages, health.bundles) == (0, 0, 1, 1)
        feed.take(0.0)
        assert feed.health().contact_age_s == 0.0


@pytest.mark.parametrize("timestamp_ms", [-1, -(2**62), 2**62])
def test_a_senseless_timestamp_does_not_stop_the_pipeline(timestamp_ms, memory_broker, request):
    """Producers write any int64; Beam raises on what it cannot encode, and every run would end at this message."""
    kafka = kafka_settings(memory_broker.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    with feed_of(kafka) as feed:
        reader = reader_of(kafka, feed)
        reader._current = Message(kafka.documents_topic, 0, 0, timestamp_ms, b"k", b"v")
        stamp = reader.get_current_timestamp()
        coder = coders.TimestampCoder()
        assert coder.decode(coder.encode(stamp)) == stamp
