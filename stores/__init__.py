"""Where it is kept: Kafka topics, the vector index, the object store and the KV artifacts in it.

Names are loaded when they are first used, so that who needs the object store does not pay for Kafka and Qdrant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stores.blobs import Blobs, open_blobs
    from stores.broker import EmbeddedBroker
    from stores.certificates import CertificateStore
    from stores.clock import Clock, MovableClock, SystemClock
    from stores.kv_store import KvStore
    from stores.topics import Message, PartitionReader, Publisher, ensure_topics, lag, read_all
    from stores.vectors import Hit, VectorIndex, VisibleHit, open_index

__all__ = [
    "Blobs",
    "CertificateStore",
    "Clock",
    "EmbeddedBroker",
    "Hit",
    "KvStore",
    "Message",
    "MovableClock",
    "PartitionReader",
    "Publisher",
    "SystemClock",
    "VectorIndex",
    "VisibleHit",
    "ensure_topics",
    "lag",
    "open_blobs",
    "open_index",
    "read_all",
]

_MODULES = {
    "stores.blobs": ("Blobs", "open_blobs"),
    "stores.broker": ("EmbeddedBroker",),
    "stores.certificates": ("CertificateStore",),
    "stores.clock": ("Clock", "MovableClock", "SystemClock"),
    "stores.kv_store": ("KvStore",),
    "stores.topics": ("Message", "PartitionReader", "Publisher", "ensure_topics", "lag", "read_all"),
    "stores.vectors": ("Hit", "VectorIndex", "VisibleHit", "open_index"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
