"""What every broker must do for us; each test runs on the embedded broker (memory, folder) and on Apache Kafka."""

import logging

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import ConfigResource, ConfigResourceType

from schemas.errors import InputError, SettingsError, TopicError
from schemas.head import CommitRecord, DocumentState
from schemas.settings import KafkaSettings
from stores.kafka_client import MAX_MESSAGE_BYTES
from stores.topics import PartitionReader, Publisher, ensure_topics, lag, read_all
from tests.services.fixtures import kafka_settings


@pytest.fixture
def publisher(kafka):
    """A publisher on topics that exist."""
    ensure_topics(kafka)
    with Publisher(kafka) as opened:
        yield opened


def read(reader, n):
    """The next `n` messages; fails where they do not come."""
    messages = []
    for _ in range(60):
        messages += reader.poll(n - len(messages), 0.5)
        if len(messages) == n:
            return messages
    raise AssertionError(f"{len(messages)} of {n} messages came: {messages}")


def test_the_topics_are_made_once_and_found_again(kafka):
    """Two processes start at once: the second must not fail on topics that the first has made."""
    ensure_topics(kafka)
    ensure_topics(kafka)
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    made = admin.describe_topics([kafka.documents_topic, kafka.commits_topic, kafka.dead_letter_topic])
    admin.close()
    assert [len(topic["partitions"]) for topic in made] == [3, 3, 3]


def test_what_is_published_is_read_back_as_it_was(kafka, publisher):
    """Null values are deletes, null keys go to the dead letters: neither may become empty bytes on the way."""
    rows = [(b"key", b"value"), (b"gone", None), (None, b"no key"), (b"", b""), (b"\xff\xfe", b"\x00" * 10)]
    for key, value in rows:  # not to a compacted topic, whose records need a key
        publisher.publish(kafka.dead_letter_topic, key, value)
    found = {(message.key, message.value) for message in read_all(kafka, kafka.dead_letter_topic)}
    assert found == set(rows)


def test_ing_11_headers_timestamp_and_place_come_back(kafka, publisher):
    """apache/beam#28200: metadata that cannot be carried loses the version of a delete."""
    headers = (("kvquilt.version", b"12"), ("trace", b"\x00\xff"), ("kvquilt.version", b"13"), ("empty", b""))
    told = publisher.publish(kafka.documents_topic, b"doc", None, headers)
    (message,) = read_all(kafka, kafka.documents_topic)
    assert message == told
    assert message.headers == headers
    assert message.header("kvquilt.version") == b"13"
    assert message.timestamp_ms > 1_600_000_000_000


def test_one_document_stays_in_one_partition_in_order(kafka, publisher):
    """Versions without a number are ordered by timestamp and offset, which only means something in one partition."""
    told = [publisher.publish(kafka.documents_topic, b"doc", b"%d" % n) for n in range(5)]
    assert len({message.partition for message in told}) == 1
    assert [message.value for message in read_all(kafka, kafka.documents_topic)] == [b"0", b"1", b"2", b"3", b"4"]


def test_many_messages_report_progress_and_all_arrive(kafka, publisher):
    """A progress bar that stops short, or a batch lost in flight, would go unnoticed without a count."""
    progress = []
    items = [(b"%d" % n, b"x" * 500, ()) for n in range(1500)]
    publisher.publish_many(kafka.documents_topic, items, progress.append)
    assert progress == list(range(1, 1501))
    assert {message.key for message in read_all(kafka, kafka.documents_topic)} == {key for key, _, _ in items}


def test_the_lag_is_right_after_batches_of_several_records(kafka, publisher):
    """The embedded broker says 1 for the end of a partition that holds one batch of any size."""
    publisher.publish_many(kafka.documents_topic, [(b"%d" % n, b"v", ()) for n in range(300)])
    assert lag(kafka, kafka.group, kafka.documents_topic) == 300
    with PartitionReader(kafka, kafka.documents_topic, kafka.group) as reader:
        read(reader, 300)
        assert reader.lag() == 0
        reader.commit(reader.position())
    assert lag(kafka, kafka.group, kafka.documents_topic) == 0
    publisher.publish(kafka.documents_topic, b"one", b"more")
    assert lag(kafka, kafka.group, kafka.documents_topic) == 1


def test_a_large_message_arrives_and_one_that_is_too_large_is_named(kafka, publisher):
    """A 20 MB document must reach the topic to be refused in a dead letter, and 15 MB ones must not stop a reader."""
    sizes = [15 * 1024 * 1024, 1, 20 * 1024 * 1024]
    for size in sizes:
        publisher.publish(kafka.documents_topic, b"doc", b"x" * size)
    assert [len(message.value) for message in read_all(kafka, kafka.documents_topic)] == sizes
    with pytest.raises(InputError, match="split the document"):
        publisher.publish(kafka.documents_topic, b"doc", b"x" * (MAX_MESSAGE_BYTES + 2 * 1024 * 1024))
    assert publisher.publish(kafka.documents_topic, b"doc", b"small again").offset == 3


def test_a_group_goes_on_where_it_committed(kafka, publisher):
    """Without a commit from the beginning, with one from there: never by kafka-python's own reset."""
    for n in range(4):
        publisher.publish(kafka.documents_topic, b"doc", b"%d" % n)
    with PartitionReader(kafka, kafka.documents_topic, kafka.group) as reader:
        assert reader.committed() == {}
        first = read(reader, 2)
        partition = first[0].partition
        reader.commit({partition: first[-1].offset + 1})
    with PartitionReader(kafka, kafka.documents_topic, kafka.group) as reader:
        assert reader.committed() == {partition: 2}
        assert [message.value for message in read(reader, 2)] == [b"2", b"3"]
    with PartitionReader(kafka, kafka.documents_topic, "another-" + kafka.group) as reader:
        assert len(read(reader, 4)) == 4


def test_ing_15_what_was_polled_and_not_committed_comes_again(kafka, publisher):
    """Committing while listing, before anything is written, loses what a crash interrupts."""
    publisher.publish(kafka.documents_topic, b"doc", b"v")
    with PartitionReader(kafka, kafka.documents_topic, kafka.group) as reader:
        (before,) = read(reader, 1)
    with PartitionReader(kafka, kafka.documents_topic, kafka.group) as reader:
        assert read(reader, 1) == [before]


@pytest.mark.parametrize("stale", ["never fetched", "fetched before"])
def test_an_offset_out_of_range_falls_back_to_the_beginning_aloud(kafka, publisher, caplog, stale):
    """A topic that was made anew: `latest` would skip everything in it, and the embedded broker says nothing at all."""
    told = publisher.publish(kafka.documents_topic, b"doc", b"v")
    with PartitionReader(kafka, kafka.documents_topic, kafka.group) as reader:
        if stale == "fetched before":
            read(reader, 1)
        reader.seek({told.partition: 5_000})
        assert [message.value for message in read(reader, 1)] == [b"v"]
        assert reader.position()[told.partition] == 1
    assert "offset 5000 is out of range; reading from its beginning, offset 0" in caplog.text


def test_a_missing_topic_is_an_error(kafka):
    """kafka-python reads a topic that does not exist as an empty one, for ever."""
    with pytest.raises(TopicError, match="does not exist"):
        PartitionReader(kafka, kafka.documents_topic, kafka.group)


@pytest.mark.service
def test_publishing_to_a_missing_topic_is_an_error(apache_kafka, request):
    """A misspelled topic must not swallow documents. (The embedded broker makes the topic, whatever it is told.)"""
    kafka = kafka_settings(apache_kafka.bootstrap, request.node.nodeid)
    with pytest.raises(TopicError, match=f"writing to topic {kafka.documents_topic}"), Publisher(kafka) as publisher:
        publisher.publish(kafka.documents_topic, b"doc", b"v")


def test_ing_13_a_slow_handler_can_still_commit(kafka, publisher):
    """dpkp/kafka-python#1401: a rebalance, or another process of the group, fences the commit of a slow handler."""
    publisher.publish(kafka.documents_topic, b"doc", b"v")
    with PartitionReader(kafka, kafka.documents_topic, kafka.group) as slow:
        (message,) = read(slow, 1)
        with PartitionReader(kafka, kafka.documents_topic, kafka.group) as other:
            assert read(other, 1) == [message]
            other.commit(other.position())
        slow.commit(slow.position())
        assert slow.committed()[message.partition] == 1


@pytest.mark.service
def test_ing_13_a_reader_is_no_group_member(apache_kafka, request):
    """Nothing to rebalance: the group has offsets and no members, however long a handler takes."""
    kafka = kafka_settings(apache_kafka.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    with Publisher(kafka) as publisher:
        publisher.publish(kafka.documents_topic, b"doc", b"v")
    with PartitionReader(kafka, kafka.documents_topic, kafka.group) as reader:
        read(reader, 1)
        reader.commit(reader.position())
        admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        try:
            described = admin.describe_groups([kafka.group])
        finally:
            admin.close()
    assert described[kafka.group]["members"] == []


@pytest.mark.service
def test_a_record_without_a_key_is_refused_for_good_by_a_compacted_topic(apache_kafka, request):
    """Retrying it for ever would block every document behind it. (The embedded broker takes it.)"""
    kafka = kafka_settings(apache_kafka.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    with Publisher(kafka) as publisher:
        with pytest.raises(InputError, match="refuses a record without a key"):
            publisher.publish(kafka.documents_topic, None, b"v")
        publisher.publish(kafka.documents_topic, b"doc", b"the next one")


def test_two_readers_of_two_groups_do_not_disturb_each_other(kafka, publisher):
    """Index and prefill read with groups of their own; each sees everything."""
    publisher.publish_many(kafka.documents_topic, [(b"%d" % n, b"v", ()) for n in range(20)])
    with (
        PartitionReader(kafka, kafka.documents_topic, kafka.group + ".a") as one,
        PartitionReader(kafka, kafka.documents_topic, kafka.group + ".b") as other,
    ):
        assert len(read(one, 20)) == len(read(other, 20)) == 20
        one.commit(one.position())
        assert other.committed() == {}


@pytest.mark.parametrize(("key", "value"), [(b"doc", b"{not json"), (b"\xff", None), (None, b"v"), (None, None)])
def test_a_dead_letter_keeps_the_original_bytes(kafka, publisher, key, value):
    """A dead letter that cannot be replayed is a lost document."""
    headers = (("kvquilt.version", b"7"), ("kvquilt.error.stage", b"an older failure"))
    source = publisher.publish(kafka.commits_topic, key or b"k", value, headers)
    message = source.__class__(source.topic, 2, 41, 1_234, key, value, headers)
    publisher.dead_letter(
        kafka, message, InputError("what was wrong: é\ud800" + "x" * 10_000), stage="parse", attempts=3
    )
    (letter,) = read_all(kafka, kafka.dead_letter_topic)
    assert (letter.key, letter.value) == (key, value)
    cause = letter.header("kvquilt.error.message")
    assert cause.decode().startswith("what was wrong: é?xxx")
    assert len(cause) <= 4_096
    assert dict(letter.headers) == {
        "kvquilt.version": b"7",
        "kvquilt.error.class": b"InputError",
        "kvquilt.error.message": cause,
        "kvquilt.error.stage": b"parse",
        "kvquilt.error.attempts": b"3",
        "kvquilt.error.topic": kafka.commits_topic.encode(),
        "kvquilt.error.partition": b"2",
        "kvquilt.error.offset": b"41",
        "kvquilt.error.timestamp": b"1234",
    }
    assert len([name for name, _ in letter.headers if name == "kvquilt.error.stage"]) == 1


def test_commit_records_are_keyed_by_document(kafka, publisher):
    """Compaction keeps the newest record per key: the key names tenant, document and generation, however spelled."""
    record = CommitRecord(
        tenant="t:1",
        doc_id='a"/é',
        version=3,
        state=DocumentState.DELETED,
        generation="g",
        event_ms=1,
        committed_ms=2,
    )
    publisher.commit_record(kafka, record)
    (message,) = read_all(kafka, kafka.commits_topic)
    assert message.key == '["t:1","a\\"/é","g"]'.encode()
    assert CommitRecord.from_bytes(message.value) == record


@pytest.mark.service
def test_the_topics_are_configured_as_wanted(apache_kafka, request):
    """Documents that are not compacted cannot be backfilled from; dead letters that are would be lost."""
    kafka = kafka_settings(apache_kafka.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    names = [kafka.documents_topic, kafka.commits_topic, kafka.dead_letter_topic]
    found = admin.describe_configs(
        [ConfigResource(ConfigResourceType.TOPIC, name) for name in names], config_filter="all"
    )
    admin.close()
    policies = [found["topic"][name]["cleanup.policy"]["value"] for name in names]
    assert policies == ["compact", "compact", "delete"]
    assert int(found["topic"][kafka.documents_topic]["max.message.bytes"]["value"]) == MAX_MESSAGE_BYTES


@pytest.mark.service
def test_topics_made_by_others_are_checked(apache_kafka, request, caplog):
    """A compacted dead-letter topic drops letters; a documents topic with retention drops documents."""
    kafka = kafka_settings(apache_kafka.bootstrap, request.node.nodeid)
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    options = {"num_partitions": 1, "replication_factor": 1}
    compacted = options | {"configs": {"cleanup.policy": "compact"}}
    try:
        admin.create_topics({kafka.documents_topic: options}, wait_for_metadata=True)
        with caplog.at_level(logging.WARNING):
            ensure_topics(kafka)
        assert f"topic {kafka.documents_topic} has cleanup.policy=delete" in caplog.text
        assert f"topic {kafka.documents_topic} has max.message.bytes=1048588" in caplog.text
        other = kafka.model_copy(update={"documents_topic": kafka.documents_topic + "-2"})
        admin.create_topics({other.dead_letter_topic: compacted}, wait_for_metadata=True)
        with pytest.raises(TopicError, match=r"cleanup.policy=compact.*set cleanup.policy=delete"):
            ensure_topics(other)
    finally:
        admin.close()


@pytest.mark.service
def test_an_aborted_transaction_was_never_said_and_leaves_no_lag(apache_kafka, request):
    """Its records and the control records of every transaction are gaps in the offsets, also at the very end."""
    kafka = kafka_settings(apache_kafka.bootstrap, request.node.nodeid)
    ensure_topics(kafka)
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=kafka.group)
    producer.init_transactions()
    for value, end in ((b"said", producer.commit_transaction), (b"taken back", producer.abort_transaction)):
        producer.begin_transaction()
        producer.send(kafka.documents_topic, key=b"doc", value=value).get(10)
        end()
    producer.close()
    assert [message.value for message in read_all(kafka, kafka.documents_topic)] == [b"said"]
    with PartitionReader(kafka, kafka.documents_topic, kafka.group) as reader:
        read(reader, 1)
        for _ in range(20):
            assert reader.poll(1, 0.2) == []
            if reader.lag() == 0:
                break
        assert reader.lag() == 0
        reader.commit(reader.position())
    assert lag(kafka, kafka.group, kafka.documents_topic) == 0


def test_ing_06_automatic_commits_are_refused():
    """apache/beam#21742: auto-commit moves offsets past what has no effect yet."""
    for spelling in ("enable.auto.commit", "enable_auto_commit"):
        with pytest.raises(ValueError, match="enable_auto_commit is refused"):
            KafkaSettings(bootstrap="localhost:1", security={spelling: True})


def test_settings_that_are_ours_or_unknown_are_refused():
    """A security section that could set the group or the reset policy would undo what the reader decides."""
    with pytest.raises(SettingsError, match="must not set auto_offset_reset, group_id"):
        Publisher(KafkaSettings(bootstrap="localhost:1", security={"group_id": "g", "auto.offset.reset": "latest"}))
    with pytest.raises(SettingsError, match="sasl_plain_user"):
        ensure_topics(KafkaSettings(bootstrap="localhost:1", security={"sasl_plain_user": "u"}))
    with pytest.raises(SettingsError, match=r"kafka.bootstrap is empty.*kvquilt up"):
        Publisher(KafkaSettings())
