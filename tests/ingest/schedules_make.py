"""Schedules from a seed: what is published in which order, what runs when, and what happens at its store calls."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from bench.chaos.audit import Fault, Kind
from bench.chaos.schedule import WORDS
from schemas.ids import DocumentKey
from tests.ingest.schedules_faults import CALLS, CRASH, CRASH_AFTER, ERROR, MEANWHILE, NO_REPLY, TORN, Deed
from tests.ingest.schedules_world import ScheduleWorld

MAX_ATTEMPTS = 3  # of a store call, in the world's settings
# Where one actor's effect meets another's: more often than the rest.
OFTEN = {
    "index": ("heads.upsert", "chunks.upsert", "delete", "chunks.delete"),
    "prefill": (
        *("put_new", "put_new", "put_new", "put_new", "chunks.set_payload", "heads.retrieve"),
        *("publish_many", "chunks.delete"),
    ),
    "question": ("heads.retrieve",),
}
_APART = 10  # between the versions that are planned: room for those that come up meanwhile
_DEEP = 2  # runs within calls of runs; the innermost have no deeds


@dataclass
class Schedule:
    """One schedule over one world. Equal seeds do the same.

    Attributes:
        neighbours: chunks are fused with so many; 0: not.
        zombies: a pipeline may run again while an earlier run of it hangs in a call: one that was cut off from the
            group and does not know yet.
    """

    seed: int
    neighbours: int
    zombies: bool

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """Every fourth is fused, every third has zombies."""
        return cls(seed, 2 if seed % 4 == 0 else 0, seed % 3 == 0)

    def run(self, world: ScheduleWorld) -> None:
        """Publish and run, in whatever order; then drain."""
        rng = random.Random(self.seed)
        self._rng, self._world, self._running = rng, world, []
        self._events = events(rng)
        self._texts = [content for _, _, content in self._events if content] or ["nothing at all"]
        while self._events:
            self._publish(rng.choice((1, 1, 2, 3)))
            for _ in range(rng.choice((0, 1, 2))):
                rng.choices((self._index, self._prefill, self._ask, self._reconcile), (6, 6, 3, 1))[0]()
        for text in list(dict.fromkeys(self._texts))[:2]:
            self._index()
            self._prefill()
            world.ask(text)
        world.drain()

    def _publish(self, n: int) -> None:
        for _ in range(min(n, len(self._events))):
            doc_id, version, content = self._events.pop()
            self._world.publish(doc_id, version, content)

    def _index(self) -> None:
        self._act("index", self._world.run_index)

    def _prefill(self) -> None:
        self._act("prefill", self._world.run_prefill)

    def _ask(self) -> None:
        text = self._rng.choice(self._texts)
        self._act("question", lambda deeds: self._world.ask(text, deeds))

    def _reconcile(self) -> None:
        self._act("reconcile", self._world.reconcile)

    def _move_on(self) -> None:
        if self._rng.random() < 0.5:
            self._publish(2)
        else:
            self._change()
        self._index()

    def _change(self) -> None:
        """One of the documents that are there gets another version, or is deleted."""
        rng, truth = self._rng, self._world.truth
        if truth.contents:
            document = rng.choice(list(truth.contents))
            content = None if rng.random() < 0.3 else rng.choice(self._texts)
            version = max(truth.contents[document]) + 1
            self._world.publish(document.doc_id, version + (version % _APART == 0), content)

    def _overtake(self) -> None:
        """Other processes of both pipelines do all that there is, and more comes."""
        self._change()
        self._world.run_index()
        self._world.run_prefill()

    def _act(self, actor: str, run: Callable[[dict[tuple[str, int], Deed]], bool]) -> None:
        """Run an actor; within one of its own calls only where there are zombies."""
        if actor in self._running and not self.zombies:
            return
        self._running.append(actor)
        run(self._deeds(actor))
        self._running.pop()

    def _deeds(self, actor: str) -> dict[tuple[str, int], Deed]:
        rng = self._rng
        if len(self._running) > _DEEP or rng.random() < 0.2:
            return {}
        deeds: dict[tuple[str, int], Deed] = {}
        for _ in range(rng.choice((1, 2, 2, 3))):
            call, at = rng.choice(CALLS[actor] + OFTEN.get(actor, ())), rng.choice((1, 1, 1, 2, 2, 3, 4, 6))
            meanwhile = 12 if self.zombies else 5
            kind = rng.choices((CRASH, CRASH_AFTER, ERROR, NO_REPLY, TORN, MEANWHILE), (2, 2, 2, 3, 1, meanwhile))[0]
            if kind == MEANWHILE:
                deeds[call, at] = Deed(kind, self._meanwhile())
            elif kind in (ERROR, NO_REPLY):
                deeds |= {(call, at + n): Deed(kind) for n in range(rng.choice((1, 1, 2, MAX_ATTEMPTS)))}
            else:
                deeds[call, at] = Deed(kind)
        return deeds

    def _meanwhile(self) -> Callable[[], None]:
        """A document moves on, the other pipeline catches up, somebody asks: while an actor waits in a call."""
        doings = (self._move_on, self._index, self._prefill, self._ask, self._reconcile, self._overtake)
        chosen = self._rng.choices(doings, (5, 3, 3, 3, 1, 8 if self.zombies else 0), k=2)

        def act() -> None:
            for doing in chosen:
                doing()

        return act


def judged(
    seed: int, world_of: type[ScheduleWorld] = ScheduleWorld
) -> tuple[list[Fault], Counter[tuple[str, str, str]]]:
    """Run one schedule, look, reconcile, look again: what was wrong at any time, and the deeds that were done."""
    schedule = Schedule.of(seed)
    world = world_of(schedule.neighbours)
    try:
        schedule.run(world)
        faults = [fault for fault in world.faults if not (schedule.zombies and fault.kind is Kind.RECEIPT)]
        # A process that was cut off and lives cleans up behind itself; what one leaves that dies is for reconcile.
        faults += [fault for fault in world.audit() if not (world.n_cut_off and fault.drift)]
        world.reconcile()
        world.drain()
        faults += [fault for fault in world.audit() if fault not in faults]
        dead = [Fault(Kind.LOST, DocumentKey("-", "-"), f"dead letter: {one.headers}") for one in world.dead_letters()]
        return faults + dead, world.done
    finally:
        world.close()


def events(rng: random.Random) -> list[tuple[str, int, str | None]]:
    """`(document, version, content)` in order of arrival, last first: late ones, repeated ones, deletions."""
    found = []
    for doc_id in ("a", "bb", "c")[: rng.choice((1, 2, 2, 3))]:
        pool = [_paragraph(rng, doc_id, n) for n in range(4)]
        for version in range(_APART, _APART * rng.choice((2, 3, 4, 4)), _APART):
            content = None if rng.random() < 0.3 else "\n\n".join(rng.sample(pool, rng.choice((1, 1, 2, 3))))
            found += [(doc_id, version, content)] * rng.choice((1, 1, 1, 2))
    order = sorted(range(len(found)), key=lambda place: place + rng.choice((0, 0, 1, 3, 8)) * rng.random())
    return [found[place] for place in reversed(order)]


def _paragraph(rng: random.Random, doc_id: str, n: int) -> str:
    words = " ".join(rng.choices(WORDS, k=9))
    return f"In {doc_id} number {n} stands {words}."
