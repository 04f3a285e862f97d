"""Time to the first token: full prefill against stitched KV, same prompt, same process, same dtype.

    python -m bench.ttft --tokens 4096 --json

full    the whole prompt in `exact`, nothing reused, not even the prefix
reuse   question ids ready -> plan, rows over the artifacts' bytes, stitch, question pass, first token id known;
        the artifacts are in memory, as the KV store hands them over

Progress goes to stderr; the last line on stdout is one JSON object. Medians, after a warm-up of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from engine import (
    Identity,
    KvRows,
    Model,
    Plan,
    PlannedChunk,
    SamplingParams,
    load_model,
    plan_prompt,
    resolve_generation,
    without_reuse,
)
from schemas.kv_artifact import Buffer
from schemas.settings import Settings, load_settings

QUESTION = "What do the passages say about it?"
FIRST = SamplingParams(max_tokens=1)


def main() -> None:
    options = _options()
    flags = {"model": {"name": options.model, "dtype": options.dtype, "threads": options.threads}}
    settings = load_settings({**flags, **({"cache_dir": options.cache} if options.cache else {})})
    report = measure(settings, options.tokens, options.chunk, options.rounds)
    if not options.json:
        print(_table(report))
    print(json.dumps(report))


def measure(settings: Settings, n_tokens: int, chunk_tokens: int, rounds: int) -> dict[str, object]:
    """Run the bench; see the module's docstring."""
    _say("loading the model")
    identity = resolve_generation(settings)
    model = load_model(settings.model, settings.cache_folder)
    chunks = _chunks(identity, n_tokens, chunk_tokens)
    _say(f"prefilling {len(chunks)} chunks, {sum(map(len, chunks))} tokens")
    rows = model.prefill_chunks(identity.template.prefix_ids, chunks)
    stored = [tuple(bytes(part) for part in chunk.to_bytes()) for chunk in rows]
    plan = _plan(identity, chunks)
    full = Rounds("full prefill", lambda: _full(model, plan))
    reuse = Rounds("reuse", lambda: _reuse(model, identity, chunks, stored))
    for _ in range(rounds):  # in turn: whatever slows the machine down slows both
        full.add()
        for _ in range(3):
            reuse.add()
    full_s, reuse_s = full.median("total_s"), reuse.median("total_s")
    return {
        "full_s": round(full_s, 4),
        "reuse_s": round(reuse_s, 4),
        "ratio": round(full_s / reuse_s, 1),
        "prompt_tokens": plan.n_tokens,
        "reused_tokens": plan.reused_tokens,
        "fresh_tokens": plan.fresh_tokens,
        "chunks": len(chunks),
        "dtype": model.fingerprint.dtype,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "stitch_s": round(reuse.median("stitch_s"), 4),
        "first_step_s": round(reuse.median("first_step_s"), 4),
        "full_best_s": round(full.best("total_s"), 4),
        "reuse_best_s": round(reuse.best("total_s"), 4),
        "model": model.fingerprint.model,
        "kv_bytes": sum(len(k) + len(v) for k, v in stored),
    }


class Rounds:
    """Timed rounds of `run`, which returns seconds by name, after one for warming up."""

    def __init__(self, name: str, run: Callable[[], dict[str, float]]) -> None:
        run()
        self._name, self._run = name, run
        self._seconds: list[dict[str, float]] = []

    def add(self) -> None:
        """One more round."""
        self._seconds.append(self._run())
        _say(f"{self._name} {len(self._seconds)}: {self._seconds[-1]['total_s'] * 1e3:,.1f} ms")

    def median(self, name: str) -> float:
        """Median seconds of the part `name`."""
        return statistics.median(seconds[name] for seconds in self._seconds)

    def best(self, name: str) -> float:
        """Least seconds of the part `name`."""
        return min(seconds[name] for seconds in self._seconds)


def _full(model: Model, plan: Plan) -> dict[str, float]:
    nothing_reused = without_reuse(plan)
    begin = time.perf_counter()
    next(iter(model.generate(nothing_reused, None, FIRST)))
    return {"total_s": time.perf_counter() - begin}


def _reuse(
    model: Model, identity: Identity, chunks: Sequence[tuple[int, ...]], stored: Sequence[tuple[Buffer, ...]]
) -> dict[str, float]:
    begin = time.perf_counter()
    plan = _plan(identity, chunks)
    rows = [KvRows.from_bytes(k, v, model.fingerprint) for k, v in stored]
    base = model.stitch(plan, rows)
    stitched = time.perf_counter()
    next(iter(model.generate(plan, base, FIRST)))
    end = time.perf_counter()
    return {"stitch_s": stitched - begin, "first_step_s": end - stitched, "total_s": end - begin}


def _plan(identity: Identity, chunks: Sequence[tuple[int, ...]]) -> Plan:
    question = identity.template.question_ids(QUESTION)
    return plan_prompt(identity.template, question, [PlannedChunk(ids, True) for ids in chunks])


def _chunks(identity: Identity, n_tokens: int, chunk_tokens: int) -> list[tuple[int, ...]]:
    """Chunks of random ids that make a prompt of exactly `n_tokens`; what they say does not change the time."""
    fixed = len(identity.template.prefix_ids) + len(identity.template.question_ids(QUESTION))
    n_separator = len(identity.template.separator_ids)
    room = n_tokens - fixed
    n_chunks = max(1, -(-room // (chunk_tokens + n_separator)))
    tokens = room - n_chunks * n_separator
    if tokens < n_chunks:
        raise SystemExit(f"--tokens {n_tokens} leaves no room for chunks: prefix and question have {fixed}")
    lens = [tokens // n_chunks + (n < tokens % n_chunks) for n in range(n_chunks)]
    random = np.random.default_rng(0)
    usable = identity.tokenizer.vocab_size - 1000
    return [tuple((random.integers(0, usable, n) + 1000).tolist()) for n in lens]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to the first token: full prefill against stitched KV.")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt")
    parser.add_argument("--chunk", type=int, default=512, help="tokens per chunk")
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed rounds of full prefill; reuse runs three times as many"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--cache", type=Path, help="cache folder; default as in the settings")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    return parser.parse_args()


def _table(report: dict[str, object]) -> str:
    return "\n".join(f"{name:>14}  {value}" for name, value in report.items())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
