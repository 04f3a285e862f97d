"""Run schedules against real processes; the last line of stdout is one JSON object. See docs/operations.md."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.chaos import audit
from bench.chaos.rig import Rig
from bench.chaos.run import Result, open_receipts, reconcile, run, tenant_of
from stores.replicas import LEASE_S

FUSED_EVERY = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 where anything was wrong."""
    chosen = _options().parse_args(arguments)
    logging.basicConfig(level=logging.CRITICAL)
    for name in ("bench", "__main__"):
        logging.getLogger(name).setLevel(logging.INFO)
    begin, results, counts = time.monotonic(), [], Counter[str]()
    folder = Path(tempfile.mkdtemp(prefix="kvquilt-chaos-"))
    seeds = range(chosen.seed, chosen.seed + chosen.runs)
    for neighbours in (0, 2):
        group = [seed for seed in seeds if (seed % FUSED_EVERY == 0) == bool(neighbours)]
        if group:
            results += _group(chosen, folder / ("fused" if neighbours else "plain"), group, neighbours, counts)
    faults = [fault for result in results for fault in result.faults]
    total: dict[str, object] = {
        "runs": len(results),
        **{str(kind): n for kind, n in audit.count(faults).items()},
        "questions": sum(result.questions for result in results),
        "cached_chunks": sum(result.cached for result in results),
        "unanswered": sum(result.refused for result in results),
        "events": sum(result.events for result in results),
        "kills": counts["kills"],
        "restarts": counts["restarts"],
        "broker_restarts": counts["broker_restarts"],
        "store_faults": {kind.removeprefix("fault: "): n for kind, n in sorted(counts.items()) if "fault: " in kind},
        "left_for_reconcile": sum(result.left_for_reconcile for result in results),
        "seeds_that_failed": [result.seed for result in results if result.faults],
        "seconds": round(time.monotonic() - begin, 1),
        "broker": chosen.broker,
        "seed": chosen.seed,
    }
    if faults:
        print(f"what was found is in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if not chosen.json:
        for name, value in total.items():
            print(f"{name:>20}  {value}")
    print(json.dumps(total))
    return 1 if faults else 0


def _group(
    chosen: argparse.Namespace, folder: Path, seeds: list[int], neighbours: int, counts: Counter[str]
) -> list[Result]:
    """Runs over one rig. It is made anew after a run that failed: what that one left is evidence."""
    results: list[Result] = []
    left = list(seeds)
    while left:
        place = folder / f"from-{left[0]}"
        with Rig(place, chosen.broker, [tenant_of(seed) for seed in left], chosen.model, neighbours) as rig:
            clean: list[str] = []
            while left:
                seed = left.pop(0)
                try:
                    result = run(rig, seed, chosen.broker_restarts)
                except RuntimeError as stuck:
                    result = Result(seed, [audit.Fault(audit.Kind.LOST, audit.NOBODY, str(stuck))])
                results.append(result)
                _tell(result, place)
                if result.faults:
                    break
                clean.append(tenant_of(seed))
            else:
                results[-1].faults += _last_receipts(rig, clean)
            counts.update(rig.counts)
            for gate in rig.gates.values():
                counts.update({f"fault: {kind}": n for kind, n in gate.done.items()})
    return results


def _last_receipts(rig: Rig, tenants: list[str]) -> list[audit.Fault]:
    """Every deletion's receipt must close, once those that were killed are no longer waited for."""
    end = time.monotonic() + LEASE_S + 15
    while left := open_receipts(rig, tenants):
        if time.monotonic() > end:
            return left
        time.sleep(1)
        for tenant in sorted({fault.document.tenant for fault in left}):
            reconcile(rig, tenant)
    return []


def _tell(result: Result, folder: Path) -> None:
    said = f"seed {result.seed}: {result.events} events, {result.questions} answers in {result.seconds:.1f} s"
    print(said, file=sys.stderr, flush=True)
    for fault in result.faults:
        print(f"  {fault}", file=sys.stderr, flush=True)
    if result.faults:
        again = f"python -m bench.chaos --seed {result.seed} --runs 1"
        print(f"  again: {again}; stores and logs: {folder}", file=sys.stderr, flush=True)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.chaos", description="Random schedules of changes and faults, audited.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the others follow")
    parser.add_argument("--broker", choices=("auto", "apache", "embedded"), default="auto")
    parser.add_argument(
        "--broker-restarts", type=float, default=0.1, help="share of runs in which the broker is killed"
    )
    parser.add_argument("--model", default="tiny", help="`tiny`: two random layers; or a model's name")
    parser.add_argument("--json", action="store_true", help="print only the JSON object on stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main())
