"""The edit test: how often an answer still comes from the text before an edit.

    python -m bench.edits --json

For every kind of question (direct, by an alias) and distance between the edited record and the alias (0, 250 and
1,500 tokens): full attention, rows that were not made again (`stale`: the control), the edited chunk made again, and
that with 15 % repaired. Shown is the share of edits where the old number is likelier than the new one (of all, and of
those that are relevant: full attention finds the new one likelier), and where it is in the answer. The last line on
stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from quality import load_subject
from quality.edits import CONDITIONS, DISTANCES, KINDS, Judged, edits, judge
from schemas.settings import load_settings


def main() -> None:
    options = _options()
    subject = load_subject(load_settings({"model": {"name": options.model, "dtype": "float32"}}))
    judged: list[Judged] = []
    cases = edits(subject, options.per_cell, options.chunk)
    for number, edit in enumerate(cases, start=1):
        judged += judge(subject, edit)
        print(f"edit {number}/{len(cases)}: {edit.kind}, distance {edit.distance}", file=sys.stderr, flush=True)
    cells = [_cell(judged, kind, distance, name) for kind in KINDS for distance in DISTANCES for name in CONDITIONS]
    overall = {name: _cell(judged, None, None, name) for name in CONDITIONS}
    if not options.json:
        for cell in cells:
            print("  ".join(f"{name} {value}" for name, value in cell.items()))
    print(json.dumps({"overall": overall, "cells": cells, "model": options.model, "chunk_tokens": options.chunk}))


def _cell(judged: list[Judged], kind: str | None, distance: int | None, condition: str) -> dict[str, Any]:
    members = [
        each
        for each in judged
        if each.condition == condition and kind in (None, each.kind) and distance in (None, each.distance)
    ]
    relevant = [each for each in members if each.relevant]
    shares = {
        "prefers_old": _share([each.prefers_old for each in members]),
        "prefers_old_relevant": _share([each.prefers_old for each in relevant]),
        "says_old": _share([each.says_old for each in members]),
    }
    where = {"kind": kind, "distance": distance} if kind else {}
    return {**where, "condition": condition, **shares, "edits": len(members), "relevant": len(relevant)}


def _share(of: list[bool]) -> float | None:
    return round(sum(of) / len(of), 3) if of else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How often an answer still comes from the text before an edit.")
    parser.add_argument("--per-cell", type=int, default=4, help="documents for each kind of question and distance")
    parser.add_argument("--chunk", type=int, default=200, help="tokens per chunk")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    return parser.parse_args()


if __name__ == "__main__":
    main()
