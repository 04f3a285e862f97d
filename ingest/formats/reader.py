"""A Kafka message to a change event: which format it has, and what it says."""

from __future__ import annotations

from typing import Any

from ingest.formats import cloudevents, debezium, framing
from ingest.formats.extract import resolve
from ingest.formats.fetch import Fetcher
from ingest.formats.keys import RecordKey, read_key
from ingest.formats.place import At
from ingest.formats.records import record_event
from ingest.formats.registry import Registry
from schemas.errors import EventError
from schemas.events import (
    DEFAULT_TENANT,
    ChangeEvent,
    check_size,
    header_tenant,
    load_object,
    make_deletion,
    make_event,
    read_body,
)
from schemas.settings import EventSettings
from stores.topics import Message


class EventReader:
    """Reads messages of every format that docs/events.md lists; safe to use from several threads.

    The formats cannot be confused: CloudEvents are known by their headers or by `specversion`, framed values by their
    first byte, Debezium's envelopes by `op`; our own JSON refuses all of these as unknown fields.
    """

    def __init__(self, settings: EventSettings | None = None) -> None:
        self._settings = settings or EventSettings()
        self._registry = Registry(self._settings.registry)
        self._fetcher = Fetcher(self._settings.fetch)

    def read(self, message: Message) -> ChangeEvent:
        """The change that a message is about, with its content as text or markdown.

        Raises:
            EventError: the message, or what it refers to, is wrong and always will be: a dead letter.
            StoreError: the registry, or a server that content is fetched from, failed. Try again.
        """
        return resolve(self.parse(message), self._fetcher)

    def parse(self, message: Message) -> ChangeEvent:
        """The same, before references are fetched and text is extracted."""
        key = read_key(message.key, self._settings.fields, self._registry)
        event = self._parse(message, key)
        if key is not None and key.tenant is not None and key.tenant != event.tenant:
            raise EventError(
                f"the message key says tenant {key.tenant!r} and the event says {event.tenant!r}; they must agree"
            )
        return event

    def _parse(self, message: Message, key: RecordKey | None) -> ChangeEvent:
        at = At.of(message, key)
        if message.value is None:
            return self._deletion(at, key)
        if cloudevents.is_binary(at.headers):
            return cloudevents.read_binary(message.value, at, self._settings)
        if cloudevents.is_structured(at.headers):
            return cloudevents.read_structured(load_object(message.value), at, self._settings)
        if framing.is_framed(message.value):
            check_size(message.value)
            return self._record(framing.decode(message.value, self._registry), at, key)
        return self._json(load_object(message.value), at, key)

    def close(self) -> None:
        """Close the connections."""
        self._registry.close()
        self._fetcher.close()

    def _json(self, body: dict[str, Any], at: At, key: RecordKey | None) -> ChangeEvent:
        if "specversion" in body:
            return cloudevents.read_structured(body, at, self._settings)
        envelope = debezium.envelope(body)
        if envelope is None:
            return make_event(at.doc_id, read_body(body), version=at.version, event_ms=at.timestamp_ms, **at.order)
        return debezium.read(envelope, at, key, self._settings)

    def _record(self, record: dict[str, Any], at: At, key: RecordKey | None) -> ChangeEvent:
        envelope = debezium.envelope(record)
        if envelope is None:
            return record_event(record, at, self._settings.fields)
        return debezium.read(envelope, at, key, self._settings)

    def _deletion(self, at: At, key: RecordKey | None) -> ChangeEvent:
        if cloudevents.is_binary(at.headers):
            return cloudevents.read_binary(None, at, self._settings)
        own = key.tenant if key is not None else None  # our own key names the tenant: no header is needed
        if key is not None and own is None and at.version is None:
            return debezium.tombstone(at, key, self._settings)  # of a connector
        tenant = header_tenant(at.headers) or own or DEFAULT_TENANT
        return make_deletion(at.doc_id, tenant, at.version, event_ms=at.timestamp_ms, **at.order)
