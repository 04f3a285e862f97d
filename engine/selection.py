"""What a selection policy gets to see: the plan, and, computed only when asked for, attention and deviations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from engine.deviation import DeviationRows, FilteringRows
from engine.hf_adapter import ModelSpec
from engine.passes import PassMemo, Run
from engine.plan import Plan, Segment
from engine.rows import Base
from engine.scoring import Reduction, ScoringRows


@dataclass(frozen=True)
class SelectionContext:
    """One prompt, as the policies see it. Scores are `[n_ctx]`, one per position up to the end of the last chunk.

    Attributes:
        plan: the prompt.
        base: its stitched rows.
        spec: shapes of the model.
        run: runs a pass; ends quietly where the pass has enough.
        first_chunk_exact: the rows of the first chunk were computed behind this very prefix (variant
            `shared_prefix`), so that they are those of a full prefill and no budget is spent on them.
        passes: what was found already; shared by the policies that are compared on one prompt.
        fused: the rows were computed behind chunks like those of their prompt (the fused variants).
    """

    plan: Plan
    base: Base
    spec: ModelSpec
    run: Run
    first_chunk_exact: bool = True
    passes: PassMemo = field(default_factory=PassMemo, repr=False)
    fused: bool = False

    @cached_property
    def n_ctx(self) -> int:
        """End of the last chunk; 0 without chunks."""
        return self.plan.chunks[-1].end if self.plan.chunks else 0

    @cached_property
    def n_chunk_tokens(self) -> int:
        """All chunk tokens: what a budget is a share of."""
        return sum(len(chunk) for chunk in self.plan.chunks)

    @cached_property
    def chunks(self) -> tuple[Segment, ...]:
        """Chunks whose rows are not exact already, in prompt order: where a budget can be spent."""
        behind_prefix = self.plan.chunks[:1] if self.first_chunk_exact else ()
        exact = [chunk for chunk in behind_prefix if chunk.start == self.plan.segments[0].end]
        return self.plan.chunks[len(exact) :]

    @cached_property
    def question(self) -> tuple[int, int]:
        """Positions `[start, end)` of everything behind the last separator: lead, question and tail."""
        last = self.plan.segments[-1]
        return last.start, last.end

    def attention(self, layers: Sequence[int], reduction: Reduction) -> torch.Tensor:
        """Attention of the question's rows to each token at `layers`, reduced: `[len(layers), n_ctx]` fp32.

        One pass of the open rows as far as the deepest layer; it is not run again when the same is asked again.
        """

        def run() -> torch.Tensor:
            positions = torch.tensor(self.plan.open_positions)
            start, end = self.question
            rows = ScoringRows(self.base, positions, end - start, layers, reduction)
            self.run(self._ids(positions), positions, rows)
            return torch.stack([self._by_position(rows.scores[layer]) for layer in layers])

        return self.passes.get(("attention", reduction.name, tuple(layers)), run)

    def deviation(self, layer: int, of: str) -> torch.Tensor:
        """Squared change of each row at `layer` when everything before it is computed in full: `[n_ctx]` fp32.

        All tokens run through the layers before it.

        Args:
            layer: where rows are compared.
            of: `v` or `k` (rotated keys).
        """

        def run() -> torch.Tensor:
            positions = torch.arange(self.plan.segments[0].end, self.plan.n_tokens)
            rows = DeviationRows(self.base, positions, layer, of)
            self.run(self._ids(positions), positions, rows)
            return self._by_position(rows.deviation)

        return self.passes.get(("deviation", layer, of), run)

    def filtered(self, keep: Sequence[tuple[int, int]], of: str) -> torch.Tensor:
        """Positions that survive a gradual filter: at each `(layer, n)` of `keep` the `n` largest deviations."""

        def run() -> torch.Tensor:
            positions = torch.arange(self.plan.segments[0].end, self.plan.n_tokens)
            candidates = self.eligible[positions.clamp_max(self.n_ctx - 1)] & (positions < self.n_ctx)
            rows = FilteringRows(self.base, positions, candidates, keep, of)
            self.run(self._ids(positions), positions, rows)
            return positions[rows.alive & candidates]

        return self.passes.get(("filtered", tuple(keep), of), run)

    @cached_property
    def eligible(self) -> torch.Tensor:
        """`[n_ctx]` bool: chunk tokens that are not exact already."""
        mask = torch.zeros(self.n_ctx, dtype=torch.bool)
        for chunk in self.chunks:
            mask[chunk.start : chunk.end] = True
        return mask

    def _ids(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.plan.token_ids)[positions]

    def _by_position(self, of_base_rows: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(self.n_ctx, dtype=torch.float32)
        positions = self.base.rows[2]
        inside = positions < self.n_ctx
        out[positions[inside]] = of_base_rows.float().cpu()[inside]
        return out
