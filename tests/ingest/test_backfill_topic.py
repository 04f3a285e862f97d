"""Backfill from a topic: all there is when it begins, in whatever format, and no trace in the consumer groups."""

import json

import pytest
from kafka import KafkaProducer

from ingest.sources import survey
from schemas.errors import TopicError
from stores.topics import PartitionReader, ensure_topics
from tests.ingest.backfilling import backfill


def of_topic(kafka):
    return survey([], topic=kafka.documents_topic, kafka=kafka)


def test_a_topic_is_read_from_its_start_to_the_end_it_had_and_no_offset_is_committed(world, kafka):
    ensure_topics(kafka)
    world.connect(kafka)
    for n in range(20):
        world.change(f"text {n}", doc_id=f"d{n}")
    world.change("changed", doc_id="d3")
    world.raw(b"{broken", key=b"bad")
    world.raw(json.dumps({"specversion": "1.0", "id": "1", "source": "/x", "type": "t", "data": {"content": "cloud"}})
              .encode(), key=b"event")  # fmt: skip
    source = of_topic(kafka)
    world.change("too late", doc_id="d4")
    done = backfill(world, source=source)
    assert (done.total, done.dead) == (23, 1)
    assert (world.texts("d3"), world.texts("d4"), world.texts("event")) == ("changed", "text 4", "cloud")
    for pipeline in ("index", "prefill"):
        with PartitionReader(kafka, kafka.documents_topic, kafka.group_of(pipeline)) as reader:
            assert reader.committed() == {}
    world.embedder.embedded.clear()
    again = backfill(world, source=source)
    assert (again.committed, again.repeated + again.superseded, world.embedder.embedded) == (0, 22, [])
    world.assert_clean()
    world.publisher.close()


def test_ing_16_a_null_value_in_the_topic_is_a_deletion_and_no_decoding_error(world, memory_broker, kafka_of):
    kafka = kafka_of(memory_broker)
    world.connect(kafka)
    world.change("text", doc_id="a")
    world.change("text", doc_id="b")
    world.change(None, doc_id="a")
    done = backfill(world, source=of_topic(kafka))
    assert (done.total, done.dead) == (3, 0)
    assert (world.texts("a"), world.texts("b")) == (None, "text")
    assert backfill(world, source=of_topic(kafka)).committed == 0
    world.publisher.close()


def test_a_topic_that_does_not_exist_is_said(memory_broker, kafka_of):
    kafka = kafka_of(memory_broker).model_copy(update={"documents_topic": "absent"})
    with pytest.raises(TopicError, match="topic absent does not exist"):
        of_topic(kafka)


@pytest.mark.service
def test_gaps_of_offsets_are_no_rows_that_are_waited_for(world, apache_kafka, kafka_of):
    """Markers of transactions, and what was taken back, have offsets: compaction leaves the same gaps."""
    kafka = kafka_of(apache_kafka)
    world.connect(kafka)
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=kafka.group)
    producer.init_transactions()
    for n, end in enumerate([producer.commit_transaction, producer.abort_transaction, producer.commit_transaction]):
        producer.begin_transaction()
        producer.send(kafka.documents_topic, key=f"d{n}".encode(), value=json.dumps({"content": f"text {n}"}).encode())
        producer.flush()
        end()
    producer.close()
    source = of_topic(kafka)
    done = backfill(world, source=source)
    assert source.n_rows > done.total == 2
    assert (world.texts("d0"), world.texts("d1"), world.texts("d2")) == ("text 0", None, "text 2")
    world.publisher.close()


@pytest.fixture
def kafka_of(request):
    """Settings with topics of this test on a broker."""
    from tests.services.fixtures import kafka_settings

    def made(broker):
        kafka = kafka_settings(broker.bootstrap, request.node.nodeid)
        ensure_topics(kafka)
        return kafka

    return made
