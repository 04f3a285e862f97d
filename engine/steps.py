"""The passes of an answer: the open rows of the prompt, then one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from engine.decode import Detokenizer, Sampler, SamplingParams, Step
from engine.hf_adapter import HfModel
from engine.plan import Plan
from engine.rows import WorkingRows
from engine.tokenizer import Tokenizer
from engine.turns import Turns

_PASS_TOKENS = 2048  # rows per pass of a full prefill: between passes it can be cancelled


class Answering:
    """Runs a model's answers; each pass is one turn."""

    def __init__(self, hf: HfModel, turns: Turns, tokenizer: Tokenizer) -> None:
        self._hf, self._turns, self._tokenizer = hf, turns, tokenizer

    def steps(
        self,
        plan: Plan,
        rows: WorkingRows,
        positions: torch.Tensor,
        params: SamplingParams,
        limit: int,
        cancelled: Callable[[], bool],
    ) -> Generator[Step, None, bool]:
        """The answer's steps; whether it was completed."""
        sampler, text = Sampler(params), Detokenizer(self._tokenizer.decode)
        logits = self._first_pass(plan, rows, positions, cancelled)
        for number in range(limit):
            if logits is None:
                return False
            token = sampler.choose(logits)
            if token in self._tokenizer.stop_ids:
                yield Step(token, text.finish(), "stop")
                return True
            piece = text.add(token)
            if number == limit - 1:
                yield Step(token, piece + text.finish(), "length")
                return True
            yield Step(token, piece)
            logits = self._next_pass(token, plan.n_tokens + number, rows, cancelled)
        return False

    @torch.inference_mode()
    def _first_pass(
        self, plan: Plan, rows: WorkingRows, positions: torch.Tensor, cancelled: Callable[[], bool]
    ) -> torch.Tensor | None:
        """Run the open rows; logits `[vocab]` of the last, or None if cancelled."""
        ids = torch.tensor(plan.token_ids)[positions]
        starts = range(0, len(ids), _PASS_TOKENS)
        pieces = [(ids[at : at + _PASS_TOKENS], positions[at : at + _PASS_TOKENS]) for at in starts]
        for piece, where in pieces[:-1]:
            if cancelled():
                return None
            rows.begin(where)
            with self._turns.turn():
                self._hf.run(piece, where, rows)
        if cancelled():
            return None
        rows.begin(pieces[-1][1])
        with self._turns.turn():
            return self._hf.logits(*pieces[-1], rows)[0]

    @torch.inference_mode()
    def _next_pass(
        self, token: int, position: int, rows: WorkingRows, cancelled: Callable[[], bool]
    ) -> torch.Tensor | None:
        if cancelled():
            return None
        where = torch.tensor([position])
        rows.begin(where)
        with self._turns.turn():
            return self._hf.logits(torch.tensor([token]), where, rows)[0]
