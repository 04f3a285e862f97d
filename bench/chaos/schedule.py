"""A schedule from a seed: what is published in which order, what is killed, and which calls go wrong in between.

Equal seeds give equal schedules. What happens between two actions is up to the processes: faults are tied to calls (the
second `heads.upsert` of INDEX, say), not to the clock.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.chaos.gate import ERROR, HANG, KILL, KILL_AFTER, NO_REPLY, SLOW, TORN, Fault

WORDS = [
    "lamp",
    "door",
    "river",
    "stone",
    "wheel",
    "garden",
    "bridge",
    "paper",
    "winter",
    "copper",
    "engine",
    "harbour",
]
CALLS = {
    ("index", "qdrant"): ("heads.retrieve", "heads.upsert", "chunks.upsert", "chunks.scroll", "chunks.delete", ""),
    ("index", "s3"): ("put", "get", "list", "delete", ""),
    ("prefill", "qdrant"): ("heads.retrieve", "chunks.scroll", "chunks.payload", "chunks.retrieve", ""),
    ("prefill", "s3"): ("put", "put", "get", "list", "delete", ""),
    ("serve", "qdrant"): ("heads.retrieve", "chunks.query", ""),
    ("serve", "s3"): ("get", "get", ""),
}
HANG_S = 1.5  # longer than the processes' patience with a store


@dataclass(frozen=True)
class Publish:
    """Write an event; a deletion where there is no content."""

    doc_id: str
    version: int
    content: str | None


@dataclass(frozen=True)
class Kill:
    """kill -9 of a process now."""

    process: str


@dataclass(frozen=True)
class RestartBroker:
    """kill -9 of the broker, and a new start."""


@dataclass(frozen=True)
class GoWrong:
    """A fault that waits at a gate for its call."""

    process: str
    store: str
    fault: Fault


@dataclass(frozen=True)
class Pause:
    """Let the processes work."""

    seconds: float


Action = Publish | Kill | RestartBroker | GoWrong | Pause


def schedule(seed: int, broker_restarts: float) -> list[Action]:
    """The actions of a run.

    Args:
        broker_restarts: share of the runs that have one.
    """
    rng = random.Random(seed)
    actions: list[Action] = list(_events(rng))
    extra: list[Action] = [_fault(rng) for _ in range(rng.randint(2, 7))]
    extra += [Kill(rng.choice(("index", "prefill", "serve"))) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    extra += [Pause(rng.choice((0.05, 0.2, 0.4))) for _ in range(3)]
    for action in extra:
        actions.insert(rng.randint(0, len(actions)), action)
    if rng.random() < broker_restarts:
        actions.insert(rng.randint(1, len(actions)), RestartBroker())
    return actions


def _events(rng: random.Random) -> list[Publish]:
    """Late ones, repeated ones, deletions; about thirty, of five to nine documents."""
    found = []
    for number in range(rng.randint(5, 9)):
        doc_id = f"d{number}"
        pool = [f"In {doc_id} number {n} stands {' '.join(rng.choices(WORDS, k=18))}." for n in range(4)]
        for version in range(1, rng.choice((2, 3, 4, 5))):
            content = None if rng.random() < 0.25 else "\n\n".join(rng.sample(pool, rng.choice((1, 1, 2, 3))))
            found += [Publish(doc_id, version, content)] * rng.choice((1, 1, 1, 2))
    rng.shuffle(found)
    late = sorted(range(len(found)), key=lambda place: found[place].version + rng.choice((0, 0, 2, 5)) * rng.random())
    return [found[place] for place in late]


def _fault(rng: random.Random) -> GoWrong:
    process, store = rng.choice(tuple(CALLS))
    kinds = (ERROR, NO_REPLY, HANG, SLOW, TORN, KILL, KILL_AFTER)
    kind = rng.choices(kinds, (3, 3, 1, 2, 2, 2, 2))[0]
    times = rng.choice((1, 1, 2, 3)) if kind in (ERROR, NO_REPLY, SLOW) else 1
    seconds = HANG_S if kind == HANG else rng.choice((0.1, 0.3))
    return GoWrong(
        process, store, Fault(kind, rng.choice(CALLS[process, store]), rng.choice((0, 0, 1, 2, 4)), times, seconds)
    )
