"""Brokers to test against: the same tests run on the embedded one, in memory and on a folder, and on Apache Kafka."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator

import pytest

from schemas.settings import KafkaSettings
from stores.broker import EmbeddedBroker
from tests.services.kafka import ApacheKafka, ServiceAbsentError

Broker = EmbeddedBroker | ApacheKafka

BROKERS = ["memory", "folder", pytest.param("apache", marks=pytest.mark.service)]


@pytest.fixture(scope="session")
def apache_kafka(tmp_path_factory) -> Iterator[ApacheKafka]:
    """A running Apache Kafka, one for the whole session."""
    try:
        broker = ApacheKafka(tmp_path_factory.mktemp("apache-kafka"))
    except ServiceAbsentError as absent:
        pytest.skip(str(absent))
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def memory_broker() -> Iterator[EmbeddedBroker]:
    """The embedded broker, keeping nothing."""
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture(scope="session")
def folder_broker(tmp_path_factory) -> Iterator[EmbeddedBroker]:
    """The embedded broker, as `kvquilt up` has it."""
    with EmbeddedBroker(tmp_path_factory.mktemp("embedded-broker")) as broker:
        yield broker


@pytest.fixture(params=BROKERS)
def broker(request) -> Broker:
    """Each kind of broker in turn, shared by the session."""
    return request.getfixturevalue("apache_kafka" if request.param == "apache" else f"{request.param}_broker")


@pytest.fixture
def kafka(broker, request) -> KafkaSettings:
    """Settings with topics and a group that no other test uses; the topics do not exist yet."""
    return kafka_settings(broker.bootstrap, request.node.nodeid)


@pytest.fixture(autouse=True)
def quiet_kafka_client() -> Iterator[None]:
    """kafka-python logs an error for every refused connection, many a second while a broker is away."""
    logger = logging.getLogger("kafka")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def kafka_settings(bootstrap: str, unique: str) -> KafkaSettings:
    """Settings whose names are derived from `unique`."""
    name = hashlib.sha256(unique.encode()).hexdigest()[:12]
    return KafkaSettings(
        bootstrap=bootstrap,
        documents_topic=f"documents-{name}",
        commits_topic=f"commits-{name}",
        group=f"group-{name}",
        partitions=3,
    )
