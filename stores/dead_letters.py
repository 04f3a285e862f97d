"""Dead letters: reading them, sending them again, and dismissing them.

The topic is a log of records told apart by their headers: letters (`kvquilt.error.…`, written by
`Publisher.dead_letter`), and notes that a letter was sent again (`kvquilt.replayed.…`) or that nobody wants it any
more (`kvquilt.dismissed.…`). Nothing is ever removed from it but by the broker's retention.

A letter that is sent again keeps its place in the order of changes: headers carry the timestamp and offset that it
came with first, and `in_its_place` puts them back where a version is to be made of them. Without that an old event
without a version would become the newest, and win over what came after it. In the topic it would still be the last
under its key, which is what compaction keeps: so it is not sent again where a newer change of its document is there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from schemas.errors import EventError, InputError
from schemas.events import header_number, header_version, last_headers, load_object
from schemas.ids import packed_version
from schemas.settings import KafkaSettings
from stores.kafka_client import Message
from stores.publisher import ERROR_HEADERS, Publisher

REPLAY_HEADERS = "kvquilt.replay."  # on an event that is sent again: .timestamp and .offset, its first ones
REPLAYED_HEADERS = "kvquilt.replayed."  # on a note: .letter, and where to: .topic, .partition, .offset
DISMISSED_HEADERS = "kvquilt.dismissed."  # on a note: .letter

_ID = re.compile("([0-9]{1,19}):([0-9]{1,19})")
_NUMBER = re.compile("-?[0-9]{1,19}")


class LetterId(NamedTuple):
    """Where a letter lies in its topic; written `partition:offset`."""

    partition: int
    offset: int

    @classmethod
    def of(cls, text: str) -> LetterId:
        """The id in `text`; raises `InputError` where it is none."""
        found = _ID.fullmatch(text)
        if found is None:
            raise InputError(
                f"{text!r:.60} names no dead letter; expected partition:offset, as `kvquilt dlq ls` shows it"
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


@dataclass(frozen=True)
class DeadLetter:
    """A message that was put aside, and why.

    Attributes:
        error, message, stage, attempts: the class of the error and what it said; the step that gave up, after so many
            tries.
        topic, partition, offset, timestamp_ms: where the message had come from.
        key, headers: as they were.
        value: as it was; None for a null value, and where it was not kept.
        nbytes: of the value, also where it was not kept; None for a null value.
        omitted: the value was too large for the topic and is lost here: the letter cannot be sent again.
        replayed: how often it was sent again.
        dismissed: someone decided that it is not wanted any more.
    """

    id: LetterId
    put_aside_ms: int
    error: str
    message: str
    stage: str
    attempts: int
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    value: bytes | None
    nbytes: int | None
    omitted: bool
    replayed: int = 0
    dismissed: bool = False

    @property
    def settled(self) -> bool:
        """Nothing is left to do about it: it was sent again, or dismissed."""
        return self.replayed > 0 or self.dismissed

    @property
    def key_text(self) -> str:
        """The key for people; usually the id of a document."""
        return "" if self.key is None else self.key.decode("utf-8", "replace")


def read_letters(messages: Iterable[Message], *, values_of: Collection[LetterId] = ()) -> list[DeadLetter]:
    """The letters among the records of the topic, oldest first, with what became of each.

    A letter has the headers of its message, which may be called like those of a note: what names an error is a letter.

    Args:
        values_of: letters whose value is kept; a topic of large documents would not fit into memory.
    """
    letters: dict[LetterId, DeadLetter] = {}
    replayed: Counter[LetterId] = Counter()
    dismissed: set[LetterId] = set()
    for message in messages:
        if message.header(ERROR_HEADERS + "class") is not None:
            letter = _letter(message)
            letters[letter.id] = letter if letter.id in values_of else replace(letter, value=None)
        elif (again := _noted(message, REPLAYED_HEADERS)) is not None:
            replayed[again] += 1
        elif (unwanted := _noted(message, DISMISSED_HEADERS)) is not None:
            dismissed.add(unwanted)
    found = [
        replace(letter, replayed=replayed[letter.id], dismissed=letter.id in dismissed) for letter in letters.values()
    ]
    return sorted(found, key=lambda letter: (letter.put_aside_ms, letter.id))


@dataclass(frozen=True)
class Change:
    """A record of the documents topic, by its version: its producer's own, or by timestamp and offset."""

    version: int
    topic: str
    partition: int
    offset: int


def newest(messages: Iterable[Message], letters: Iterable[DeadLetter], kafka: KafkaSettings) -> dict[bytes, Change]:
    """Of the records of the documents topic the newest change under each key of those letters that go there.

    Changes whose version only the reader of their format can tell are left out.
    """
    keys = {letter.key for letter in letters if _home(kafka, letter) == kafka.documents_topic}
    found: dict[bytes, Change] = {}
    for message in messages if keys - {None} else ():
        if message.key is None or message.key not in keys or (version := _version(message)) is None:
            continue
        if message.key not in found or version > found[message.key].version:
            found[message.key] = Change(version, message.topic, message.partition, message.offset)
    return found


def replay(
    publisher: Publisher,
    kafka: KafkaSettings,
    letters: Iterable[DeadLetter],
    changes: Mapping[bytes, Change],
) -> Iterator[Message | InputError]:
    """Send letters again, key, value and headers as they were, each followed by a note in the dead-letter topic.

    What INDEX gave up goes to the documents topic, what PREFILL gave up to the commits topic. For each letter, in
    order, gives where it is now, or why it cannot be sent.

    Args:
        changes: the `newest` ones of the letters' keys.

    Raises:
        TopicError: the broker failed. Letters that were given are sent; the next one may have been sent without a
            note, and sending it twice is harmless.
    """
    for letter in letters:
        try:
            yield _replay(publisher, kafka, letter, changes.get(letter.key or b""))
        except InputError as error:
            yield error


def dismiss(publisher: Publisher, kafka: KafkaSettings, letters: Iterable[DeadLetter]) -> None:
    """Note in the dead-letter topic that nobody wants these letters any more. They stay, and can be sent again.

    Raises:
        TopicError: the broker failed; some may be noted.
    """
    for letter in letters:
        _note(publisher, kafka, letter, DISMISSED_HEADERS)


def in_its_place(message: Message) -> Message:
    """A message that was sent again with the timestamp and offset that it had first; any other as it is.

    Raises:
        EventError: its headers name a place that there cannot be.
    """
    headers = last_headers(message.headers)
    timestamp, offset = (header_number(headers, REPLAY_HEADERS + name) for name in ("timestamp", "offset"))
    if timestamp is None or offset is None:
        return message
    return replace(message, timestamp_ms=timestamp, offset=offset)


def placed_headers(message: Message) -> tuple[tuple[str, bytes | None], ...]:
    """The headers with which a message of the documents topic is published once more, in its place."""
    if message.timestamp_ms < 0 or any(name.startswith(REPLAY_HEADERS) for name, _ in message.headers):
        return message.headers
    return (*message.headers, *_first_place(message.timestamp_ms, message.offset))


def _version(message: Message) -> int | None:
    """The version that INDEX gives a change of our own format; None where it is of another, or cannot be read."""
    headers = last_headers(message.headers)
    if any(name.startswith("ce_") for name in headers):
        return None
    try:
        message, version = in_its_place(message), header_version(headers)
        if version is None and message.value is not None:
            body = load_object(message.value)
            if not {"content", "sha256"} & body.keys():
                return None
            version = body.get("version")
    except EventError:
        return None
    if version is None:
        return packed_version(message.timestamp_ms, message.offset)
    return version if isinstance(version, int) else None


def _replay(publisher: Publisher, kafka: KafkaSettings, letter: DeadLetter, change: Change | None) -> Message:
    if letter.omitted:
        raise InputError(
            f"dead letter {letter.id} was kept without its value of {letter.nbytes or 0:,} bytes, which no topic took: "
            "publish the document again, split"
        )
    came = Message(
        letter.topic, letter.partition, letter.offset, letter.timestamp_ms, letter.key, letter.value, letter.headers
    )
    version = _version(came) if change is not None and _home(kafka, letter) == kafka.documents_topic else None
    if change is not None and version is not None and change.version > version:
        raise InputError(
            f"dead letter {letter.id} has been overtaken by a change of the same document (partition "
            f"{change.partition}, offset {change.offset} of {change.topic}): sent again it would be the last one under "
            "its key, which is what the topic keeps. Dismiss it, or publish the document with what you want of it"
        )
    sent = publisher.publish(
        _home(kafka, letter), letter.key, letter.value, (*_without_replay(letter.headers), *_place(letter))
    )
    where = {"topic": sent.topic, "partition": sent.partition, "offset": sent.offset}
    _note(publisher, kafka, letter, REPLAYED_HEADERS, **where)
    return sent


def _note(publisher: Publisher, kafka: KafkaSettings, letter: DeadLetter, headers: str, **told: object) -> None:
    note = tuple((headers + name, str(value).encode()) for name, value in {"letter": letter.id, **told}.items())
    publisher.publish(kafka.dead_letter_topic, letter.key, None, note)


def _noted(message: Message, headers: str) -> LetterId | None:
    """The letter that a note is about; None for what is no such note, and for one that names no letter."""
    try:
        return LetterId.of((message.header(headers + "letter") or b"").decode("utf-8", "replace"))
    except InputError:
        return None


def _home(kafka: KafkaSettings, letter: DeadLetter) -> str:
    commits = letter.topic == kafka.commits_topic or letter.stage == "prefill"
    return kafka.commits_topic if commits else kafka.documents_topic


def _place(letter: DeadLetter) -> tuple[tuple[str, bytes | None], ...]:
    """Headers with the first place of the letter's message; one that was sent again before has them already."""
    kept = tuple(header for header in letter.headers if header[0].startswith(REPLAY_HEADERS))
    if kept or letter.timestamp_ms < 0:
        return kept
    return _first_place(letter.timestamp_ms, letter.offset)


def _first_place(timestamp_ms: int, offset: int) -> tuple[tuple[str, bytes | None], ...]:
    return (
        (REPLAY_HEADERS + "timestamp", str(timestamp_ms).encode()),
        (REPLAY_HEADERS + "offset", str(offset).encode()),
    )


def _without_replay(headers: tuple[tuple[str, bytes | None], ...]) -> Iterator[tuple[str, bytes | None]]:
    return (header for header in headers if not header[0].startswith(REPLAY_HEADERS))


def _letter(message: Message) -> DeadLetter:
    def told(name: str) -> str:
        return (message.header(ERROR_HEADERS + name) or b"").decode("utf-8", "replace")

    def number(name: str, otherwise: int) -> int:
        text = told(name)
        return int(text) if _NUMBER.fullmatch(text) else otherwise

    omitted = message.header(ERROR_HEADERS + "omitted") is not None
    return DeadLetter(
        id=LetterId(message.partition, message.offset),
        put_aside_ms=message.timestamp_ms,
        error=told("class"),
        message=told("message"),
        stage=told("stage"),
        attempts=number("attempts", 1),
        topic=told("topic"),
        partition=number("partition", -1),
        offset=number("offset", -1),
        timestamp_ms=number("timestamp", -1),
        key=message.key,
        headers=tuple(header for header in message.headers if not header[0].startswith(ERROR_HEADERS)),
        value=message.value,
        nbytes=number("omitted", 0) if omitted else None if message.value is None else len(message.value),
        omitted=omitted,
    )
