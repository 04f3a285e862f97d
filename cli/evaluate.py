"""`kvquilt eval`: how close each method comes to full attention, as a table, as JSON and as a plot."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cli.context import Context, Format
from quality import Form, Method, Progress, Report, Result, Subject, evaluate, load_set, load_subject, summarise
from quality.methods import FULL, NO_CONTEXT, methods_of
from quality.plot import svg
from quality.report import Row, markdown, terminal
from quality.results import ResultFile
from schemas.errors import InputError
from schemas.settings import Settings


def evaluate_sets(
    context: Context,
    sets: Sequence[str],
    *,
    policies: Sequence[str],
    budgets: Sequence[float],
    variants: Sequence[str],
    limit: int | None,
    form: Form,
    noise: float,
    answer_tokens: int,
    other: str,
    results: Path | None,
    markdown_file: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Run the methods on the sets and write what was measured.

    Raises:
        InputError: a set, a policy, a variant or a budget that does not exist, or a file that cannot be used.
    """
    run, asked = methods_of(policies, budgets, variants)
    data_dir = context.settings.quality.data_dir
    words = round(0.75 * form.chunk_tokens) if form.chunk_tokens else 130
    loaded = [load_set(name, data_dir, noise=noise, n_chunks=form.chunks, chunk_words=words) for name in sets]
    foreign = None
    if any(method.neighbours.choice == "other" for method in run):
        foreign = load_set(other, data_dir, noise=noise, n_chunks=form.chunks, chunk_words=words)
    stored = ResultFile(results) if results else None
    context.say("loading the model")
    subject = load_subject(in_full_precision(context.settings))
    made: list[Result] = []
    with context.progress() as bar:
        for questions in loaded:
            task = bar.add_task(questions.name, total=None)

            def tell(told: Progress, task: Any = task, name: str = questions.name) -> None:
                bar.update(task, completed=told.done, total=told.total, description=f"{name}: {told.doing}"[:60])

            for result in evaluate(
                subject,
                questions,
                run,
                form=form,
                limit=limit,
                answer_tokens=answer_tokens,
                other=foreign,
                known=stored.known if stored else lambda key: None,
                progress=tell,
            ):
                made.append(result)
                if stored:
                    stored.add(result)
    report = summarise(made, _about(subject, form, limit, noise))
    _files(report, markdown_file, plot)
    _say(context, report, asked, as_json)


def in_full_precision(settings: Settings) -> Settings:
    """Quality is measured in fp32 unless a dtype is named: what a method loses, not what rounding adds."""
    if settings.model.dtype != "auto":
        return settings
    return settings.model_copy(update={"model": settings.model.model_copy(update={"dtype": "float32"})})


def _say(context: Context, report: Report, asked: Sequence[Method], as_json: bool) -> None:
    wanted = {_name(method) for method in asked}
    rows = [row for row in report.rows if (row["variant"], row["policy"], row["options"], row["budget"]) in wanted]
    if as_json:  # one line for each row that was asked for; what it is compared with is in it
        lines = [json.dumps({**row, "baselines": _baselines(report, row), "about": report.about}) for row in rows]
        replace(context, format=Format.TERMINAL).result({}, "\n".join(lines))
        return
    context.result(report.as_dict(), "\n".join(terminal(row) for row in report.rows))


def _baselines(report: Report, row: Row) -> dict[str, Row]:
    of_set = [each for each in report.rows if each["set"] == row["set"]]
    named = {each["policy"]: each for each in of_set if each["policy"] in (FULL, NO_CONTEXT)}
    none = next((each for each in of_set if (each["policy"], each["variant"]) == ("none", row["variant"])), None)
    return {**named, "none": none} if none else named


def _name(method: Method) -> tuple[str, str, str, float]:
    options = " ".join(f"{name}={value}" for name, value in method.options)
    return method.prefill, method.policy, options, method.budget


def _files(report: Report, markdown_file: Path | None, plot: Path | None) -> None:
    try:
        if markdown_file:
            markdown_file.write_text(markdown(report), encoding="utf-8")
        for set_name in dict.fromkeys(row["set"] for row in report.rows) if plot else ():
            assert plot is not None
            many = len({row["set"] for row in report.rows}) > 1
            file = plot.with_stem(f"{plot.stem}-{set_name}") if many else plot
            file.write_text(svg(report, set_name), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename} cannot be written: {error.strerror}") from error


def _about(subject: Subject, form: Form, limit: int | None, noise: float) -> dict[str, Any]:
    import torch

    fingerprint = subject.model.fingerprint
    return {
        "model": fingerprint.model,
        "dtype": fingerprint.dtype,
        "fingerprint": fingerprint.digest[:16],
        "form": {**form.as_dict(), "noise": noise},
        "limit": limit,
        "neighbours": subject.n_neighbours,
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "command": " ".join(["kvquilt", *sys.argv[1:]]),
    }
