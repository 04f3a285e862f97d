"""What is measured on one answer, and how answers are put together. One definition of each.

KL(full ‖ method)   of the next token, at each of the first tokens of full attention's own greedy answer, which is
                    given to the method (teacher forcing); in nats
F1                  of words: lower-case, no punctuation, no articles; the best over all accepted answers
right               an accepted answer's words stand in the given answer, in order and without a gap
retention           of the questions that full attention answers right and no context does not: the share kept
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

BOOTSTRAP = 2000  # resamples
CONFIDENCE = 0.95
_ARTICLES = frozenset({"a", "an", "the"})
_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}\u2018\u2019\u201c\u201d\u2013\u2014]")


def words(text: str) -> list[str]:
    """The words of a text as all metrics see them."""
    return [word for word in _PUNCTUATION.sub(" ", text.lower()).split() if word not in _ARTICLES]


def f1(answer: str, accepted: Sequence[str]) -> float | None:
    """Word F1, 0 to 1; None where no answer is known."""
    return max((_f1(words(answer), words(each)) for each in accepted), default=None)


def right(answer: str, accepted: Sequence[str]) -> bool | None:
    """Whether an accepted answer is in it; None where no answer is known."""
    if not accepted:
        return None
    given = f" {' '.join(words(answer))} "
    return any(f" {' '.join(words(each))} " in given for each in accepted if words(each))


def kl(reference: torch.Tensor, logits: torch.Tensor) -> list[float]:
    """KL(reference ‖ softmax(logits)) of every row, in nats.

    Args:
        reference: log-probabilities `[n, vocab]`.
        logits: `[n, vocab]`.

    Raises:
        ValueError: a number is not finite.
    """
    log_p, log_q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    if not bool(divergence.isfinite().all()):
        raise ValueError("logits hold NaN or infinity; the rows that they were computed over are broken")
    return [float(value) for value in divergence.clamp_min(0.0)]


@dataclass(frozen=True)
class Retention:
    """Of the questions that need their context: what a method keeps.

    Attributes:
        value: kept / asked; None where no question qualifies.
        low, high: bootstrap interval of it.
        asked: questions that full attention answers right and no context does not.
        kept, lost: of those.
        gained: right, where full attention is wrong.
    """

    value: float | None
    low: float | None
    high: float | None
    asked: int
    kept: int
    lost: int
    gained: int


def retention(full: Sequence[bool], no_context: Sequence[bool], method: Sequence[bool]) -> Retention:
    """Conditional retention over the same questions, in the same order."""
    f, n, m = (np.asarray(values, bool) for values in (full, no_context, method))
    asked, kept = f & ~n, f & ~n & m

    def share(at: np.ndarray) -> np.ndarray:  # [resamples, questions] -> [resamples]
        total = asked[at].sum(-1)
        return np.where(total > 0, kept[at].sum(-1) / np.maximum(total, 1), np.nan)

    value = float(kept.sum() / asked.sum()) if asked.any() else None
    low, high = interval(len(f), share) if value is not None else (None, None)
    return Retention(value, low, high, int(asked.sum()), int(kept.sum()), int((asked & ~m).sum()), int((~f & m).sum()))


def mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Bootstrap interval of a mean over questions."""
    given = np.asarray(values, float)
    return interval(len(given), lambda at: given[at].mean(-1))


def interval(n: int, statistic: Callable[[np.ndarray], np.ndarray]) -> tuple[float | None, float | None]:
    """Percentile bootstrap over `n` questions, the same resamples for every method (paired); None for no question."""
    if not n:
        return None, None
    at = np.random.default_rng(0).integers(0, n, (BOOTSTRAP, n))
    values = statistic(at)
    values = values[np.isfinite(values)]
    if not len(values):
        return None, None
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted))
