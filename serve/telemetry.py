"""Every metric of the service, in one place; each is there, at zero, from the start (of tiers: since they exist)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.policies import POLICIES
from schemas.api import AnswerResponse, CacheMode, Timing
from schemas.errors import MissReason
from schemas.receipt import Tier

STAGES = ("retrieve", "load", "stitch", "select", "repair", "first_step")
OBJECT = "object"  # the tier that everything comes from
_OF_TIER = ("tier", "generation")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Telemetry:
    """The service's Prometheus metrics, in a registry of their own or in one that the process shares.

    Args:
        model: label value of `model`.
        registry: where the metrics are registered; a new one by default.
    """

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._model = model
        self._ttft = self._histogram(
            "kvquilt_ttft_seconds", "Request received to first token ready", ("cache_mode", "model")
        )
        self._stage = self._histogram("kvquilt_stage_seconds", "Time of one stage before the first token", ("stage",))
        self._queue = self._histogram("kvquilt_queue_seconds", "Time a request waited for a slot", ())
        self._requested = self._counter("kvquilt_requested_tokens", "Chunk tokens put into prompts", "model")
        self._hit = self._counter("kvquilt_hit_tokens", "Chunk tokens whose KV came from the store", "model")
        self._reused = self._counter("kvquilt_reused_tokens", "Prompt tokens whose KV was reused", "policy")
        self._repaired = self._counter("kvquilt_repaired_tokens", "Prompt tokens recomputed by a policy", "policy")
        self._fresh = self._counter("kvquilt_fresh_tokens", "Prompt tokens computed fresh", "policy")
        self._load_bytes = self._counter("kvquilt_kv_load_bytes", "Bytes of KV artifacts loaded", "tier")
        self._load_seconds = self._histogram("kvquilt_kv_load_seconds", "Time of one KV artifact's load", ("tier",))
        self._tier_hits = self._counter("kvquilt_tier_hits", "Chunks whose KV a tier had in memory", *_OF_TIER)
        self._tier_misses = self._counter("kvquilt_tier_misses", "Chunks whose KV a tier did not have", *_OF_TIER)
        self._tier_bytes = Gauge("kvquilt_kv_bytes", "KV in a tier's memory", _OF_TIER, registry=self.registry)
        self._evictions = self._counter("kvquilt_kv_evictions", "What left a tier to make room", *_OF_TIER)
        self._drops = self._counter("kvquilt_tier_drops", "What left a tier because its document changed", *_OF_TIER)
        self.receipts_closed = self._counter("kvquilt_receipts_closed", "Deletion receipts that this replica closed")
        self.tail_contact = Gauge(
            "kvquilt_tail_contact_seconds", "Since the broker last answered the tail of commits", registry=self.registry
        )
        self._fallback = self._counter("kvquilt_fallback", "Chunks computed fresh although reuse was asked", "reason")
        self._fingerprint_mismatch = self._counter("kvquilt_fingerprint_mismatch", "KV artifacts made by another model")
        self._checksum_failures = self._counter("kvquilt_checksum_failures", "KV artifacts with a wrong checksum")
        self._stale = self._counter("kvquilt_stale_served", "Answers from a superseded or deleted version", "kind")
        self._stale_checks = self._counter("kvquilt_stale_checks", "Answers that were checked for staleness", "outcome")
        self._cancelled = self._counter("kvquilt_cancelled", "Requests whose client went away")
        self._rejected = self._counter("kvquilt_rejected", "Requests refused because the queue was full")
        self._requests = self._counter("kvquilt_http_requests", "Requests by route and status", "route", "status")
        self.active = Gauge("kvquilt_active_requests", "Questions being worked on now", registry=self.registry)
        self.waiting = Gauge("kvquilt_queued_requests", "Requests waiting for a slot", registry=self.registry)
        self.kv_waiters = Gauge("kvquilt_kv_waiters", "Chunks whose KV is awaited now", registry=self.registry)
        self._start_at_zero()

    def exposition(self) -> bytes:
        """What `/metrics` serves."""
        return generate_latest(self.registry)

    def answered(self, route: str, status: int) -> None:
        """A request ended; `status` 0: its client left before there was one."""
        self._requests.labels(route, str(status or 499)).inc()

    def stale_check(self, text: bool | None, kv: bool | None) -> None:
        """An answer was checked: stale in its text, in KV that it reused; None: the heads could not be read."""
        self._stale_checks.labels("failed" if text is None else "done").inc()
        for kind, stale in (("text", text), ("kv", kv)):
            if stale:
                self._stale.labels(kind).inc()

    def queued(self, seconds: float) -> None:
        """A request waited so long for its slot."""
        self._queue.observe(seconds)

    def rejected(self) -> None:
        """A request found the queue full."""
        self._rejected.inc()

    def cancelled(self) -> None:
        """A client went away before its answer was complete."""
        self._cancelled.inc()

    def loaded(self, nbytes: int, seconds: float) -> None:
        """A KV artifact was read and passed its checks."""
        self._load_bytes.labels(OBJECT).inc(nbytes)
        self._load_seconds.labels(OBJECT).observe(seconds)

    def watch_tiers(self, generation: str, nbytes: Mapping[Tier, Callable[[], int]]) -> None:
        """A generation has tiers: show how much there is in each, and their counters, at zero at first."""
        for tier, function in nbytes.items():
            self._tier_bytes.labels(tier, generation).set_function(function)
            for counter in (self._tier_hits, self._tier_misses, self._evictions, self._drops):
                counter.labels(tier, generation)

    def tier_looked_up(self, generation: str, tier: Tier, hits: int, misses: int) -> None:
        """So many chunks were in a tier, so many were not."""
        self._tier_hits.labels(tier, generation).inc(hits)
        self._tier_misses.labels(tier, generation).inc(misses)

    def evicted(self, generation: str, tier: Tier, n: int) -> None:
        """So many entries had to go for others."""
        self._evictions.labels(tier, generation).inc(n)

    def dropped(self, generation: str, entries: Mapping[Tier, int]) -> None:
        """So many entries were out of date."""
        for tier, n in entries.items():
            self._drops.labels(tier, generation).inc(n)

    def missed(self, fallback: Mapping[str, int]) -> None:
        """So many chunks of a request are computed fresh, by reason."""
        for reason, chunks in fallback.items():
            self._fallback.labels(reason).inc(chunks)
        self._fingerprint_mismatch.inc(fallback.get(MissReason.FINGERPRINT, 0))
        self._checksum_failures.inc(fallback.get(MissReason.CHECKSUM, 0))

    def looked_up(self, requested_tokens: int, hit_tokens: int) -> None:
        """Chunk tokens of one prompt, and how many of them came from the store."""
        self._requested.labels(self._model).inc(requested_tokens)
        self._hit.labels(self._model).inc(hit_tokens)

    def first_token(self, mode: CacheMode, timing: Timing) -> None:
        """The first token of an answer is ready."""
        self._ttft.labels(mode, self._model).observe(timing.ttft_s)
        for stage in STAGES:
            self._stage.labels(stage).observe(getattr(timing, f"{stage}_s"))

    def answer(self, response: AnswerResponse) -> None:
        """An answer is complete."""
        self._reused.labels(response.policy).inc(response.usage.reused_tokens)
        self._repaired.labels(response.policy).inc(response.usage.repaired_tokens)
        self._fresh.labels(response.policy).inc(response.usage.fresh_tokens)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...]) -> Histogram:
        return Histogram(name, text, labels, registry=self.registry, buckets=_SECONDS)

    def _start_at_zero(self) -> None:
        for kind in ("text", "kv"):
            self._stale.labels(kind)
        for outcome in ("done", "failed"):
            self._stale_checks.labels(outcome)
        for mode in CacheMode:
            self._ttft.labels(mode, self._model)
        for stage in STAGES:
            self._stage.labels(stage)
        for reason in MissReason:
            self._fallback.labels(reason)
        for policy in POLICIES:  # `full` is also what exact mode is called
            for counter in (self._reused, self._repaired, self._fresh):
                counter.labels(policy)
        for counter in (self._requested, self._hit):
            counter.labels(self._model)
        self._load_bytes.labels(OBJECT)
        self._load_seconds.labels(OBJECT)
