"""What of the retrieved chunks goes into the prompt, and in which mode it is answered. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from engine import Plan, PlannedChunk, PromptTemplate, plan_prompt
from schemas.api import CacheMode
from schemas.errors import RequestError
from serve.retrieve import Found


def decide_mode(asked: CacheMode, reuse_refusal: str | None) -> tuple[CacheMode, str | None]:
    """The mode that is really used, and one sentence where it is not the one asked for."""
    if asked is not CacheMode.EXACT and reuse_refusal is not None:
        return CacheMode.EXACT, f"Answered in exact mode: {reuse_refusal}"
    return asked, None


def fit(
    template: PromptTemplate, question_ids: Sequence[int], found: Sequence[Found], max_prompt_tokens: int
) -> tuple[list[Found], str | None]:
    """The best chunks that fit, in the order given (best first), and one sentence where some were left out.

    Chunks are left out whole, the worst first; none is ever cut.

    Raises:
        RequestError: the question alone does not fit.
    """
    kept = list(found)
    while (n_tokens := make_plan(template, question_ids, kept, [False] * len(kept)).n_tokens) > max_prompt_tokens:
        if not kept:
            raise RequestError(
                f"the question makes a prompt of {n_tokens:,} tokens without any passage; "
                f"at most {max_prompt_tokens:,} fit. Ask a shorter question or for fewer max_tokens",
                code="context_length_exceeded",
                param="question",
            )
        kept.pop()
    left_out = len(found) - len(kept)
    if not left_out:
        return kept, None
    return kept, f"{left_out} of {len(found)} retrieved chunks did not fit into {max_prompt_tokens:,} prompt tokens."


def make_plan(
    template: PromptTemplate, question_ids: Sequence[int], found: Sequence[Found], cached: Sequence[bool]
) -> Plan:
    """The prompt of these chunks, in their order; `cached[n]` says whether chunk n has KV."""
    chunks = [
        PlannedChunk(token_ids=chunk.indexed.chunk.token_ids, cached=has_kv)
        for chunk, has_kv in zip(found, cached, strict=True)
    ]
    return plan_prompt(template, question_ids, chunks)
