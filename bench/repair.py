"""Time to the first token with repair, against full prefill: same prompt, same process, same dtype.

    python -m bench.repair --json

full      the whole prompt in `exact`, nothing reused, not even the prefix
repair    stitched rows at hand -> selection (its question pass included) -> repair pass -> first token id known

Rows are in memory and stitched: reading and stitching them is what `bench.ttft` measures. The chunks are the pages of
the demo handbook, because what a policy selects decides which keys a repaired row sees. Progress goes to stderr; the
last line on stdout is one JSON object. Medians of wall time after a warm-up of each; rounds of all kinds take turns,
so that a busy moment hits all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from engine import (
    Base,
    Identity,
    Model,
    Plan,
    PlannedChunk,
    SamplingParams,
    load_model,
    plan_prompt,
    resolve_generation,
    without_reuse,
)
from engine.policies import Policy, create_policy
from schemas.settings import Settings, load_settings

QUESTION = "Who may enter the emergency store at night, and what must be written down afterwards?"
PAGES = Path(__file__).parent.parent / "demo" / "handbook"
FIRST = SamplingParams(max_tokens=1)


def main() -> None:
    options = _options()
    flags = {"model": {"name": options.model, "dtype": options.dtype, "threads": options.threads}}
    settings = load_settings({**flags, **({"cache_dir": options.cache} if options.cache else {})})
    budgets = [float(budget) for budget in options.budgets.split(",")]
    report = measure(settings, options.tokens, options.chunk, options.rounds, options.policy, budgets)
    if not options.json:
        print("\n".join(f"{name:>20}  {value}" for name, value in report.items()))
    print(json.dumps(report))


def measure(
    settings: Settings, n_tokens: int, chunk_tokens: int, rounds: int, policy_name: str, budgets: list[float]
) -> dict[str, object]:
    """Run the bench; see the module's docstring."""
    _say("loading the model")
    identity = resolve_generation(settings)
    model, policy = load_model(settings.model, settings.cache_folder), _policy(policy_name)
    plan = _plan(identity, n_tokens, chunk_tokens)
    _say(f"prefilling {len(plan.chunks)} chunks, {sum(map(len, plan.chunks))} tokens")
    chunks = [plan.token_ids[chunk.start : chunk.end] for chunk in plan.chunks]
    base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, chunks))
    full: list[float] = []
    repair: dict[float, list[tuple[float, float]]] = {budget: [] for budget in budgets}
    for number in range(rounds + 1):  # the first one warms up
        full.append(_full(model, plan))
        for budget, seconds in repair.items():
            seconds.append(_repair(model, plan, base, policy, budget))
        _say(f"round {number} of {rounds}: full {full[-1]:.3f} s, {_spoken(repair)}")
    full_s = statistics.median(full[1:])
    report: dict[str, object] = {
        "full_s": round(full_s, 4),
        "prompt_tokens": plan.n_tokens,
        "question_tokens": len(plan.segments[-1]),
        "chunks": len(plan.chunks),
        "policy": policy_name,
        "model": model.fingerprint.model,
        "dtype": model.fingerprint.dtype,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
    }
    for budget, seconds in repair.items():
        name = f"{budget * 100:g}"
        positions = model.select(plan, base, policy, budget)
        report[f"ratio_{name}"] = round(full_s / statistics.median(sum(both) for both in seconds[1:]), 2)
        report[f"select_s_{name}"] = round(statistics.median(select for select, _ in seconds[1:]), 4)
        report[f"repair_s_{name}"] = round(statistics.median(first for _, first in seconds[1:]), 4)
        report[f"repaired_{name}"] = len(positions)
        report[f"attention_limit_{name}"] = round(_attention_limit(plan, positions), 2)
    return report


def _policy(text: str) -> Policy:
    """`closure` or `closure:balance=1,floor=32`; values are JSON."""
    name, _, options = text.partition(":")
    pairs = [option.partition("=") for option in options.split(",") if option]
    return create_policy(name, **{key: json.loads(value) for key, _, value in pairs})


def _full(model: Model, plan: Plan) -> float:
    nothing_reused = without_reuse(plan)
    begin = time.perf_counter()
    next(iter(model.generate(nothing_reused, None, FIRST)))
    return time.perf_counter() - begin


def _repair(model: Model, plan: Plan, base: Base, policy: Policy, budget: float) -> tuple[float, float]:
    begin = time.perf_counter()
    positions = model.select(plan, base, policy, budget)
    selected = time.perf_counter()
    next(iter(model.generate(plan, base, FIRST, repair=positions)))
    return selected - begin, time.perf_counter() - selected


def _attention_limit(plan: Plan, repaired: torch.Tensor) -> float:
    """How many times less attention the repair pass needs than a full prefill, were there no waste at all."""
    rows = torch.cat([repaired, torch.tensor(plan.open_positions)]) + 1
    return plan.n_tokens * (plan.n_tokens + 1) / 2 / float(rows.sum())


def _plan(identity: Identity, n_tokens: int, chunk_tokens: int) -> Plan:
    """Pages of the handbook in order of name, cut into equal chunks that make a prompt of about `n_tokens`."""
    question = identity.template.question_ids(QUESTION)
    text = "\n\n".join(page.read_text() for page in sorted(PAGES.rglob("*.md")))
    ids = identity.tokenizer.encode(text)
    room = n_tokens - len(identity.template.prefix_ids) - len(question)
    if not chunk_tokens <= room <= len(ids):
        raise SystemExit(f"--tokens {n_tokens} must leave room for a chunk and at most the {len(ids)} of the handbook")
    n_chunks = round(room / chunk_tokens)
    length = room // n_chunks - len(identity.template.separator_ids)
    chunks = [PlannedChunk(tuple(ids[n * length : (n + 1) * length]), cached=True) for n in range(n_chunks)]
    return plan_prompt(identity.template, question, chunks)


def _spoken(repair: dict[float, list[tuple[float, float]]]) -> str:
    return ", ".join(f"{budget:.0%} {sum(seconds[-1]):.3f} s" for budget, seconds in repair.items())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to the first token with repair, against full prefill.")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt, about")
    parser.add_argument("--chunk", type=int, default=512, help="tokens per chunk, about")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each kind")
    parser.add_argument("--policy", default="closure", help="with options where wanted: closure:balance=1,floor=32")
    parser.add_argument("--budgets", default="0.05,0.15", help="shares of chunk tokens")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--cache", type=Path, help="cache folder; default as in the settings")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    return parser.parse_args()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
