"""`kvquilt dlq`: dead letters listed, shown whole, sent again, and dismissed."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cli.context import Context
from cli.running import with_broker
from schemas.errors import InputError
from schemas.settings import KafkaSettings
from stores.dead_letters import DeadLetter, LetterId, dismiss, newest, read_letters, replay
from stores.topics import Publisher, ensure_topics, read_all

_MESSAGE_CHARS = 100  # of a line of `ls`
_LAST_MS = 253_402_300_799_000  # the end of the year 9999: producers write any number for a time


@dataclass(frozen=True)
class Which:
    """Which letters: those with these ids, or those that all of the rest fits. `again`: also the settled ones."""

    ids: tuple[LetterId, ...] = ()
    stage: str | None = None
    error: str | None = None
    key: str | None = None
    again: bool = False

    def has(self, letter: DeadLetter) -> bool:
        """Whether the letter is one of them."""
        if self.ids:
            return letter.id in self.ids
        wanted = ((self.stage, letter.stage), (self.error, letter.error), (self.key, letter.key_text))
        return all(want in (None, is_) for want, is_ in wanted) and (self.again or not letter.settled)


def ls(context: Context, which: Which, limit: int) -> None:
    """Print the letters, newest last, at most the `limit` newest."""
    kafka = with_broker(context.settings).kafka
    letters = _letters(kafka)
    found = [letter for letter in letters if which.has(letter)]
    shown = found[-limit:]
    sent = sum(bool(letter.replayed) for letter in letters)
    dismissed = sum(letter.dismissed for letter in letters)
    text = [
        f"{len(letters)} in {kafka.dead_letter_topic}, {sent} of them sent again, {dismissed} dismissed; "
        f"{len(shown)} of {len(found)} shown"
    ]
    text += [_line(letter) for letter in shown]
    context.result(
        {
            "topic": kafka.dead_letter_topic,
            "total": len(letters),
            "replayed": sent,
            "dismissed": dismissed,
            "matching": len(found),
            "letters": [_plain(letter) for letter in shown],
        },
        "\n".join(text),
    )


def show(context: Context, name: str) -> None:
    """Print one letter with its headers and its value.

    Raises:
        InputError: there is none of that id.
    """
    kafka, letter_id = with_broker(context.settings).kafka, LetterId.of(name)
    letter = next((letter for letter in _letters(kafka, (letter_id,)) if letter.id == letter_id), None)
    if letter is None:
        raise InputError(f"no dead letter {letter_id} in {kafka.dead_letter_topic}; `kvquilt dlq ls` lists them")
    lines = [
        _line(letter),
        f"  {letter.error}: {letter.message}",
        f"  from {letter.topic}, partition {letter.partition}, offset {letter.offset}, {_time(letter.timestamp_ms)}",
        f"  key {letter.key_text!r}, sent again {letter.replayed} times",
    ]
    lines += [f"  {name}: {_text(value)}" for name, value in letter.headers]
    lines.append(_value(letter))
    context.result(_plain(letter) | _payload(letter), "\n".join(lines))


def send_again(context: Context, which: Which, *, dry_run: bool) -> None:
    """Send letters to the topic of the pipeline that gave them up, and note it.

    Raises:
        InputError: there are none, or some cannot be sent; the others were.
    """
    kafka = with_broker(context.settings).kafka
    chosen = _chosen(kafka, which)
    if dry_run:
        context.result(
            {"would_send": [_plain(letter) for letter in chosen]},
            "\n".join([f"{len(chosen)} would be sent again, but for what has been overtaken", *map(_line, chosen)]),
        )
        return
    ensure_topics(kafka)
    changes = newest(read_all(kafka, kafka.documents_topic), chosen, kafka)
    sent: list[dict[str, Any]] = []
    refused: list[str] = []
    with context.progress() as progress, Publisher(kafka) as publisher:
        task = progress.add_task("sent again", total=len(chosen))
        for batch in _batches(chosen):
            outcomes = replay(publisher, kafka, _with_values(kafka, batch), changes)
            for letter, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, InputError):
                    refused.append(f"{letter.id}: {outcome}")
                else:
                    sent.append({"letter": str(letter.id), "topic": outcome.topic, "partition": outcome.partition})
                    sent[-1]["offset"] = outcome.offset
                progress.advance(task)
    for reason in refused:
        context.say(f"not sent: {reason}")
    context.result({"sent": sent, "not_sent": refused}, f"{len(sent)} dead letters sent again")
    if refused:
        raise InputError(f"{len(refused)} of {len(chosen)} cannot be sent, the first: {refused[0]}")


def set_aside(context: Context, which: Which, *, dry_run: bool) -> None:
    """Note that letters are not wanted any more; they are left out of `ls` and of doctor's warning.

    Raises:
        InputError: there are none of these ids.
    """
    kafka = with_broker(context.settings).kafka
    chosen = _chosen(kafka, which)
    if not dry_run:
        with Publisher(kafka) as publisher:
            dismiss(publisher, kafka, chosen)
    context.result(
        {"would_dismiss" if dry_run else "dismissed": [_plain(letter) for letter in chosen]},
        "\n".join([f"{len(chosen)} {'would be ' if dry_run else ''}dismissed", *map(_line, chosen)]),
    )


def _chosen(kafka: KafkaSettings, which: Which) -> list[DeadLetter]:
    chosen = [letter for letter in _letters(kafka) if which.has(letter)]
    missing = set(which.ids) - {letter.id for letter in chosen}
    if missing:
        raise InputError(f"no dead letter {', '.join(map(str, sorted(missing)))} in {kafka.dead_letter_topic}")
    return chosen


def _letters(kafka: KafkaSettings, values_of: Sequence[LetterId] = ()) -> list[DeadLetter]:
    return read_letters(read_all(kafka, kafka.dead_letter_topic), values_of=set(values_of))


_BATCH_NBYTES = 64 * 1024 * 1024  # of values held in memory at a time; each batch reads the topic once more


def _batches(letters: Sequence[DeadLetter]) -> list[list[DeadLetter]]:
    batches: list[list[DeadLetter]] = []
    room = 0
    for letter in letters:
        nbytes = letter.nbytes or 0
        if not batches or nbytes > room:
            batches.append([])
            room = _BATCH_NBYTES
        batches[-1].append(letter)
        room -= nbytes
    return batches


def _with_values(kafka: KafkaSettings, batch: Sequence[DeadLetter]) -> list[DeadLetter]:
    wanted = [letter.id for letter in batch]
    found = {letter.id: letter for letter in _letters(kafka, wanted) if letter.id in wanted}
    lost = next((letter_id for letter_id in wanted if letter_id not in found), None)
    if lost is not None:
        raise InputError(
            f"dead letter {lost} is gone from {kafka.dead_letter_topic}: the broker's retention removed it"
        )
    return [found[letter_id] for letter_id in wanted]


def _line(letter: DeadLetter) -> str:
    again = f", sent again {letter.replayed}x" if letter.replayed else ""
    again += ", dismissed" if letter.dismissed else ""
    said = letter.message if len(letter.message) <= _MESSAGE_CHARS else letter.message[:_MESSAGE_CHARS] + "…"
    return f"{letter.id!s:>8}  {_time(letter.put_aside_ms)}  {letter.stage:<7} {letter.key_text}: {said}{again}"


def _plain(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": str(letter.id),
        "put_aside_ms": letter.put_aside_ms,
        "stage": letter.stage,
        "error": letter.error,
        "message": letter.message,
        "attempts": letter.attempts,
        "key": letter.key_text if letter.key is not None else None,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "timestamp_ms": letter.timestamp_ms,
        "nbytes": letter.nbytes,
        "omitted": letter.omitted,
        "replayed": letter.replayed,
        "dismissed": letter.dismissed,
    }


def _payload(letter: DeadLetter) -> dict[str, Any]:
    """Headers and value; bytes that are no UTF-8 in base64, so that nothing is lost."""
    plain: dict[str, Any] = {"headers": [[name, _text(value)] for name, value in letter.headers], "value": None}
    if letter.value is not None:
        try:
            plain["value"] = letter.value.decode()
        except UnicodeDecodeError:
            plain["value_base64"] = base64.b64encode(letter.value).decode("ascii")
    return plain


def _value(letter: DeadLetter) -> str:
    if letter.omitted:
        return f"the value of {letter.nbytes or 0:,} bytes was too large for the topic and is not kept here"
    return "null: a deletion" if letter.value is None else letter.value.decode("utf-8", "backslashreplace")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "backslashreplace")


def _time(ms: int) -> str:
    return datetime.fromtimestamp(min(max(ms, 0), _LAST_MS) / 1000, UTC).isoformat(" ", "seconds")
