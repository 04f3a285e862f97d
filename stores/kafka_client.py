"""What every Kafka client of ours shares: the message, the connection settings, the translation of errors.

kafka-python is imported by the modules of this folder only; callers see `Message` and `TopicError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kafka.errors import KafkaConfigurationError, KafkaError

from schemas.errors import SettingsError, TopicError
from schemas.settings import KafkaSettings

Headers = tuple[tuple[str, bytes | None], ...]

BOOTSTRAP_TIMEOUT_MS = 10_000
REQUEST_TIMEOUT_MS = 15_000
# The default of 30 s leaves a reader deaf for half a minute after a broker of one node came back.
RECONNECT_BACKOFF_MAX_MS = 1_000

# A document of 20 MB must reach the topic to be refused by name in a dead letter; 32 MiB leaves room for that, and
# a dead letter is its message and some headers more.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
MAX_DEAD_LETTER_BYTES = MAX_MESSAGE_BYTES + 1024 * 1024

OURS = {"bootstrap_servers", "group_id", "auto_offset_reset", "enable_auto_commit", "acks", "enable_idempotence"}


@dataclass(frozen=True)
class Message:
    """One record of a topic, as it came from the broker.

    `timestamp_ms` is ms since the epoch (the producer's, or the broker's where the topic says so), -1 if the
    record has none. A value of None is a tombstone.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    def header(self, name: str) -> bytes | None:
        """The last value under `name`, or None."""
        return next((value for key, value in reversed(self.headers) if key == name), None)


def connection(kafka: KafkaSettings) -> dict[str, Any]:
    """Arguments for any kafka-python client; raises `SettingsError` where they cannot be used."""
    if not kafka.bootstrap:
        raise SettingsError(
            "kafka.bootstrap is empty; name a broker as host:port, or run `kvquilt up`, which has its own"
        )
    clash = sorted({name.replace(".", "_") for name in kafka.security} & OURS)
    if clash:
        raise SettingsError(
            f"kafka.security must not set {', '.join(clash)}: kvquilt sets that itself; "
            "use it for security_protocol, sasl_… and ssl_…"
        )
    return {
        "bootstrap_servers": kafka.bootstrap.split(","),
        "client_id": "kvquilt",
        "bootstrap_timeout_ms": BOOTSTRAP_TIMEOUT_MS,
        "request_timeout_ms": REQUEST_TIMEOUT_MS,
        "reconnect_backoff_max_ms": RECONNECT_BACKOFF_MAX_MS,
        **kafka.security,
    }


@contextmanager
def kafka_errors(kafka: KafkaSettings, doing: str) -> Iterator[None]:
    """Turn kafka-python's errors into ours; `doing` says what failed, such as `reading topic documents`."""
    try:
        yield
    except KafkaConfigurationError as error:
        raise SettingsError(f"kafka.security: {error}") from error
    except (KafkaError, OSError) as error:
        detail = str(error) or type(error).__name__
        raise TopicError(f"{doing}: broker {kafka.bootstrap}: {detail}") from error
