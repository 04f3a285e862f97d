"""`kvquilt publish`: files to change events, and, with `--wait`, until they are servable."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from cli.context import Context
from cli.documents import Outgoing, files_in, read_documents
from cli.feeding import with_live_groups
from cli.running import with_broker
from cli.service import Service
from cli.waiting import POLL_S, Servable, Wanted, wait_servable
from ingest.formats import EventReader
from ingest.sources.kinds import LINES
from schemas.errors import InputError, KvquiltError
from schemas.ids import is_packed
from schemas.settings import KafkaSettings
from stores.dead_letters import read_letters
from stores.topics import Message, PartitionReader, Publisher, ensure_topics, read_all


def publish(
    context: Context, paths: Sequence[Path], *, root: Path, version: int | None, tenant: str, wait_s: float | None
) -> None:
    """Publish what `paths` hold and print how much it was.

    Args:
        wait_s: wait so long at most until everything is servable; None does not wait.

    Raises:
        InputError: some of it could not be published; the rest was.
    """
    kafka = with_broker(context.settings).kafka
    files = files_in(paths)
    ensure_topics(kafka)
    refused: list[InputError] = []

    def documents() -> Iterator[Outgoing]:
        for file in files:
            for outcome in read_documents(file, root=root, tenant=tenant, version=version):
                if isinstance(outcome, InputError):
                    refused.append(outcome)
                else:
                    yield outcome

    with context.progress() as progress, Publisher(kafka) as publisher:
        of_rows = any(file.suffix.lower() in LINES for file in files)
        task = progress.add_task("published", total=None if of_rows else len(files))
        sent = publish_documents(publisher, kafka, documents(), lambda: progress.advance(task))
        progress.update(task, total=len(sent))
    for error in refused:
        context.say(f"not published: {error}")
    ready = wait(context, kafka, sent, wait_s) if wait_s is not None else None
    told: dict[str, Any] = {
        "published": len(sent),
        "not_published": [str(error) for error in refused],
        "topic": kafka.documents_topic,
        "servable": len(ready.kv) if ready else None,
        "refused": ready.refused if ready else {},
        "superseded": ready.superseded if ready else {},
    }
    text = f"{len(sent)} published to {kafka.documents_topic}"
    if ready:
        text += f", {len(ready.kv)} servable with text and KV"
        text += "".join(f"; {doc} is at version {newer}, which is newer" for doc, newer in ready.superseded.items())
    context.result(told, text)
    lost = [str(error) for error in refused] + [f"{doc_id}: {why}" for doc_id, why in told["refused"].items()]
    if lost:
        raise InputError(f"{len(lost)} of {len(sent) + len(refused)} not taken, the first: {lost[0]}")


def publish_documents(
    publisher: Publisher, kafka: KafkaSettings, documents: Iterator[Outgoing], advance: Callable[[], object]
) -> list[Message]:
    """Publish in order; the broker's answers, which say where each event is."""
    items = ((document.key, document.value, document.headers) for document in documents)
    sent = []
    for message in publisher.publish_each(kafka.documents_topic, items):
        sent.append(message)
        advance()
    return sent


def wait(context: Context, kafka: KafkaSettings, sent: Sequence[Message], timeout_s: float) -> Servable:
    """Show two bars until text and KV of everything that was sent are servable."""
    wanted, names = {}, {}
    with closing(EventReader(context.settings.events)) as reader:
        for message in sent:  # a later event of the same document replaces the earlier
            event = reader.parse(message)
            wanted[event.doc_id] = Wanted(event.version, event.deletes)
            names[message.partition, message.offset] = event.doc_id
    with context.progress() as progress, Service.of(context.settings) as service:
        text = progress.add_task("text servable", total=len(wanted))
        rows = progress.add_task("KV servable", total=len(wanted))

        def report(reached: Servable) -> None:
            progress.update(text, completed=len(reached.text))
            progress.update(rows, completed=len(reached.kv))

        start_s = time.monotonic()
        reached = wait_servable(
            service, wanted, timeout_s=timeout_s, report=report, refusals=lambda: dead_letters(kafka, names)
        )
        if any(not is_packed(change.version) for change in wanted.values()):
            # a version of one's own may have been there before, with other content: only INDEX tells
            groups = with_live_groups(context.settings).kafka.model_copy(update={"bootstrap": kafka.bootstrap})
            until_passed(groups, names, timeout_s - (time.monotonic() - start_s))
            for doc_id, cause in dead_letters(kafka, names).items():
                reached.refused[doc_id] = cause
                reached.kv = [name for name in reached.kv if name != doc_id]
    for doc_id, cause in reached.refused.items():
        context.say(f"refused by the ingest: {doc_id}: {cause}")
    return reached


def until_passed(kafka: KafkaSettings, places: Collection[tuple[int, int]], timeout_s: float) -> None:
    """Return when INDEX has committed past every (partition, offset), so that its refusals are known.

    Raises:
        KvquiltError: it has not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with closing(PartitionReader(kafka, kafka.documents_topic, kafka.group_of("index"))) as reader:
        while True:
            committed = reader.committed()
            if all(committed.get(partition, 0) > offset for partition, offset in places):
                return
            if time.monotonic() > deadline:
                raise KvquiltError("the index pipeline has not read all of it in time; `kvquilt doctor` tells")
            time.sleep(POLL_S)


def dead_letters(kafka: KafkaSettings, at: dict[tuple[int, int], str]) -> dict[str, str]:
    """Which of the events at these places were put aside, and why."""
    found = {}
    with contextlib.suppress(KvquiltError):  # it is only an explanation; waiting goes on without it
        for letter in read_letters(read_all(kafka, kafka.dead_letter_topic)):
            if letter.topic == kafka.documents_topic and (doc_id := at.get((letter.partition, letter.offset))):
                found[doc_id] = letter.message
    return found
