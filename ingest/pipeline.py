"""The whole graph on one screen. All IO is injected: what is read, and the parts that the steps work with.

INDEX    messages of the documents topic -> parse -> batch -> plan -> embed -> upsert_points -> flip_heads
                                         -> retire_older -> publish_commits -> put_dead_aside
PREFILL  messages of the commits topic   -> parse -> batch -> plan_prefill -> prefill -> mark_ready -> confirm
                                         -> put_dead_aside

Both are chains: an element that has gone wrong stays in its batch, marked dead, to the last step. So there is nothing
to flatten or to group, the runner fuses source to sink into one stage, and offsets are committed after the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import apache_beam as beam

from ingest.batching import BatchInBundle, Count, Step
from ingest.embedding import embed
from ingest.planning import parse, plan
from ingest.prefill import confirm, mark_ready, parse_record, plan_prefill, prefill
from ingest.sinks import flip_heads, publish_commits, put_dead_aside, retire_older, upsert_points

if TYPE_CHECKING:
    from ingest.handles import Handle
    from ingest.parts import Connect, IndexParts, PrefillParts
    from schemas.settings import IngestSettings


class IndexDocuments(beam.PTransform):  # type: ignore[misc] # Beam has no types
    """Messages of the documents topic -> effects; gives the batches of `IndexWork` as they ended."""

    def __init__(
        self,
        settings: IngestSettings,
        connect: Connect[IndexParts],
        on_bundle: Handle[Callable[[], None]] | None = None,
    ) -> None:
        super().__init__("IndexDocuments")
        self._settings, self._connect, self._on_bundle = settings, connect, on_bundle

    def expand(self, messages: beam.PCollection) -> beam.PCollection:
        """The steps of DESIGN section 5, in order."""
        return (
            messages
            | "parse" >> beam.Map(parse)
            | "batch" >> beam.ParDo(BatchInBundle(self._settings.batch_documents))
            | Step(plan, self._connect)
            | Step(embed, self._connect)
            | Step(upsert_points, self._connect)
            | Step(flip_heads, self._connect)
            | Step(retire_older, self._connect)
            | Step(publish_commits, self._connect)
            | Step(put_dead_aside, self._connect)
            | "count" >> beam.ParDo(Count("index", self._on_bundle))
        )


class PrefillDocuments(beam.PTransform):  # type: ignore[misc]
    """Messages of the commits topic -> effects; gives the batches of `PrefillWork` as they ended."""

    def __init__(
        self,
        settings: IngestSettings,
        connect: Connect[PrefillParts],
        on_bundle: Handle[Callable[[], None]] | None = None,
    ) -> None:
        super().__init__("PrefillDocuments")
        self._settings, self._connect, self._on_bundle = settings, connect, on_bundle

    def expand(self, messages: beam.PCollection) -> beam.PCollection:
        """Step 6 of DESIGN section 5."""
        return (
            messages
            | "parse" >> beam.Map(parse_record)
            | "batch" >> beam.ParDo(BatchInBundle(self._settings.batch_documents))
            | Step(plan_prefill, self._connect)
            | Step(prefill, self._connect)
            | Step(mark_ready, self._connect)
            | Step(confirm, self._connect)
            | Step(put_dead_aside, self._connect)
            | "count" >> beam.ParDo(Count("prefill", self._on_bundle))
        )
