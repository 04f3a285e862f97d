"""Fixtures of all tests. The services of tests/services start on first use, once a session."""

from tests.services.fixtures import apache_kafka, broker, folder_broker, kafka, memory_broker, quiet_kafka_client

__all__ = ["apache_kafka", "broker", "folder_broker", "kafka", "memory_broker", "quiet_kafka_client"]
