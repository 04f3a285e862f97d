"""The embedded parts: a data folder that is ours for as long as we run, and a broker in it where none is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from cli.running import DataFolder
from schemas.errors import TopicError
from schemas.settings import Settings
from stores import EmbeddedBroker


@dataclass(frozen=True)
class Embedded:
    """What this process holds.

    Attributes:
        settings: those that were given, with the broker's address filled in.
    """

    settings: Settings
    folder: DataFolder
    broker: EmbeddedBroker | None

    def check(self) -> None:
        """Raises `TopicError` where the broker was ours and has ended."""
        if self.broker is not None and not self.broker.alive:
            raise TopicError("the embedded broker has ended; its data is safe, start again")


@contextmanager
def embedded(settings: Settings) -> Iterator[Embedded]:
    """Hold the data folder; start a broker unless `kafka.bootstrap` names one. It ends with the block.

    Raises:
        InputError: another process holds the folder.
        TopicError: the broker does not start.
    """
    folder = DataFolder(settings.data_dir)
    with folder.hold(), ExitStack() as stack:
        broker = None
        if not settings.kafka.bootstrap:
            broker = stack.enter_context(EmbeddedBroker(folder.folder / "broker"))
            kafka = settings.kafka.model_copy(update={"bootstrap": broker.bootstrap})
            settings = settings.model_copy(update={"kafka": kafka})
        yield Embedded(settings, folder, broker)
