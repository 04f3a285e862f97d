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
from demo.script import Change, Deletion, Fact, holds
from schemas.api import AnswerResponse
from schemas.errors import KvquiltError

ANSWER_TOKENS = 32  # the packaged model is small and rambles after its first sentence
LONG_TOKENS = 4_000
CHANGE_TIMEOUT_S = 120.0
REUSE_RUNS = 5


class Asker:
    """Asks the service, shows question, streamed answer and sources, and remembers the times to the first token."""

    def __init__(self, console: Console, service: Service, k: int) -> None:
        self.console, self.service, self._k = console, service, k
        self._ttft_s: list[float] = []

    def ask(self, question: str, about: str | None = None) -> AnswerResponse:
        """One question, shown; with the version of the page that it is `about`."""
        self.console.print(f"\n[bold]{escape(question)}[/bold]")
        body = {"question": question, "stream": True, "k": self._k, "max_tokens": ANSWER_TOKENS}
        answer = read_answer(self.service.events("/v1/answer", body), live=True)
        self._ttft_s.append(answer.timing.ttft_s)
        usage = answer.usage
        cited = dict.fromkeys(
            f"{citation.doc_id} (version {citation.version})" if citation.doc_id == about else citation.doc_id
            for citation in answer.citations
        )
        counts = f"{usage.prompt_tokens} prompt tokens = {usage.reused_tokens} reused + {usage.fresh_tokens} fresh"
        self.console.print(f"\n[dim]from {escape(', '.join(cited))}", soft_wrap=True)
        self.console.print(f"[dim]first token {answer.timing.ttft_s * 1000:.0f} ms; {counts}")
        return answer

    def median_ttft_s(self) -> float:
        """Over all questions so far."""
        return statistics.median(self._ttft_s)


def ask_facts(asker: Asker, facts: tuple[Fact, ...], report: Report) -> None:
    """The questions at the beginning."""
    right = 0
    for fact in facts:
        answer = asker.ask(fact.question)
        found = holds(answer.answer, fact.expect)
        right += found
        asker.console.print(f"[{'green' if found else 'red'}]{'holds' if found else 'lacks'} {fact.expect[0]!r}")
    report.add("answers that hold the fact asked for", f"{right} of {len(facts)}")
    report.add("median time to first token of these", f"{asker.median_ttft_s() * 1000:.0f} ms")


def change(console: Console, asker: Asker, what: Change, handbook: Path, report: Report) -> None:
    """Publish a new version of one page, wait until it is servable, and ask again."""
    console.rule(f"change {what.doc}")
    before = asker.ask(what.question, about=what.doc)
    content = (handbook / what.doc).read_text()
    if what.old not in content:
        raise KvquiltError(f"{what.doc} does not hold {what.old!r}; questions.yaml must follow the handbook")
    console.print(f"\n[yellow]- {escape(what.old)}\n+ {escape(what.new)}[/yellow]")
    start_s = time.monotonic()
    old = _version(asker.service, what.doc)
    body = {"content": content.replace(what.old, what.new), "content_type": "markdown", "title": _title(content)}
    asker.service.put(document_path(what.doc), body)
    status = _reach(asker.service, what.doc, old)
    report.add("a changed page, event to servable text", _seconds(status["committed_ms"] - status["event_ms"]))
    while status["kv_ready"] < status["chunks"]:
        time.sleep(POLL_S)
        status = asker.service.status(what.doc) or status
    report.add("… and KV", f"{time.monotonic() - start_s:.1f} s")
    after = asker.ask(what.question, about=what.doc)
    stale = sum(c.doc_id == what.doc and c.version <= old for c in after.citations)
    report.add("chunks of the old version in the next answer", str(stale))
    if stale:
        report.fault("an answer after the change was made from the old version")
    said = [_said(answer, what.expect_before, what.expect_after) for answer in (before, after)]
    report.add("the code that was said before and after", " → ".join(said))


def delete(console: Console, asker: Asker, what: Deletion, report: Report) -> None:
    """Delete one page, wait for the tombstone, and ask again."""
    console.rule(f"delete {what.doc}")
    before = asker.ask(what.question, about=what.doc)
    old = _version(asker.service, what.doc)
    asker.service.delete(document_path(what.doc))
    status = _reach(asker.service, what.doc, old)
    console.print("\n[yellow]deleted[/yellow]")
    report.add("a deleted page, event to not answered from", _seconds(status["committed_ms"] - status["event_ms"]))
    after = asker.ask(what.question, about=what.doc)
    left = sum(c.doc_id == what.doc for c in after.citations)
    report.add(
        "chunks of it in the next answer", f"{left} (before: {sum(c.doc_id == what.doc for c in before.citations)})"
    )
    report.add("the code is still said", "yes" if holds(after.answer, what.unexpected) else "no")


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


def _said(answer: AnswerResponse, *facts: tuple[str, ...]) -> str:
    """Which of the facts the answer holds."""
    return " and ".join(fact[0] for fact in facts if holds(answer.answer, fact)) or "neither"


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


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.2f} s"
