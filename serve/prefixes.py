"""Exact rows in memory: prompts that were answered in `exact` mode lend them to the next that begin with the same ids.

Ids come from visible chunks only, so a prompt whose ids are the same holds nothing that is not visible now, and what is
taken over is never stale. But memory of a deleted document must go too: every run of rows knows the chunks' documents
and versions, and `serve.tiers` drops what is out of date, with all that was computed behind it. Tenants never share
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine import Plan
from engine.prefill import PrefixRows
from engine.prefix_tree import Owned, PrefixTree, extend_prefix
from schemas.ids import DocumentKey
from serve.retrieve import Found
from stores.tiers import Floors, Owner


@dataclass(frozen=True)
class Known:
    """What of a prompt is there exactly: so many of its tokens and chunks, and their rows. Without rows: nothing."""

    n_tokens: int = 0
    n_chunks: int = 0
    rows: PrefixRows | None = None

    def extend(self, plan: Plan) -> Plan:
        """The plan with that as its prefix."""
        return plan if self.rows is None else extend_prefix(plan, self.n_tokens)


class ExactPrefixes:
    """The tree, and whose rows are in it.

    Args:
        usable: whether the model's rows may be kept at all.
        floors: what is out of date.
    """

    def __init__(self, max_bytes: int, usable: bool, floors: Floors) -> None:
        self._tree = PrefixTree(max_bytes) if usable and max_bytes > 0 else None
        self._floors = floors

    @property
    def nbytes(self) -> int:
        """Bytes of rows in memory."""
        return self._tree.nbytes if self._tree else 0

    @property
    def evicted(self) -> int:
        """How many runs had to go for others so far."""
        return self._tree.evicted if self._tree else 0

    def find(self, tenant: str, plan: Plan) -> Known:
        """The longest exact prefix that ends where a chunk or a separator does, if it is longer than the plan's own."""
        if self._tree is None:
            return Known()
        longer = extend_prefix(plan, self._tree.longest(tenant, plan.token_ids[: plan.segments[-1].start]))
        n_tokens = len(longer.prefix_ids)
        if n_tokens <= len(plan.prefix_ids):
            return Known()
        rows = self._tree.rows(tenant, longer.prefix_ids)
        return Known() if rows is None else Known(n_tokens, len(plan.chunks) - len(longer.chunks), rows)

    def keeper(
        self, tenant: str, plan: Plan, kept: Sequence[Found]
    ) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
        """What `Model.generate` is to tell the rows of a plan, before its prefix was extended; None: nobody keeps."""
        if self._tree is None or not plan.chunks:
            return None
        tree = self._tree
        ids = plan.token_ids[: plan.segments[-1].start]
        owned = [
            Owned(segment.start, segment.end, (found.indexed.chunk.document, found.indexed.chunk.version))
            for segment, found in zip(plan.chunks, kept, strict=True)
        ]

        def keep(k: torch.Tensor, v: torch.Tensor) -> None:
            tree.insert(tenant, ids, k, v, owned)
            for one in owned:  # looked at last: a drop that comes later finds the rows
                if self._floors.below([one.owner]):  # type: ignore[list-item] # nobody else inserts
                    tree.drop(one.owner)

        return keep

    def drop(self, document: DocumentKey, floor: int) -> int:
        """Let go of what holds a version of `document` below `floor`; returns how many runs of rows did."""
        below = [owner for owner in self.owners() if owner[0] == document and owner[1] < floor]
        return sum(self._tree.drop(owner) for owner in below) if self._tree else 0

    def owners(self) -> set[Owner]:
        """The versions of documents that there is something of."""
        return self._tree.owners() if self._tree else set()  # type: ignore[return-value]

    def clear(self) -> None:
        """Let go of everything."""
        if self._tree is not None:
            self._tree.clear()
