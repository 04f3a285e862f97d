"""A consumer group over topics in memory: members share partitions as those of `stores.group_reader` do.

What a rebalance does to one member is told at its next poll, as there. A time-out is a call (`expire`), not time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from schemas.errors import TopicError
from stores.kafka_client import Message
from stores.memory_topics import MemoryReader, MemoryTopics
from stores.partition_reader import Tenure


class MemoryGroup:
    """Who has which partition of a topic, and who is to have it."""

    def __init__(self, topics: MemoryTopics, topic: str, group: str) -> None:
        self.topics, self.topic, self.group = topics, topic, group
        self.numbers = itertools.count(1)
        self.owners: dict[int, MemoryMember] = {}
        self.members: list[MemoryMember] = []

    def member(self) -> MemoryMember:
        """A new member; it gets its partitions when it polls, and when others let go of them."""
        member = MemoryMember(self)
        self.members.append(member)
        return member

    def expire(self, member: MemoryMember) -> None:
        """Throw a member out, as after a session time-out. It does not know until it polls or commits."""
        self.leave(member)
        member.thrown_out = True

    def leave(self, member: MemoryMember) -> None:
        """A member goes; its partitions are free."""
        self.members = [other for other in self.members if other is not member]
        self.owners = {partition: owner for partition, owner in self.owners.items() if owner is not member}

    def wanted(self, member: MemoryMember) -> set[int]:
        """The partitions that a member is to have: every one goes to one member, evenly."""
        n = len(self.members)
        return {p for p in range(self.topics.partitions) if self.members and self.members[p % n] is member}


class MemoryMember(MemoryReader):
    """`GroupReader` over `MemoryTopics`."""

    alone = False

    def __init__(self, group: MemoryGroup) -> None:
        super().__init__(group.topics, group.topic, group.group)
        self._group = group
        self._at = {}
        self.held: dict[int, Tenure] = {}
        self.leaving: dict[int, Tenure] = {}
        self.joined = False
        self.thrown_out = False

    def release(self) -> None:
        """Let go of what is leaving."""
        self._group.owners = {p: owner for p, owner in self._group.owners.items() if p not in self.leaving}
        self.leaving = {}

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Partitions come and go in `poll` alone, and one thread is enough."""
        yield

    def poll(self, limit: int, timeout_s: float) -> list[Message]:
        """Up to `limit` messages of the partitions held; first what the group has to say."""
        if self.thrown_out:
            self.held, self.leaving, self._at, self.thrown_out = {}, {}, {}, False
            self._group.members.append(self)
        self.joined = True
        wanted = self._group.wanted(self)
        self.leaving |= {p: tenure for p, tenure in self.held.items() if p not in wanted}
        self.held = {p: tenure for p, tenure in self.held.items() if p in wanted}
        if self.leaving:
            self._at = {p: at for p, at in self._at.items() if p in self.held}
            return []
        for partition in wanted - self.held.keys() - self._group.owners.keys():
            self._begin(partition)
        return super().poll(limit, timeout_s) if self.held else []

    def commit(self, positions: Mapping[int, int]) -> None:
        """Commit next offsets; refused where the group goes on without this member."""
        if self.thrown_out:
            raise TopicError(f"group {self.group} goes on without this process: it may not commit offsets")
        super().commit(positions)

    def close(self) -> None:
        """Leave the group."""
        self._group.leave(self)

    def _begin(self, partition: int) -> None:
        self._group.owners[partition] = self
        self._at[partition] = self.committed().get(partition, 0)
        self.held = self.held | {partition: Tenure(next(self._group.numbers), self._at[partition])}
