"""Kafka: the topics and their set-up; the door to writing (`Publisher`) and reading (`PartitionReader`).

kafka-python speaks the protocol; the broker is Apache Kafka or the embedded one of `stores.broker`.
"""

from __future__ import annotations

import logging
from typing import Any

from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import TopicAlreadyExistsError

from schemas.errors import TopicError
from schemas.settings import KafkaSettings
from stores.group_reader import open_reader
from stores.kafka_client import MAX_DEAD_LETTER_BYTES, MAX_MESSAGE_BYTES, Message, connection, kafka_errors
from stores.partition_reader import PartitionReader, Tenure
from stores.publisher import Publisher
from stores.whole_topic import lag, read_all

__all__ = [
    "Message",
    "PartitionReader",
    "Publisher",
    "Tenure",
    "ensure_topics",
    "lag",
    "open_reader",
    "read_all",
    "wanted_topics",
]

log = logging.getLogger(__name__)

COMPACT = {"cleanup.policy": "compact"}


def wanted_topics(kafka: KafkaSettings) -> dict[str, dict[str, str]]:
    """The topics that kvquilt needs and how each is configured.

    Documents and commits are compacted: the newest record of a document is kept for ever, so that reading from the
    beginning is a backfill. Dead letters are kept whole, for as long as the broker's retention says.
    """
    return {
        kafka.documents_topic: COMPACT | {"max.message.bytes": str(MAX_MESSAGE_BYTES)},
        kafka.commits_topic: COMPACT,
        kafka.dead_letter_topic: {"cleanup.policy": "delete", "max.message.bytes": str(MAX_DEAD_LETTER_BYTES)},
    }


def ensure_topics(kafka: KafkaSettings) -> None:
    """Create the topics that are missing; check those that exist.

    An existing topic is never changed. A compacted dead-letter topic is refused, since it would drop dead letters; a
    documents or commits topic that is not compacted, or one with a smaller `max.message.bytes`, is used with a warning.

    Raises:
        TopicError: the broker does not answer, refuses, or holds a dead-letter topic that would lose letters.
    """
    with kafka_errors(kafka, "setting up topics"):
        admin = KafkaAdminClient(**connection(kafka))
        try:
            wanted = wanted_topics(kafka)
            existing = set(admin.list_topics()) & wanted.keys()
            for topic in wanted.keys() - existing:
                _create(admin, kafka, topic, wanted[topic])
            for topic, config in _configs(admin, existing).items():
                _check(topic, config, wanted[topic])
        finally:
            admin.close()


def _create(admin: Any, kafka: KafkaSettings, topic: str, config: dict[str, str]) -> None:
    new = {"num_partitions": kafka.partitions, "replication_factor": kafka.replication, "configs": config}
    try:
        admin.create_topics({topic: new}, wait_for_metadata=True)
        log.info("created topic %s with %d partitions", topic, kafka.partitions)
    except TopicAlreadyExistsError:  # another process of ours was quicker
        admin.wait_for_topics([topic])


def _configs(admin: Any, topics: set[str]) -> dict[str, dict[str, str]]:
    """The settings of each topic; empty ones on the embedded broker, which tells none."""
    if not topics:
        return {}
    asked = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in sorted(topics)]
    found = admin.describe_configs(asked, config_filter="all").get("topic", {})
    return {
        topic: {name: str(entry["value"]) for name, entry in entries.items() if entry.get("value") is not None}
        for topic, entries in found.items()
    }


def _check(topic: str, config: dict[str, str], wanted: dict[str, str]) -> None:
    policy = config.get("cleanup.policy", wanted["cleanup.policy"])
    if "compact" in wanted["cleanup.policy"] and "compact" not in policy:
        log.warning(
            "topic %s has cleanup.policy=%s: what it drops cannot be read again; compact is wanted", topic, policy
        )
    if "compact" not in wanted["cleanup.policy"] and "compact" in policy:
        raise TopicError(
            f"topic {topic} has cleanup.policy={policy}: two dead letters of one document would become one; "
            "set cleanup.policy=delete"
        )
    limit = wanted.get("max.message.bytes")
    if limit is not None and int(config.get("max.message.bytes", limit)) < int(limit):
        log.warning(
            "topic %s has max.message.bytes=%s: larger documents are refused; kvquilt would use %s",
            topic,
            config["max.message.bytes"],
            limit,
        )
