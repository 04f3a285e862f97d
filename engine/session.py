"""One prompt whose answer somebody else chooses, token by token or many at once: what evaluation and checks need.

`Model.session` opens it. The prompt is computed once; after it any ids may be put at any later positions, again and
again: a row that is computed again takes the place of the one at its position, and later rows are not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.hf_adapter import HfModel
    from engine.plan import Plan
    from engine.rows import WorkingRows
    from engine.turns import Turns

_PASS_TOKENS = 2048  # rows per pass of a full prefill


class Session:
    """Rows of one prompt. Not thread-safe; passes take turns with other requests of the model."""

    def __init__(self, hf: HfModel, turns: Turns, plan: Plan, rows: WorkingRows, positions: torch.Tensor) -> None:
        """For the `positions` of the prompt that are to be computed, ascending."""
        self._hf, self._turns, self._plan = hf, turns, plan
        self._rows, self._positions = rows, positions

    @torch.inference_mode()
    def prompt(self) -> torch.Tensor:
        """Compute the prompt; logits `[vocab]` of its last row, fp32. Once."""
        ids = torch.tensor(self._plan.token_ids)[self._positions]
        for start in range(0, len(ids), _PASS_TOKENS):
            piece = slice(start, start + _PASS_TOKENS)
            last = start + _PASS_TOKENS >= len(ids)
            out = self._pass(ids[piece], self._positions[piece], 1 if last else 0, wanted=last)
        assert out is not None
        return out[0]

    @torch.inference_mode()
    def extend(self, ids: Sequence[int], offset: int = 0) -> torch.Tensor:
        """Put `ids` behind the prompt, `offset` tokens after its end; logits `[len(ids), vocab]`, fp32."""
        start = self._plan.n_tokens + offset
        out = self._pass(torch.tensor(ids), torch.arange(start, start + len(ids)), len(ids), wanted=True)
        assert out is not None
        return out

    def _pass(self, ids: torch.Tensor, positions: torch.Tensor, keep: int, *, wanted: bool) -> torch.Tensor | None:
        self._rows.begin(positions)
        with self._turns.turn():
            if not wanted:
                self._hf.run(ids, positions, self._rows)
                return None
            return self._hf.logits(ids, positions, self._rows, keep).float().cpu()
