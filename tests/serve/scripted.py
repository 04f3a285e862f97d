"""A model that says its words one by one, with an embedder and a tokenizer to match, and the generation they make."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine import SamplingParams, Step
from engine.prefill import PrefixRows
from schemas.certificate import Coverage
from schemas.fingerprint import Fingerprint, Generation
from schemas.ids import token_digest

DIM = 16
PREFIX = (1, 2, 3)


class ByteTokenizer:
    """One id per UTF-8 byte."""

    def encode(self, text: str) -> list[int]:
        return [byte + 10 for byte in text.encode()]


class LetterEmbedder:
    """Counts words by a checksum: texts that share words are near each other."""

    dim = DIM

    def embed_query(self, text: str) -> np.ndarray:
        vector = np.full(DIM, 1e-3, np.float32)
        for word in text.lower().split():
            vector[zlib.crc32(word.strip("?.,!").encode()) % DIM] += 1
        return vector / np.linalg.norm(vector)


FINGERPRINT = Fingerprint(
    model="scripted",
    weights_sha256="w",
    tokenizer_sha256="t",
    rope={"full": "r"},
    n_layers=1,
    n_kv_heads=1,
    head_dim=2,
    rotary_dim=2,
    rope_layout="half_split",
    dtype="float32",
    k_state="pre_rope",
    layout="LHTD",
)
GENERATION = Generation(
    fingerprint=FINGERPRINT,
    prefix_sha256=token_digest(PREFIX),
    front_sha256=token_digest(PREFIX),
    prefill_variant="shared_prefix",
    neighbours=0,
    embedder="letters",
    embedder_sha256="e",
    embedding_dim=DIM,
    chunker="test/1",
    chunk_max_tokens=512,
)


COVERS = Coverage(
    fingerprint=FINGERPRINT.digest, tokenizer_sha256="t", template_sha256="p", company_sha256="c", kvquilt="k"
)


@dataclass
class ScriptedModel:
    """Says its words one by one. `hold` keeps the next step back until it is set, or until it is cancelled."""

    words: Sequence[str] = ("It ", "is ", "so.")
    fingerprint: Fingerprint = FINGERPRINT
    reuse_refusal: str | None = None
    max_tokens: int = 4096
    hold_at: int | None = None
    hold: threading.Event = field(default_factory=threading.Event)
    held: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    stopped: threading.Event = field(default_factory=threading.Event)
    fails_at: int | None = None
    stitched_rows: list[int] = field(default_factory=list)
    fronts: list[Any] = field(default_factory=list)
    selected: list[tuple[str, float, bool]] = field(default_factory=list)
    selected_as_fused: list[bool] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)  # tokens of the exact prefix that was handed over
    exact_rows_last: bool = True
    prefill_pace_s: float | None = None
    repaired: list[int] = field(default_factory=list)
    calls: int = 0

    def stitch(
        self,
        plan: Any,
        rows: Sequence[Any],
        *,
        cancelled: Callable[[], bool] = lambda: False,
        fronts: Any = None,
        prefix: PrefixRows | None = None,
    ) -> object:
        assert prefix is None or prefix.n_tokens == len(plan.prefix_ids)
        self.fronts.append(fronts)
        self.stitched_rows.append(sum(row is not None for row in rows))
        return object()

    def select(
        self,
        plan: Any,
        stitched: object,
        policy: Any,
        budget: float,
        *,
        first_chunk_exact: bool = True,
        fused: bool = False,
    ) -> torch.Tensor:
        """The first tokens of the chunks behind the first, whatever the policy."""
        self.selected.append((policy.name, budget, first_chunk_exact))
        self.selected_as_fused.append(fused)
        chunks = plan.chunks[1:] if first_chunk_exact else plan.chunks
        n = round(budget * sum(len(chunk) for chunk in plan.chunks))
        return torch.tensor([at for chunk in chunks for at in range(chunk.start, chunk.end)][:n], dtype=torch.int64)

    def generate(
        self,
        plan: Any,
        stitched: object | None,
        sampling: SamplingParams,
        cancelled: Callable[[], bool],
        *,
        repair: torch.Tensor | None = None,
        prefix: PrefixRows | None = None,
        keep: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> Iterator[Step]:
        self.calls += 1
        self.prefixes.append(0 if prefix is None else prefix.n_tokens)
        self.repaired.append(0 if repair is None else len(repair))
        words = self.words[: sampling.max_tokens]
        for n, word in enumerate(words):
            if n == self.fails_at:
                raise RuntimeError("the secret internals")
            if n == self.hold_at:
                self.held.release()
                while not self.hold.wait(0.002):
                    if cancelled():
                        self.stopped.set()
                        return
            last = n + 1 == len(words)
            yield Step(n, word, ("length" if len(words) < len(self.words) else "stop") if last else None)
        if stitched is None and keep is not None:
            rows = torch.tensor(plan.token_ids[: plan.segments[-1].start], dtype=torch.float32).view(1, 1, -1, 1)
            keep(rows, rows)
