"""The nearest chunks of a corpus, for fused prefill.

A chunk's vector is the mean of its windows' vectors, of unit length; nearness is the cosine. The chunk itself is not
its neighbour, nor is another chunk with the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from quality.questions import Passage
from quality.row_cache import RowCache
from schemas.ids import digest, token_digest

Embed = Callable[[Sequence[str]], list[npt.NDArray[np.float32]]]
_BATCH = 64


class Corpus:
    """Every different passage of a set, with its vector once that is needed."""

    def __init__(
        self,
        passages: Sequence[Passage],
        encoder: Callable[[], tuple[Embed, str]],
        cache: RowCache,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Nothing is embedded yet.

        Args:
            encoder: gives texts -> one `[n_windows, dim]` array each, and the digest that the vectors are cached
                under, together with the texts. Called when vectors are needed.
            progress: told how many of how many are embedded.
        """
        self.passages = list(passages)
        self._number = {passage.ids: number for number, passage in enumerate(self.passages)}
        self._encoder, self._cache, self._progress = encoder, cache, progress

    @cached_property
    def _vectors(self) -> npt.NDArray[np.float32]:
        """`[n_passages, dim]`, of unit length; embedded now, or by an earlier run."""
        embed, embedder_sha256 = self._encoder()

        def compute() -> torch.Tensor:
            means: list[npt.NDArray[np.float32]] = []
            for start in range(0, len(self.passages), _BATCH):
                texts = [passage.text for passage in self.passages[start : start + _BATCH]]
                means += [windows.mean(0) for windows in embed(texts)]
                self._progress(len(means), len(self.passages))
            rows = np.stack(means)
            return torch.from_numpy(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))

        name = digest(["vectors", 1, embedder_sha256, [token_digest(passage.ids) for passage in self.passages]])
        vectors: npt.NDArray[np.float32] = self._cache.tensor(name, compute).numpy()
        return vectors

    def nearest(self, ids: Sequence[int], n: int) -> list[Passage]:
        """The `n` nearest other passages to one of the corpus, nearest first.

        Raises:
            KeyError: no passage of the corpus has these ids.
        """
        number = self._number[tuple(ids)]
        scores = self._vectors @ self._vectors[number]
        order = np.argsort(-scores, kind="stable")
        return [self.passages[other] for other in order if other != number][:n]
