"""Questions asked all along, each answer judged by what was visible while it was made."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from bench.chaos import audit
from bench.chaos.audit import Fault
from bench.chaos.truth import HeadLog, Truth
from schemas.ids import DocumentKey

_PAUSE_S = 0.03  # between questions: the pipelines want the processor too


class Asking:
    """Asks in a thread while the block runs.

    Attributes:
        faults: stale answers.
        answered, cached, refused: answers, chunks in them whose KV was loaded, and questions that got no answer.
    """

    def __init__(self, url: str, tenant: str, texts: Sequence[str], log: HeadLog, truth: Truth, seed: int) -> None:
        self.faults: list[Fault] = []
        self.answered = self.cached = self.refused = 0
        self._tenant, self._texts, self._log, self._truth = tenant, texts, log, truth
        self._rng = random.Random(seed)
        self._client = httpx.Client(base_url=url, headers={"authorization": f"Bearer key-{tenant}"}, timeout=30)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="questions")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            begin = time.monotonic()
            question = {"question": self._rng.choice(self._texts), "max_tokens": 1, "k": 4, "cache_mode": "reuse"}
            try:
                answer = self._client.post("/v1/answer", json=question)
            except httpx.HTTPError:  # the server was killed, or its answer was cut off
                self.refused += 1
                self._stop.wait(0.05)
                continue
            if answer.status_code != 200:  # a store failed, or the models are being loaded
                self.refused += 1
                self._stop.wait(0.05)
                continue
            self.judge(answer.json(), begin, time.monotonic())
            self._stop.wait(_PAUSE_S)

    def judge(self, answer: dict[str, Any], begin: float, end: float) -> None:
        """Look at every chunk of an answer."""
        self.answered += 1
        for cited in answer["citations"]:
            document, version = DocumentKey(cited["tenant"], cited["doc_id"]), cited["version"]
            self.cached += cited["source"] != "fresh"
            self.faults += audit.stale(self._log, self._truth, document, version, cited["text"], begin, end)
            if document.tenant != self._tenant:
                self.faults.append(
                    Fault(audit.Kind.STALE, document, f"an answer for {self._tenant} used another tenant")
                )
