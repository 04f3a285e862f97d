"""`closure`: contiguous blocks that do not read stale neighbours. Ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.policies.layers import named_layers
from engine.policies.spend import BlockRule, n_tokens_of, spend_on_blocks, top_tokens
from engine.scoring import NORM

if TYPE_CHECKING:
    from engine.selection import SelectionContext

SHALLOWEST, DEEPEST = 1 / 3, 0.8  # of the depth: below, attention is local; above, it serves the next token
LARGEST_BLOCK, FEWEST_BLOCKS = 16, 32
HEAD_REACH = 16.0  # tokens into a chunk after which its head's bonus has fallen to 1/e


class ClosurePolicy:
    """Short runs of tokens by the question's attention at all middle layers; over fused rows single tokens. Ours.

        score(t) = mean over layers l, from a third to four fifths of the depth, of ‖ mean over heads of A^l[h, :, t] ‖₂
        stale rows:  a(b) = Σ score over block b; the block worth most is taken, until the budget is spent;
                     worth(b) = a(b) · (1 + run_bonus, if the block before it is taken)
                     blocks of 16 tokens, or as many fewer as it takes for the budget to pay for 32 of them
        fused rows:  the tokens with the highest score(t) · (1 + head_bonus · e^(-i/16)), i tokens into their chunk

    Why: a token repaired alone reads stale neighbours, and importance is not repairability (arXiv 2609.17983); rows
    that were computed behind chunks like those of their prompt are not stale enough for that to matter, and blocks
    would only spend on words that nobody asked about. What is left wrong in them is their heads, as EPIC says of all
    chunks, and short chunks are mostly head; stale rows have other things wrong first. A small budget in large pieces
    misses most of what was asked.
    `infoflow` scores at three or four layers; which tokens matter differs by layer, and the mean over all middle ones
    chooses better (docs/log.md), for nearly the same pass.

    Options from which an earlier form was made, all measured worse as defaults (docs/log.md): `heads` takes every
    chunk's head block first, as EPIC does; `floor` gives every chunk so many tokens; `balance` divides the scores of
    a chunk by their mean to that power, because small models attend most to the chunk nearest to the question.

    With `fitted` the worth follows the closure form of IBM's spans work on vLLM (one policy file, unpublished):

        worth(b) = a(b) · (1 + b)^-0.33 · (0.1 + Σ over taken j < b of w(b - j)) / (0.1 + Σ over all j < b of w(b - j))
        w(d) = 0.06 · d^-1.25 + 0.0085, plus 0.554 if j is the chunk's head block

    b and j count blocks within their chunk. Its constants were fitted on Qwen3-32B, not on the model at hand. That
    the sums of a block run over its own chunk only is our reading. Differences to both: the pass ends behind the
    deepest layer that is scored, the mask is exact, no budget goes to rows that are exact already, and exactly the
    budget is spent: the last block is cut.
    """

    name = "closure"
    layout = "reordered"

    def __init__(
        self,
        layers: Sequence[int] | None = None,
        block: int | None = None,
        heads: bool = False,
        floor: int = 0,
        run_bonus: float = 0.5,
        fitted: bool = False,
        balance: float = 0.0,
        head_bonus: float = 4.0,
    ) -> None:
        """`layers` other than the middle ones; `block` of any size, also over fused rows; the rest as above."""
        self._layers, self._balance, self._fitting = layers, balance, block is None
        self._head_bonus = head_bonus
        worth, reads = (_fitted_worth, _fitted_reads) if fitted else (None, None)
        bonus, size = 0.0 if fitted else run_bonus, LARGEST_BLOCK if block is None else block
        self._rule = BlockRule(size=size, heads=heads, floor=floor, run_bonus=bonus, worth=worth, reads=reads)

    def score(self, context: SelectionContext) -> torch.Tensor:
        """See `Scored.score`."""
        n_layers = context.spec.n_layers
        layers = middle_layers(n_layers) if self._layers is None else named_layers(self._layers, n_layers)
        scores = context.attention(layers, NORM).mean(0)
        for chunk in context.chunks if self._balance else ():
            of_chunk = scores[chunk.start : chunk.end]
            of_chunk /= of_chunk.mean().clamp_min(1e-12) ** self._balance
        for chunk in context.chunks if context.fused else ():
            bonus = self._head_bonus * torch.exp(-torch.arange(len(chunk)) / HEAD_REACH)
            scores[chunk.start : chunk.end] *= 1.0 + bonus
        return scores

    def select(self, context: SelectionContext, budget: float) -> torch.Tensor:
        """See `Policy.select`."""
        n = n_tokens_of(context, budget)
        if not n:
            return torch.empty(0, dtype=torch.int64)
        if context.fused and self._fitting:
            return top_tokens(self.score(context), context.eligible, n)
        rule = replace(self._rule, size=block_for(n)) if self._fitting else self._rule
        return spend_on_blocks(self.score(context), context.chunks, n, rule)


def block_for(n_tokens: int) -> int:
    """Size of the blocks of which a budget of so many tokens pays for 32; at most `LARGEST_BLOCK`."""
    return min(max(n_tokens // FEWEST_BLOCKS, 1), LARGEST_BLOCK)


def middle_layers(n_layers: int) -> tuple[int, ...]:
    """The layers between `SHALLOWEST` and `DEEPEST`; at least one."""
    first = int(n_layers * SHALLOWEST + 1e-9)
    return tuple(range(first, max(int(n_layers * DEEPEST + 1e-9), first + 1)))


def _fitted_worth(number: torch.Tensor, fresh: torch.Tensor, everything: torch.Tensor) -> torch.Tensor:
    return (1.0 + number).pow(-0.33) * (0.1 + fresh) / (0.1 + everything)


def _fitted_reads(distance: torch.Tensor, head: bool) -> torch.Tensor:
    return 0.06 * distance.pow(-1.25) + (0.0085 + 0.554 if head else 0.0085)
