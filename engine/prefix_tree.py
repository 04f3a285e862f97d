"""Exact rows of prompts that were computed in full, kept for the next prompt that begins with the same ids.

A radix tree over token ids: an edge holds a run of ids and their rows, rotated, at the positions where they were
computed. A prompt that begins with the ids of a path takes over its rows as they are: they are those of a full prefill.

    root -- prefix, chunk 3, separator --+-- chunk 7, separator
                                         +-- chunk 1, separator

Every run knows whose tokens it holds. What is behind somebody's tokens was computed with them in sight, so dropping an
owner drops the path from its first token on. Spaces never see each other: no timing tells one what another has.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from engine.plan import Plan, Segment, Source
from engine.prefill import PrefixRows


@dataclass(frozen=True)
class Owned:
    """Positions `[start, end)` of a prompt that are `owner`'s tokens."""

    start: int
    end: int
    owner: Hashable


@dataclass(eq=False)
class _Node:
    """A run of ids from position `start` on; `k`, `v` `[L, H, n, D]`. The root has no ids and no rows."""

    start: int
    ids: tuple[int, ...] = ()
    rows: PrefixRows | None = None
    owned: list[Owned] = field(default_factory=list)
    children: dict[int, _Node] = field(default_factory=dict)
    used: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def nbytes(self) -> int:
        return 0 if self.rows is None else self.rows.k.nbytes + self.rows.v.nbytes


class PrefixTree:
    """Rows of at most `max_bytes`; what was not used for longest goes first. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._roots: dict[Hashable, _Node] = {}
        self._lock = threading.Lock()
        self._clock = 0
        self.nbytes = self.evicted = 0

    def longest(self, space: Hashable, ids: Sequence[int]) -> int:
        """How many of the first `ids` there are rows for."""
        with self._lock:
            return sum(n for _, n in self._path(space, ids))

    def rows(self, space: Hashable, ids: Sequence[int]) -> PrefixRows | None:
        """Copies of the rows of exactly `ids`; None where some are not there (any more)."""
        with self._lock:
            path = self._path(space, ids)
            if not ids or sum(n for _, n in path) < len(ids):
                return None
            self._clock += 1
            for node, _ in path:
                node.used = self._clock
            parts = [(node.rows, n) for node, n in path if node.rows is not None]
            k = torch.cat([rows.k[:, :, :n] for rows, n in parts], 2)
            v = torch.cat([rows.v[:, :, :n] for rows, n in parts], 2)
            return PrefixRows(k, v)

    def insert(
        self, space: Hashable, ids: Sequence[int], k: torch.Tensor, v: torch.Tensor, owned: Sequence[Owned]
    ) -> None:
        """Keep a copy of the rows of `ids`, `k` and `v` `[L, H, len(ids), D]`, as far as they are not there."""
        with self._lock:
            self._clock += 1
            node = self._roots.setdefault(space, _Node(0))
            for node, n in self._path(space, ids):
                node.used = self._clock
                if n < len(node.ids):
                    self._split(node, n)
            rest = tuple(ids[node.end :])
            if not rest or k[:, :, node.end :].nbytes * 2 > self._max_bytes:
                return
            rows = PrefixRows(k[:, :, node.end :].clone(), v[:, :, node.end :].clone())
            leaf = _Node(node.end, rest, rows, _within(owned, node.end, len(ids)), used=self._clock)
            node.children[rest[0]] = leaf
            self.nbytes += leaf.nbytes
            self._evict()

    def drop(self, owner: Hashable) -> int:
        """Let go of everything that holds tokens of `owner`, and of what was computed behind them.

        Returns:
            How many runs held tokens of `owner`.
        """
        with self._lock:
            dropped = sum(self._drop(root, owner) for root in self._roots.values())
            self._roots = {space: root for space, root in self._roots.items() if root.children}
            return dropped

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._roots, self.nbytes = {}, 0

    def owners(self) -> set[Hashable]:
        """Whose tokens there are."""
        with self._lock:
            nodes = [node for root in self._roots.values() for _, node in _walk(root)]
            return {one.owner for node in nodes for one in node.owned}

    def _path(self, space: Hashable, ids: Sequence[int]) -> list[tuple[_Node, int]]:
        """Nodes along `ids`, each with how many of its ids match; only the last may match in part."""
        node, path = self._roots.get(space), []
        while node is not None and node.end < len(ids):
            child = node.children.get(ids[node.end])
            if child is None:
                break
            wanted = ids[child.start : child.end]
            n = next((n for n, (a, b) in enumerate(zip(child.ids, wanted, strict=False)) if a != b), len(wanted))
            path.append((child, n))
            if n < len(child.ids):
                break
            node = child
        return path

    def _split(self, node: _Node, n: int) -> None:
        """Make the ids from the n-th on a child of their own. Rows are copied: a view would keep all of them."""
        assert node.rows is not None
        before = node.nbytes
        tail = _Node(node.start + n, node.ids[n:], _part(node.rows, n, None), used=node.used, children=node.children)
        tail.owned = _within(node.owned, tail.start, tail.end)
        node.ids, node.rows, node.children = node.ids[:n], _part(node.rows, 0, n), {tail.ids[0]: tail}
        node.owned = _within(node.owned, node.start, node.end)
        self.nbytes += node.nbytes + tail.nbytes - before

    def _cut(self, parent: _Node, node: _Node, n: int) -> None:
        """Take away a node's ids from the n-th on, and everything behind."""
        if n > 0:
            self._split(node, n)
            parent, node = node, next(iter(node.children.values()))
        del parent.children[node.ids[0]]
        self.nbytes -= node.nbytes + sum(child.nbytes for _, child in _walk(node))

    def _drop(self, node: _Node, owner: Hashable) -> int:
        dropped = 0
        for child in list(node.children.values()):
            starts = [one.start for one in child.owned if one.owner == owner]
            if starts:
                self._cut(node, child, min(starts) - child.start)
                dropped += 1
            else:
                dropped += self._drop(child, owner)
        return dropped

    def _evict(self) -> None:
        while self.nbytes > self._max_bytes:
            every = [(parent, node) for root in self._roots.values() for parent, node in _walk(root)]
            parent, oldest = min((pair for pair in every if not pair[1].children), key=lambda pair: pair[1].used)
            self._cut(parent, oldest, 0)
            self.evicted += 1


def extend_prefix(plan: Plan, n_tokens: int) -> Plan:
    """The same prompt with its first `n_tokens` taken over exactly, cut at the end of a segment before or at that.

    Chunks inside the prefix are chunks no more; the others are numbered from 0 again.
    """
    end = max((segment.end for segment in plan.segments[:-1] if segment.end <= n_tokens), default=0)
    if end <= len(plan.prefix_ids):
        return plan
    segments, n_chunks = [Segment(0, end, Source.PREFIX)], 0
    for segment in plan.segments:
        if segment.start < end:
            continue
        number = None if segment.chunk is None else n_chunks
        n_chunks += number is not None
        segments.append(Segment(segment.start, segment.end, segment.source, number))
    return Plan(plan.token_ids, tuple(segments))


def _walk(node: _Node) -> Iterator[tuple[_Node, _Node]]:
    """Every node below, with its parent; a parent before its children."""
    for child in list(node.children.values()):
        yield node, child
        yield from _walk(child)


def _within(owned: Sequence[Owned], start: int, end: int) -> list[Owned]:
    return [Owned(max(one.start, start), one.end, one.owner) for one in owned if one.start < end and one.end > start]


def _part(rows: PrefixRows, start: int, end: int | None) -> PrefixRows:
    return PrefixRows(rows.k[:, :, start:end].clone(), rows.v[:, :, start:end].clone())
