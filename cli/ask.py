"""`kvquilt ask`: stream an answer, then say where it comes from and what it cost."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from cli.context import Context, Format
from cli.service import Service
from schemas.api import AnswerResponse, CacheMode
from schemas.errors import InputError, KvquiltError


def ask(
    context: Context,
    question: str,
    *,
    mode: str,
    k: int | None,
    max_tokens: int | None,
    policy: str | None,
    budget: float | None,
) -> None:
    """Ask the service, print the answer as it comes, then citations, token counts and timing."""
    if mode not in list(CacheMode):
        raise InputError(f"--mode {mode} is not one of {', '.join(CacheMode)}")
    body = {"question": question, "cache_mode": mode, "stream": True, "k": k, "max_tokens": max_tokens}
    body |= {"policy": policy, "budget": budget}
    live = context.format is Format.TERMINAL and context.output is None
    with Service.of(context.settings) as service:
        answer = read_answer(service.events("/v1/answer", body), live=live)
    report = report_lines(answer)
    if live:
        print("\n\n" + report)
    else:
        context.result(answer.model_dump(mode="json"), f"{answer.answer}\n\n{report}")


def read_answer(events: Iterable[tuple[str, Any]], *, live: bool) -> AnswerResponse:
    """The answer at the end of a stream; with `live`, its text goes to stdout as it comes.

    Raises:
        KvquiltError: the stream says that the answer failed, or ends before it is complete.
    """
    for name, data in events:
        if name == "token" and live:
            sys.stdout.write(data["text"])
            sys.stdout.flush()
        elif name == "error":
            raise KvquiltError(f"the answer failed: {data['error']['message']}")
        elif name == "done":
            return AnswerResponse.model_validate(data)
    raise KvquiltError("the service closed the stream before the answer was complete")


def report_lines(answer: AnswerResponse) -> str:
    """Citations, token counts and the parts of the time to the first token, for people."""
    lines = []
    for number, citation in enumerate(answer.citations, 1):
        place = f"characters {citation.char_start}-{citation.char_end}"
        lines.append(
            f"[{number}] {citation.doc_id}  version {citation.version}, chunk {citation.ordinal}, {place}, "
            f"score {citation.score:.2f}, KV {citation.source}"
        )
    usage, timing = answer.usage, answer.timing
    reused = f"{usage.reused_tokens} reused ({usage.prefix_tokens} of them exact)"
    lines.append(
        f"prompt {usage.prompt_tokens} tokens = {reused} + {usage.repaired_tokens} repaired + "
        f"{usage.fresh_tokens} fresh; mode {answer.cache_mode}, policy {answer.policy} at {answer.budget:.0%}"
    )
    parts = " + ".join(
        f"{name} {getattr(timing, name + '_s') * 1000:.0f}"
        for name in ("retrieve", "load", "stitch", "select", "repair", "first_step")
    )
    lines.append(f"first token after {timing.ttft_s * 1000:.0f} ms ({parts})")
    if answer.fallback:
        lines.append("not as planned: " + ", ".join(f"{count} {reason}" for reason, count in answer.fallback.items()))
    if answer.note:
        lines.append(answer.note)
    return "\n".join(lines)
