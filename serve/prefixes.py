"""Exact rows in memory: prompts that were answered in `exact` mode lend them to the next that begin with the same ids.

Ids come from visible chunks only, so a prompt whose ids are the same holds nothing that is not visible now, and what is
taken over is never stale. But memory of a deleted document must go too: every run of rows knows the chunks' documents
and versions. Their heads are read again after rows were kept, and every few seconds; what is not live at its version is
dropped, with all that was computed behind it. Tenants never share rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from engine import Plan
from engine.prefill import PrefixRows
from engine.prefix_tree import Owned, PrefixTree, extend_prefix
from schemas.errors import StoreError
from schemas.ids import DocumentKey
from serve.parts import Parts
from serve.retrieve import Found

_log = logging.getLogger("kvquilt.serve")
Owner = tuple[DocumentKey, int]


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
    """The tree, and its freshness."""

    def __init__(self, parts: Parts, max_bytes: int) -> None:
        self._parts = parts
        usable = max_bytes > 0 and parts.model.exact_rows_last
        self._tree = PrefixTree(max_bytes) if usable else None

    @property
    def nbytes(self) -> int:
        """Bytes of rows in memory."""
        return self._tree.nbytes if self._tree else 0

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
            with suppress(StoreError):  # the next round looks again
                self.check()  # a document may have changed since its head was read, and its round be over

        return keep

    def check(self) -> None:
        """Drop what is not live at its version any more.

        Raises:
            StoreError: the heads cannot be read; nothing is dropped.
        """
        if self._tree is None:
            return
        owners: set[Owner] = self._tree.owners()  # type: ignore[assignment] # nobody else inserts
        heads = self._parts.index.heads(sorted({document for document, _ in owners})) if owners else {}
        for document, version in owners:
            head = heads.get(document)
            if head is None or not head.live or head.version != version:
                self._tree.drop((document, version))

    async def watch(self, every_s: float) -> None:
        """Check again and again, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await asyncio.to_thread(self.check)
            except StoreError as error:
                _log.warning("rows of prompts in memory could not be checked: %s", error)
