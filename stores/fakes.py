"""Fakes that are shipped: faults at a named call of any store, artifacts without a model.

With them crash-and-resume is a test of a few lines. The in-memory stores are the real ones (`:memory:`, `memory://`);
topics in memory are in `stores.memory_topics`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

import numpy as np

from schemas.fingerprint import Fingerprint
from schemas.ids import DocumentKey, artifact_key, token_digest
from schemas.kv_artifact import DTYPE_NBYTES, FORMAT_VERSION, ArtifactHeader, KvArtifact, payload_sha256

T = TypeVar("T")


class SimulatedCrash(BaseException):
    """The process is gone, as far as the code under test can tell: no `except Exception` may catch it."""


def kill() -> None:
    """End this process as `kill -9` does: no handler, no `finally`, no flush."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class CrashPoint:
    """Something goes wrong at a call.

    Attributes:
        call: name of the method, such as `put_new`.
        at: at which call of that name, from 1.
        fault: an error to raise, or a function to run, such as `kill`.
        after: the call has its effect first, and the caller is not told.
        times: how many calls in a row it goes wrong for.
    """

    call: str
    at: int = 1
    fault: BaseException | Callable[[], None] = field(default_factory=SimulatedCrash)
    after: bool = False
    times: int = 1


def with_faults(target: T, *points: CrashPoint) -> T:
    """`target`, going wrong at `points`; everything else is passed on. Its `calls` counts calls by name."""
    return cast("T", _Faulty(target, points))


class _Faulty:
    def __init__(self, target: object, points: Sequence[CrashPoint]) -> None:
        for point in points:
            if not callable(getattr(target, point.call, None)):
                raise ValueError(f"{type(target).__name__} has no method {point.call!r} to crash in")
        self._target, self._points = target, points
        self._lock = threading.Lock()
        self.calls: dict[str, int] = defaultdict(int)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.calls[name] += 1
                count = self.calls[name]
            due = [point for point in self._points if point.call == name and 0 <= count - point.at < point.times]
            _go_wrong(point for point in due if not point.after)
            result = found(*args, **kwargs)
            _go_wrong(point for point in due if point.after)
            return result

        return call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._target.close()  # type: ignore[attr-defined]


def _go_wrong(points: Iterable[CrashPoint]) -> None:
    for point in points:
        if isinstance(point.fault, BaseException):
            raise point.fault
        point.fault()


def fake_fingerprint(**changes: Any) -> Fingerprint:
    """A small complete fingerprint: 2 layers, 3 kv heads of 4 numbers, float32; `changes` replace fields."""
    fields: dict[str, Any] = {
        "model": "fake",
        "weights_sha256": "0" * 64,
        "tokenizer_sha256": "1" * 64,
        "rope": {"full_attention": "2" * 64},
        "n_layers": 2,
        "n_kv_heads": 3,
        "head_dim": 4,
        "rotary_dim": 4,
        "rope_layout": "half_split",
        "dtype": "float32",
        "k_state": "pre_rope",
        "layout": "LHTD",
    }
    return Fingerprint(**(fields | changes))


def fake_artifact(
    document: DocumentKey,
    token_ids: Sequence[int],
    *,
    version: int = 1,
    ordinal: int = 0,
    generation: str = "fake",
    fingerprint: Fingerprint | None = None,
    prefix_sha256: str = "3" * 64,
) -> tuple[str, KvArtifact]:
    """Key and artifact of a chunk; the rows are small finite numbers that depend on nothing but the token ids."""
    fingerprint = fingerprint or fake_fingerprint()
    ids = np.asarray(token_ids, np.int32)
    n_bytes = fingerprint.n_layers * fingerprint.n_kv_heads * len(ids) * fingerprint.head_dim
    n_bytes *= DTYPE_NBYTES[fingerprint.dtype]
    rng = np.random.default_rng(int(token_digest(token_ids)[:16], 16))
    # bytes below 0x40: every two or four of them are a small finite number in each of the dtypes
    k, v = (rng.integers(0, 0x40, n_bytes, np.uint8).tobytes() for _ in range(2))
    header = ArtifactHeader(
        format_version=FORMAT_VERSION,
        generation=generation,
        fingerprint=fingerprint,
        prefix_sha256=prefix_sha256,
        tenant=document.tenant,
        doc_id=document.doc_id,
        version=version,
        ordinal=ordinal,
        token_sha256=token_digest(token_ids),
        payload_sha256=payload_sha256(k, v, ids),
    )
    return artifact_key(fingerprint.digest, prefix_sha256, token_ids), KvArtifact(header, k, v, ids)
