"""Every error kvquilt raises on purpose.

KvquiltError
├── InputError               what somebody sent is wrong; sending it again unchanged cannot help
│   ├── SettingsError        a setting, at start-up
│   ├── EventError           a change event: becomes a dead letter
│   └── RequestError         an HTTP request: becomes a 4xx with OpenAI's error object
├── Cancelled                whoever asked is gone; nothing is wrong
├── ArtifactMiss             a KV artifact that cannot be used; the chunk is computed fresh
├── UnsupportedModelError    a model that cannot be served, or not with reuse
└── StoreError               an outside system failed; trying again may help
    ├── TopicError           the Kafka broker
    ├── VectorIndexError     the vector index (Qdrant)
    ├── BlobError            the object store
    ├── RegistryError        the schema registry
    └── FetchError           a server of content that events refer to
"""

from __future__ import annotations

from enum import StrEnum


class KvquiltError(Exception):
    """Base of all errors raised on purpose; the message says what was wrong, what was expected and what to do."""


class InputError(KvquiltError):
    """Something that was sent to us is wrong."""


class SettingsError(InputError):
    """A setting is missing, unknown or has a wrong value."""


class EventError(InputError):
    """A change event cannot be processed and never will be: it belongs in the dead-letter topic.

    Args:
        message: what was wrong, what was expected.
        stage: the pipeline step that refused it: `parse`, `plan`, `embed`, `prefill`.
    """

    def __init__(self, message: str, stage: str = "parse") -> None:
        super().__init__(message)
        self.stage = stage


class RequestError(InputError):
    """An HTTP request cannot be served as it is.

    Args:
        message: what was wrong, what was expected.
        status: the HTTP status, 4xx.
        code: a stable machine-readable code, as in OpenAI's error object.
        param: the request field at fault, if it is one field.
    """

    def __init__(
        self, message: str, status: int = 400, code: str = "invalid_request", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Cancelled(KvquiltError):  # noqa: N818 - not a fault
    """Work was given up because nobody waits for it any more."""


class MissReason(StrEnum):
    """Why a KV artifact was not used. The values are metric labels: keep them stable."""

    MISSING = "missing"
    TRUNCATED = "truncated"
    FORMAT = "format"
    FINGERPRINT = "fingerprint"
    TOKEN_IDS = "token_ids"
    CHECKSUM = "checksum"
    TIMEOUT = "timeout"
    SLOWER = "slower"  # than computing the rows
    STORE = "store"
    NEIGHBOUR = "neighbour"  # a fused one: a chunk that it was made with is not visible; rows of pass 1 serve


class ArtifactMiss(KvquiltError):  # noqa: N818 - a miss is an outcome, not a fault
    """A KV artifact is absent, damaged or not ours. Serving goes on without it."""

    def __init__(self, reason: MissReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnsupportedModelError(KvquiltError):
    """The model cannot be loaded, or its rotary layout is not one that we know."""


class StoreError(KvquiltError):
    """An outside system did not do what it was asked. The operation may be tried again."""


class TopicError(StoreError):
    """Kafka: unreachable, a missing topic, a refused commit."""


class VectorIndexError(StoreError):
    """Qdrant: unreachable, a missing collection, a refused write."""


class BlobError(StoreError):
    """The object store: unreachable, a refused write."""


class RegistryError(StoreError):
    """The schema registry: unreachable, or it refuses or answers with something else."""


class FetchError(StoreError):
    """Content that an event refers to cannot be had now."""
