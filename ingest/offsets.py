"""Which offsets may be committed: what was read, what of it is done, and whose the partition is meanwhile.

Of each partition a pipeline holds, in this order: `committed <= done <= read`. Read moves when a message is handed to
the pipeline, done when the runner says that the effects of a bundle are behind it, committed when the broker confirms.

A partition may leave and come back while effects are under way; every stay is a tenure of its own. What was read in an
earlier tenure never counts: the group is somewhere else by then, and its offset would be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stores.topics import Message, Tenure

Marks = dict[int, tuple[int, int]]  # by partition: next offset, number of the tenure that it was read in


@dataclass
class _Stay:
    """How far one partition is, in next offsets."""

    tenure: Tenure
    read: int
    done: int
    committed: int
    end: int | None = None  # of the partition when it came


class Offsets:
    """The partitions that a pipeline holds and how far each is. Not thread-safe."""

    def __init__(self) -> None:
        self._stays: dict[int, _Stay] = {}
        self._last_mark = 0

    def settle(self, tenures: Mapping[int, Tenure]) -> set[int]:
        """Begin new tenures, end those that are over; returns the partitions of both."""
        now = {p: tenure.number for p, tenure in tenures.items()}
        ended = {p for p, stay in self._stays.items() if now.get(p) != stay.tenure.number}
        begun = {p for p in now if p in ended or p not in self._stays}
        kept = {p: stay for p, stay in self._stays.items() if p not in ended}
        # a whole new dictionary: health reads it from another thread
        self._stays = kept | {p: _Stay(tenures[p], *[tenures[p].start] * 3) for p in begun}
        return ended | begun

    def see_ends(self, ends: Mapping[int, int | None]) -> None:
        """Remember the first end that is known of each partition."""
        for partition, stay in self._stays.items():
            if stay.end is None:
                stay.end = ends.get(partition)

    def read(self, message: Message) -> None:
        """A message goes to the pipeline."""
        stay = self._stays.get(message.partition)
        if stay is not None:
            stay.read = message.offset + 1

    def mark(self, at: Mapping[int, int]) -> Marks:
        """A bundle ends. `at` is where each partition stands, gaps that compaction left included.

        Partitions that are leaving, which have no place in `at` any more, end where they were read to.
        """
        for partition, stay in self._stays.items():
            stay.read = at.get(partition, stay.read)
        return {partition: (stay.read, stay.tenure.number) for partition, stay in self._stays.items()}

    def done(self, marks: Marks, number: int) -> None:
        """The effects of the bundle with this number, and so of all before it, are durable."""
        if number <= self._last_mark:
            return
        self._last_mark = number
        for partition, (offset, tenure) in marks.items():
            stay = self._stays.get(partition)
            if stay is not None and stay.tenure.number == tenure:
                stay.done = offset

    def go_back(self, marks: Marks | None) -> dict[int, int]:
        """Where to read on: behind `marks`, of the same tenure, or behind what is done."""
        for partition, stay in self._stays.items():
            offset, tenure = (marks or {}).get(partition, (stay.done, stay.tenure.number))
            stay.read = offset if tenure == stay.tenure.number else stay.done
        return {partition: stay.read for partition, stay in self._stays.items()}

    def to_commit(self) -> dict[int, int]:
        """What is done and not confirmed."""
        return {p: stay.done for p, stay in self._stays.items() if stay.done != stay.committed}

    def confirm(self, committed: Mapping[int, int]) -> None:
        """The broker has these."""
        for partition, offset in committed.items():
            self._stays[partition].committed = offset

    def busy(self, partitions: Iterable[int]) -> bool:
        """Whether something of these partitions was read and is not committed yet."""
        stays = [self._stays[p] for p in partitions if p in self._stays]
        return any(stay.read != stay.done or stay.done != stay.committed for stay in stays)

    @property
    def uncommitted(self) -> int:
        """Offsets that are done and not confirmed."""
        return sum(max(0, stay.done - stay.committed) for stay in list(self._stays.values()))

    @property
    def caught_up(self) -> bool:
        """Whether all that was in each partition when it came is committed."""
        return all(stay.end is not None and stay.committed >= stay.end for stay in list(self._stays.values()))
