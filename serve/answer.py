"""One answer: retrieve -> visibility -> plan -> load -> stitch -> decode, as a stream of events.

Both forms of `/v1/answer` read the same events; the JSON form keeps the last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field

import torch

from engine import KvRows, Plan, SamplingParams, Step
from engine.repair import TokenCounts, count_tokens
from engine.variants import VARIANTS
from schemas.api import AnswerRequest, AnswerResponse, CacheMode, Citation, Timing, Usage
from schemas.certificate import Certificate
from schemas.errors import Cancelled, RequestError
from schemas.kv_artifact import KvArtifact
from schemas.receipt import Tier
from schemas.settings import Settings
from serve import blend, forms, prompt, threads
from serve.admission import Admission
from serve.blend import Choice
from serve.loading import KvLoader, Loaded
from serve.parts import Parts
from serve.prefixes import Known
from serve.retrieve import Found, Retriever, check_question
from serve.staleness import StaleWatch
from serve.telemetry import STAGES, Telemetry
from serve.tiers import Tiers

NOTHING_FOUND = "No document here can answer this: none is visible to you."
NOTHING_FOUND_NOTE = "No visible chunk was found, so the model was not asked."


@dataclass(frozen=True)
class Asked:
    """A request, and what is known of it from outside its body.

    Attributes:
        received_s: `time.perf_counter()` when the request came in; the time to the first token counts from here.
    """

    body: AnswerRequest
    tenant: str
    request_id: str
    received_s: float


@dataclass(frozen=True)
class Cited:
    """The prompt is complete: these chunks are in it."""

    citations: list[Citation]


@dataclass(frozen=True)
class Token:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class Done:
    """The answer is complete."""

    response: AnswerResponse


Event = Cited | Token | Done


@dataclass
class _Draft:
    """What is filled in while an answer is made."""

    mode: CacheMode
    notes: list[str] = field(default_factory=list)
    citations: list[Citation] = field(default_factory=list)
    loaded: Loaded = field(default_factory=Loaded)
    known: Known = field(default_factory=Known)  # exact rows of the prompt's beginning
    keep: Callable[[torch.Tensor, torch.Tensor], None] | None = None  # takes those of the whole prompt
    choice: Choice | None = None  # in `blend`
    repair: torch.Tensor | None = None  # positions that are computed again
    seconds: dict[str, float] = field(default_factory=dict)
    text: str = ""
    n_steps: int = 0
    finish_reason: str = "stop"

    @property
    def policy(self) -> str:
        """`none`: stitched and not repaired; `full`: everything behind the prefix was computed."""
        if self.mode is CacheMode.EXACT:
            return "full"
        return self.choice.row.policy if self.choice else "none"

    @property
    def budget(self) -> float:
        """Share of chunk tokens that the policy may have repaired."""
        if self.mode is CacheMode.EXACT:
            return 1.0
        return self.choice.budget if self.choice else 0.0

    def exact(self, reason: str) -> None:
        """Answer in exact mode after all."""
        self.loaded.release()
        self.mode, self.loaded, self.choice = CacheMode.EXACT, Loaded(fallback=self.loaded.fallback), None
        self.notes.append(f"Answered in exact mode: {reason}.")

    @property
    def tiers(self) -> dict[str, int]:
        """Where the KV of chunks came from."""
        exact = {str(Tier.PREFIX): self.known.n_chunks} if self.known.n_chunks else {}
        return exact | self.loaded.tiers

    def timing(self) -> Timing:
        return Timing(**{f"{stage}_s": self.seconds.get(stage, 0.0) for stage in (*STAGES, "ttft")})


class Answerer:
    """Makes answers. Blocking work runs in threads; closing a stream of events stops it."""

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        *,
        retriever: Retriever,
        loader: KvLoader,
        admission: Admission,
        tiers: Tiers,
        pool: Executor,
        telemetry: Telemetry,
        stale: StaleWatch,
    ) -> None:
        self._settings, self._parts, self._stale = settings, parts, stale
        self._retriever, self._loader, self._admission = retriever, loader, admission
        self._tiers = tiers
        self._pool, self._telemetry = pool, telemetry

    async def events(self, asked: Asked) -> AsyncGenerator[Event, None]:
        """`Cited`, then `Token`s, then `Done`. Close it to stop loading and decoding.

        Raises:
            RequestError: before the first event only.
            BusyError: before the first event only; no slot and no place in the queue.
            StoreError: before the first event only; the index did not answer.
        """
        self._check(asked.body)
        blend.check(asked.body)
        self._sampling(asked.body)
        mode, note = prompt.decide_mode(asked.body.cache_mode, self._parts.model.reuse_refusal)
        draft = _Draft(mode, [note] if note else [])
        complete = False
        try:
            async with self._admission.slot(), aclosing(self._answer(asked, draft)) as events:
                async for event in events:
                    if isinstance(event, Done):
                        break  # the slot is free before it is sent
                    yield event
            complete = True
            yield event
        except (asyncio.CancelledError, GeneratorExit):
            if not complete:
                self._telemetry.cancelled()
            raise
        finally:
            draft.loaded.release()

    def _check(self, body: AnswerRequest) -> None:
        check_question(body.question)
        served = self._parts.model.fingerprint.model
        if body.model is not None and body.model not in (served, self._settings.model.name):
            raise RequestError(
                f"model {body.model[:100]!r} is not served here; {served!r} is",
                status=404,
                code="model_not_found",
                param="model",
            )

    async def _answer(self, asked: Asked, draft: _Draft) -> AsyncGenerator[Event, None]:
        body = asked.body
        start_s, began_ms = time.perf_counter(), self._stale.now_ms()
        found = await self._retriever.visible(asked.tenant, body.question, body.k or self._settings.serve.k)
        draft.seconds["retrieve"] = time.perf_counter() - start_s
        if not found:
            draft.notes.append(NOTHING_FOUND_NOTE)
            draft.text = NOTHING_FOUND
            yield Cited([])
            yield Token(NOTHING_FOUND)
            yield Done(self._response(asked, draft, None))
            return

        look = self._stale.look([one.indexed.chunk for one in found], began_ms)
        sampling = self._sampling(body)
        question_ids, kept = await threads.call(self._pool, self._fit, body, found, sampling.max_tokens, draft)
        start_s = time.perf_counter()
        bare = prompt.make_plan(self._parts.template, question_ids, kept, [False] * len(kept))
        draft.known = await threads.call(self._pool, self._tiers.prefixes.find, asked.tenant, bare)
        await self._load(body, kept, draft)
        exact = draft.known.n_chunks
        artifacts = draft.loaded.artifacts or [None] * (len(kept) - exact)
        draft.seconds["load"] = time.perf_counter() - start_s

        cached = [True] * exact + [artifact is not None for artifact in artifacts]
        sources = ["prefix"] * exact + ["cached" if artifact is not None else "fresh" for artifact in artifacts]
        draft.citations = [chunk.citation(source) for chunk, source in zip(kept, sources, strict=True)]
        yield Cited(draft.citations)
        plan = draft.known.extend(prompt.make_plan(self._parts.template, question_ids, kept, cached))
        draft.keep = self._tiers.keeper(asked.tenant, bare, kept)

        def decode(cancelled: threads.Cancelled) -> Generator[Step, None, None]:
            return self._decode(plan, artifacts, sampling, draft, cancelled)

        async with aclosing(threads.stream(self._pool, decode)) as steps:
            async for step in steps:
                if draft.n_steps == 0:
                    draft.seconds["ttft"] = time.perf_counter() - asked.received_s
                    self._telemetry.first_token(draft.mode, draft.timing())
                draft.n_steps += 1
                draft.text += step.text
                draft.finish_reason = step.finish_reason or draft.finish_reason
                if step.text:
                    yield Token(step.text)
        response = self._response(asked, draft, plan)
        self._count(response, kept, cached)
        look.judge([one.indexed.chunk for one in kept], cached)
        yield Done(response)

    async def _load(self, body: AnswerRequest, kept: Sequence[Found], draft: _Draft) -> None:
        """Load what the mode needs; in `blend`, choose what the certificate allows, or go over to exact mode."""
        if draft.mode is CacheMode.BLEND:
            certificate, reason = await threads.call(self._pool, self._parts.certificates.current)
            if certificate is None:
                draft.exact(reason)
                return
            choices = self._choices(certificate, body)
            if all(isinstance(choice, str) for choice in choices.values()):
                draft.exact(str(choices[self._parts.variant.name]))
                return
        if draft.mode is CacheMode.EXACT or not kept:
            return
        variant = self._parts.variant
        exact = draft.known.n_chunks
        places = enumerate(kept[exact:], exact)
        chunks = [forms.wanted(one.indexed, place, variant, one.neighbours_visible) for place, one in places]
        draft.loaded = await self._loader.load(chunks)
        if draft.mode is CacheMode.BLEND:
            choice = choices[forms.served_variant(variant, [True] * exact + draft.loaded.fused)]
            if isinstance(choice, str):
                draft.exact(choice)
            else:
                draft.choice = choice

    def _choices(self, certificate: Certificate, body: AnswerRequest) -> dict[str, Choice | str]:
        """What the certificate allows for the variant, and for that of its pass 1."""
        variant, max_kl = self._parts.variant, self._settings.quality.max_kl
        names = (variant.name, variant.pass1) if variant.fused else (variant.name,)
        return {name: blend.choose(certificate, max_kl, name, body.policy, body.budget) for name in names}

    def _sampling(self, body: AnswerRequest) -> SamplingParams:
        window = self._parts.model.max_tokens
        if body.max_tokens is not None and body.max_tokens >= window:
            raise RequestError(
                f"max_tokens is {body.max_tokens:,}; prompt and answer share a window of {window:,} tokens",
                code="context_length_exceeded",
                param="max_tokens",
            )
        return SamplingParams(
            max_tokens=body.max_tokens or min(self._settings.serve.max_tokens, window // 2),
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
        )

    def _fit(
        self, body: AnswerRequest, found: Sequence[Found], max_tokens: int, draft: _Draft
    ) -> tuple[Sequence[int], list[Found]]:
        limit = min(self._settings.model.max_prompt_tokens, self._parts.model.max_tokens - max_tokens)
        question_ids = self._parts.template.question_ids(body.question)
        kept, note = prompt.fit(self._parts.template, question_ids, found, limit)
        if note:
            draft.notes.append(note)
        return question_ids, kept

    def _decode(
        self,
        plan: Plan,
        artifacts: Sequence[KvArtifact | None],
        sampling: SamplingParams,
        draft: _Draft,
        cancelled: threads.Cancelled,
    ) -> Generator[Step, None, None]:
        """Runs in a thread: stitch what was loaded, then decode."""
        model = self._parts.model
        if cancelled():
            return
        start_s = time.perf_counter()
        stitched = None
        if draft.mode is not CacheMode.EXACT:  # without a single artifact too: a fresh chunk sees what a cached one saw
            try:
                rows = [_rows(artifact) for artifact in artifacts]
                fronts = self._fronts(len(rows), draft.known.n_chunks)
                stitched = model.stitch(plan, rows, cancelled=cancelled, fronts=fronts, prefix=draft.known.rows)
            except Cancelled:
                return
        draft.seconds["stitch"] = time.perf_counter() - start_s
        if stitched is not None and draft.choice is not None and plan.chunks:
            if cancelled():
                return
            start_s = time.perf_counter()
            exact_first = self._parts.variant.first_chunk_exact and not draft.known.n_chunks
            policy, budget = draft.choice.policy, draft.choice.budget
            fused = VARIANTS[draft.choice.row.variant].fused  # as it was certified: some rows may be those of pass 1
            draft.repair = model.select(plan, stitched, policy, budget, first_chunk_exact=exact_first, fused=fused)
            draft.seconds["select"] = time.perf_counter() - start_s

        start_s = time.perf_counter()
        first = "first_step" if draft.repair is None or not len(draft.repair) else "repair"
        for step in model.generate(
            plan, stitched, sampling, cancelled, repair=draft.repair, prefix=draft.known.rows, keep=draft.keep
        ):
            draft.seconds.setdefault(first, time.perf_counter() - start_s)
            yield step

    def _fronts(self, n_chunks: int, n_exact: int) -> list[tuple[int, ...]]:
        """What a fresh chunk is computed behind at each place, as its artifact was; `n_exact` chunks stand before."""
        prefix = self._parts.template.prefix_ids
        front = self._parts.front_ids or prefix
        first = 0 if self._parts.variant.pass1_first else -1
        return [prefix if place == first else front for place in range(n_exact, n_exact + n_chunks)]

    def _response(self, asked: Asked, draft: _Draft, plan: Plan | None) -> AnswerResponse:
        draft.seconds.setdefault("ttft", time.perf_counter() - asked.received_s)
        prompt_tokens = plan.n_tokens if plan else 0
        counts = count_tokens(plan, draft.repair) if plan else TokenCounts(0, 0, 0)
        return AnswerResponse(
            id=asked.request_id,
            model=self._parts.model.fingerprint.model,
            answer=draft.text,
            finish_reason=draft.finish_reason,
            cache_mode=draft.mode,
            policy=draft.policy,
            budget=draft.budget,
            citations=draft.citations,
            usage=Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=draft.n_steps,
                total_tokens=prompt_tokens + draft.n_steps,
                prefix_tokens=len(plan.prefix_ids) if plan else 0,
                reused_tokens=counts.reused,
                repaired_tokens=counts.repaired,
                fresh_tokens=counts.fresh,
            ),
            fallback=draft.loaded.fallback,
            tiers=draft.tiers,
            timing=draft.timing(),
            note=" ".join(draft.notes) or None,
        )

    def _count(self, response: AnswerResponse, kept: Sequence[Found], cached: Sequence[bool]) -> None:
        sizes = [len(chunk.indexed.chunk.token_ids) for chunk in kept]
        hits = sum(size for size, has_kv in zip(sizes, cached, strict=True) if has_kv)
        self._telemetry.looked_up(sum(sizes), hits)
        exact = response.tiers.get(Tier.PREFIX, 0)
        self._tiers.looked_up(Tier.PREFIX, exact, len(kept) - exact)
        self._telemetry.answer(response)


def _rows(artifact: KvArtifact | None) -> KvRows | None:
    if artifact is None:
        return None
    return KvRows.from_bytes(artifact.k, artifact.v, artifact.header.fingerprint)
