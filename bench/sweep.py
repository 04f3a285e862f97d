"""How the methods do over prompts of other shapes: chunk size, number of chunks, order, duplicates.

    python -m bench.sweep musique --data sets --limit 6 --results sweep.jsonl --markdown sweep.md

Rows: full attention, no context, none, then closure, infoflow and epic at 15 %; KL, and all that `kvquilt eval`
tells. Every size with every number of chunks that fits into the model, then orders and duplicates of the centre.
One JSON object for each cell and method on stdout. What is in the results file is not computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from quality import QuestionSet, load_set, load_subject, summarise
from quality.methods import methods_of
from quality.questions import ORDERS
from quality.report import Row
from quality.results import ResultFile
from quality.sweep import Cell, cells_of, markdown, rows_of, sweep
from schemas.errors import InputError, KvquiltError
from schemas.settings import load_settings


def main() -> None:
    options = _options()
    methods, _ = methods_of(options.policy, options.budget, options.variant)
    centre = _shape(options.centre)
    cells = cells_of(options.sizes, options.counts, options.orders, options.duplicates, centre)
    loads = {name: partial(_load, name, options.data) for name in options.sets}
    names = {name: load(centre.chunks, 130).name for name, load in loads.items()}  # what is wrong is said first
    stored = ResultFile(options.results) if options.results else None
    subject = load_subject(load_settings({"model": {"name": options.model, "dtype": "float32"}}))
    rows: list[Row] = []
    for name, load in loads.items():
        made = []
        for _, result in sweep(
            subject,
            load,
            cells,
            methods,
            limit=options.limit,
            answer_tokens=options.answer_tokens,
            known=stored.known if stored else lambda key: None,
            note=partial(print, file=sys.stderr, flush=True),
        ):
            made.append(result)
            if stored:
                stored.add(result)
        rows += rows_of(cells, names[name], summarise(made, {}).rows)
    for row in rows:
        print(json.dumps({**row, "model": options.model}))
    if options.markdown:
        options.markdown.write_text(markdown(rows), encoding="utf-8")


def _load(name: str, data: Path | None, n_chunks: int, chunk_words: int) -> QuestionSet:
    return load_set(name, data, n_chunks=n_chunks, chunk_words=chunk_words)


def _shape(text: str) -> Cell:
    size, _, count = text.partition("x")
    if not (size.isdecimal() and count.isdecimal()):
        raise InputError(f"--centre {text}: expected TOKENSxCHUNKS, such as 512x6")
    return Cell(int(size), int(count))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How the methods do over prompts of other shapes.")
    parser.add_argument("sets", nargs="+", help="as of `kvquilt eval`")
    parser.add_argument("--data", type=Path, help="folder of the question sets")
    parser.add_argument("--limit", type=int, default=6, help="questions of a set")
    parser.add_argument("--sizes", type=int, nargs="*", default=[128, 256, 512, 1024], help="tokens of a chunk")
    parser.add_argument("--counts", type=int, nargs="*", default=[2, 6, 12, 24, 40], help="chunks of a prompt")
    parser.add_argument("--orders", nargs="*", choices=ORDERS, default=list(ORDERS), help="of the centre")
    parser.add_argument("--duplicates", type=int, nargs="*", default=[0, 1, 3], help="of the centre")
    parser.add_argument("--centre", default="512x6", help="tokens x chunks")
    parser.add_argument("--policy", nargs="*", default=["closure", "infoflow", "epic"])
    parser.add_argument("--budget", type=float, nargs="*", default=[0.15])
    parser.add_argument("--variant", nargs="*", default=["shared_prefix"])
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--results", type=Path, help="keep each result in this file, and use what is there")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except KvquiltError as error:
        sys.exit(f"bench.sweep: {error}")
