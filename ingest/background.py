"""The LLM as PREFILL uses it beside others: its passes step back behind INDEX and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.threads import SteppedBack
from ingest.parts import ChunkPrefiller, Rows
from schemas.fingerprint import Fingerprint


class BackgroundPrefiller:
    """A `ChunkPrefiller` whose passes have a lower priority than everything else on the machine.

    Text must not wait for KV: on a machine with few cores a burst of documents would be embedded at the pace that
    prefill leaves.
    """

    def __init__(self, model: ChunkPrefiller, nice: int) -> None:
        self._model, self._thread = model, SteppedBack(nice)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the model takes."""
        return self._model.max_tokens

    @property
    def fingerprint(self) -> Fingerprint:
        """What its KV rows are."""
        return self._model.fingerprint

    def prefill_chunks(self, prefix_ids: Sequence[int], chunks: Sequence[Sequence[int]]) -> Sequence[Rows]:
        """As the model's."""
        return self._thread.call(self._model.prefill_chunks, prefix_ids, chunks)

    def prefill_behind(self, front_ids: Sequence[int], neighbours: Sequence[Any], chunk: Sequence[int]) -> Rows:
        """As the model's."""
        return self._thread.call(self._model.prefill_behind, front_ids, neighbours, chunk)
