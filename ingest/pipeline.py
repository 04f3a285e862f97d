"""The whole graph on one screen. All IO is injected: what is read, and the parts that the steps work with.

    messages of the documents topic -> parse -> batch -> INDEX_STEPS   -> count
    messages of the commits topic   -> parse -> batch -> PREFILL_STEPS -> count

Both are chains: an element that has gone wrong stays in its batch, marked dead, to the last step. So there is nothing
to flatten or to group, the runner fuses source to sink into one stage, and offsets are committed after the last step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import apache_beam as beam

from ingest.batching import BatchInBundle, Count, Parse, Step
from ingest.deletion import retire_older
from ingest.embedding import embed
from ingest.fusing import fuse
from ingest.planning import parse, plan
from ingest.prefill import confirm, in_passes, mark_ready, parse_record, plan_prefill, prefill
from ingest.siblings import delete_beside
from ingest.sinks import flip_heads, publish_commits, put_dead_aside, upsert_points

if TYPE_CHECKING:
    from ingest.handles import Handle
    from ingest.parts import Connect, IndexParts, PrefillParts
    from ingest.supervisor import Progress
    from ingest.work import StepFunction
    from schemas.settings import IngestSettings

INDEX_STEPS: tuple[StepFunction[IndexParts], ...] = (
    plan,  # read the heads: what is older is skipped; cut and diff with the live version
    embed,  # what is new
    upsert_points,  # all points of the new version: not visible
    flip_heads,  # the commit: text is servable
    retire_older,  # points and objects that the live version does not name; deletions with a receipt
    delete_beside,  # deletions, in the other generations
    publish_commits,
    put_dead_aside,
)

PREFILL_STEPS: tuple[StepFunction[PrefillParts], ...] = (
    plan_prefill,  # read the heads: what is superseded is skipped; what has no artifact?
    prefill,  # compute and put, create-only
    mark_ready,  # KV is servable
    confirm,  # read the heads again: retire where superseded meanwhile
    fuse,  # where the variant is fused: a second artifact, made behind the nearest neighbours
    put_dead_aside,
)
_WHOLE_BUNDLE = 4096  # documents
_LAST_STEPS = 2  # of them wait for the whole bundle: all of its pass 1 is servable before anything is fused


class IndexDocuments(beam.PTransform):  # type: ignore[misc] # Beam has no types
    """Messages of the documents topic -> effects; gives the batches of `IndexWork` as they ended."""

    def __init__(
        self, settings: IngestSettings, connect: Connect[IndexParts], progress: Handle[Progress] | None = None
    ) -> None:
        super().__init__("IndexDocuments")
        self._settings, self._connect, self._progress = settings, connect, progress

    def expand(self, messages: beam.PCollection) -> beam.PCollection:
        """The graph."""
        batches = messages | "parse" >> beam.ParDo(Parse(parse, self._connect)) | _batch(self._settings)
        for step in INDEX_STEPS:
            batches |= Step(step, self._connect)
        return batches | "count" >> beam.ParDo(Count("index", self._progress))


class PrefillDocuments(beam.PTransform):  # type: ignore[misc]
    """Messages of the commits topic -> effects; gives the batches of `PrefillWork` as they ended."""

    def __init__(
        self, settings: IngestSettings, connect: Connect[PrefillParts], progress: Handle[Progress] | None = None
    ) -> None:
        super().__init__("PrefillDocuments")
        self._settings, self._connect, self._progress = settings, connect, progress

    def expand(self, messages: beam.PCollection) -> beam.PCollection:
        """The graph."""
        batches = messages | "parse" >> beam.Map(parse_record) | _batch(self._settings)
        first, *rest = PREFILL_STEPS
        batches |= Step(first, self._connect)
        batches |= "passes" >> beam.FlatMap(in_passes, self._settings.batch_tokens)
        for step in rest[:-_LAST_STEPS]:
            batches |= Step(step, self._connect)
        batches = batches | "works" >> beam.FlatMap(iter) | "bundle" >> beam.ParDo(BatchInBundle(_WHOLE_BUNDLE))
        for step in rest[-_LAST_STEPS:]:
            batches |= Step(step, self._connect)
        return batches | "count" >> beam.ParDo(Count("prefill", self._progress))


def _batch(settings: IngestSettings) -> beam.PTransform:
    return "batch" >> beam.ParDo(BatchInBundle(settings.batch_documents))
