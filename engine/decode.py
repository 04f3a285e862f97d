"""The answer: which token comes next, and how its text is streamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_UNFINISHED = "\ufffd"  # what half of a UTF-8 character decodes to


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy; `seed` None draws a new one."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 (got {self.max_tokens})")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative (got {self.temperature})")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (got {self.top_p})")


@dataclass(frozen=True)
class Step:
    """One token of the answer.

    Attributes:
        token_id: the token.
        text: the text that is complete with it; empty for stop tokens and in the middle of a character.
        finish_reason: `stop` or `length` on the last step, else None.
    """

    token_id: int
    text: str
    finish_reason: str | None = None


class Sampler:
    """Chooses from logits `[vocab]`; one per answer."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token id."""
        if self._params.temperature == 0:
            return int(logits.argmax())
        logits = logits.double().cpu()
        shares = ((logits - logits.max()) / self._params.temperature).softmax(-1)  # finite, however small
        if self._params.top_p < 1:
            ordered, ids = shares.sort(descending=True)
            outside = ordered.cumsum(-1) - ordered >= self._params.top_p
            outside[0] = False
            shares = shares.index_fill(0, ids[outside], 0.0)
        return int(torch.multinomial(shares, 1, generator=self._generator))


class Detokenizer:
    """Ids to text, piece by piece; the pieces join to the text of all ids, and no character is ever cut."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._done = 0  # ids[start:done] are out; they are the context of the next piece

    def add(self, token_id: int) -> str:
        """The text that is complete with this token; empty in the middle of a character."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._done])
        after = self._decode(self._ids[self._start :])
        if after.endswith(_UNFINISHED) or len(after) <= len(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        """What is left at the end, without a half character."""
        before = self._decode(self._ids[self._start : self._done])
        after = self._decode(self._ids[self._start :])
        self._start = self._done = len(self._ids)
        return after[len(before) :].rstrip(_UNFINISHED)
