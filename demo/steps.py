"""The steps of the demo after publishing: ask, change and ask again, delete and ask again, and the long question."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from cli.ask import read_answer
from cli.service import Service, document_path
from cli.waiting import POLL_S
from demo.report import Report
from demo.script import Change, Deletion
from schemas.api import AnswerResponse
from schemas.errors import KvquiltError

LONG_TOKENS = 4_000
CHANGE_TIMEOUT_S = 120.0
REUSE_RUNS = 5


class Asker:
    """Asks the service, shows question, streamed answer and sources, and remembers the times to the first token."""

    def __init__(self, console: Console, service: Service) -> None:
        self.console, self.service = console, service
        self._ttft_s: list[float] = []

    def ask(self, question: str) -> AnswerResponse:
        """One question, shown."""
        self.console.print(f"\n[bold]{escape(question)}[/bold]")
        answer = read_answer(self.service.events("/v1/answer", {"question": question, "stream": True}), live=True)
        self._ttft_s.append(answer.timing.ttft_s)
        usage = answer.usage
        cited = ", ".join(f"{citation.doc_id} v{_short(citation.version)}" for citation in answer.citations)
        counts = f"{usage.prompt_tokens} prompt tokens = {usage.reused_tokens} reused + {usage.fresh_tokens} fresh"
        self.console.print(f"\n[dim]from {escape(cited)}", soft_wrap=True)
        self.console.print(f"[dim]first token {answer.timing.ttft_s * 1000:.0f} ms; {counts}")
        return answer

    def median_ttft_s(self) -> float:
        """Over all questions so far."""
        return statistics.median(self._ttft_s)


def change(console: Console, asker: Asker, what: Change, handbook: Path, report: Report) -> None:
    """Publish a new version of one page, wait until it is servable, and ask again."""
    console.rule(f"change {what.document}")
    before = asker.ask(what.question)
    content = (handbook / what.document).read_text()
    if what.old not in content:
        raise KvquiltError(f"{what.document} does not hold {what.old!r}; questions.yaml must follow the handbook")
    console.print(f"\n[yellow]- {escape(what.old)}\n+ {escape(what.new)}[/yellow]")
    start_s = time.monotonic()
    old = _version(asker.service, what.document)
    body = {"content": content.replace(what.old, what.new), "content_type": "markdown", "title": _title(content)}
    asker.service.put(document_path(what.document), body)
    status = _reach(asker.service, what.document, old)
    report.add("a changed page, event to servable text", _seconds(status["committed_ms"] - status["event_ms"]))
    while status["kv_ready"] < status["chunks"]:
        time.sleep(POLL_S)
        status = asker.service.status(what.document) or status
    report.add("… and KV", f"{time.monotonic() - start_s:.1f} s")
    after = asker.ask(what.question)
    stale = [c for c in after.citations if c.doc_id == what.document and c.version <= old]
    was = sum(c.doc_id == what.document for c in before.citations)
    now = sum(c.doc_id == what.document for c in after.citations)
    report.add("its citations before, after, of the old version after", f"{was}, {now}, {len(stale)}")


def delete(console: Console, asker: Asker, what: Deletion, report: Report) -> None:
    """Delete one page, wait for the tombstone, and ask again."""
    console.rule(f"delete {what.document}")
    before = asker.ask(what.question)
    old = _version(asker.service, what.document)
    asker.service.delete(document_path(what.document))
    status = _reach(asker.service, what.document, old)
    console.print("\n[yellow]deleted[/yellow]")
    report.add("a deleted page, event to not answered from", _seconds(status["committed_ms"] - status["event_ms"]))
    after = asker.ask(what.question)
    was = sum(c.doc_id == what.document for c in before.citations)
    left = sum(c.doc_id == what.document for c in after.citations)
    report.add("its citations before and after", f"{was} and {left}")


def race(console: Console, service: Service, question: str, report: Report) -> None:
    """One question over about 4,000 prompt tokens: full prefill against stitched KV."""
    console.rule("one long question, computed in full and stitched")
    k = _chunks_for(service, question, LONG_TOKENS)
    console.print(f"\n[bold]{escape(question)}[/bold]  ({k} chunks)")
    stitched = [_time(service, question, k, "reuse") for _ in range(1 + REUSE_RUNS)][1:]  # the first one warms up
    reuse = sorted(stitched, key=lambda answer: answer.timing.ttft_s)[REUSE_RUNS // 2]
    console.print(f"stitched KV   {reuse.timing.ttft_s:8.3f} s   (median of {REUSE_RUNS})")
    full = _time(service, question, k, "exact")
    console.print(f"full prefill  {full.timing.ttft_s:8.3f} s")
    usage = reuse.usage
    report.add(f"first token over {full.usage.prompt_tokens} tokens, full prefill", f"{full.timing.ttft_s:.2f} s")
    report.add(f"first token over {usage.prompt_tokens} tokens, stitched KV", f"{reuse.timing.ttft_s:.3f} s")
    report.add("ratio", f"{full.timing.ttft_s / reuse.timing.ttft_s:.1f}")
    report.add("tokens reused + fresh", f"{usage.reused_tokens} + {usage.fresh_tokens} = {usage.prompt_tokens}")


def _time(service: Service, question: str, k: int, mode: str) -> AnswerResponse:
    body = {"question": question, "k": k, "cache_mode": mode, "max_tokens": 1}
    return AnswerResponse.model_validate(service.post("/v1/answer", body))


def _chunks_for(service: Service, question: str, n_tokens: int) -> int:
    """The number of chunks whose prompt comes closest to `n_tokens`."""
    sizes: dict[int, int] = {}
    low, high = 1, 64
    while low < high:
        middle = (low + high) // 2
        sizes[middle] = _time(service, question, middle, "reuse").usage.prompt_tokens
        low, high = (middle + 1, high) if sizes[middle] < n_tokens else (low, middle)
    return min(sizes, key=lambda k: abs(sizes[k] - n_tokens))


def _version(service: Service, doc_id: str) -> int:
    status = service.status(doc_id)
    if status is None:
        raise KvquiltError(f"{doc_id} is not in the handbook that was published; questions.yaml must follow it")
    return int(status["version"])


def _reach(service: Service, doc_id: str, old: int) -> dict[str, Any]:
    """The status of the document as soon as it has a version above `old`."""
    deadline = time.monotonic() + CHANGE_TIMEOUT_S
    while time.monotonic() < deadline:
        status = service.status(doc_id)
        if status is not None and status["version"] > old:
            return status
        time.sleep(0.05)
    raise KvquiltError(f"the change of {doc_id} is not servable after {CHANGE_TIMEOUT_S:.0f} s")


def _title(content: str) -> str:
    return content.splitlines()[0].lstrip("# ").strip()


def _short(version: int) -> str:
    """Versions made from timestamps are long; the last digits tell them apart."""
    text = str(version)
    return text if len(text) <= 8 else f"…{text[-6:]}"


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.2f} s"
