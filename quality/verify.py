"""Making a model's certificate: its conformance, then how close each method comes, over questions that need no data."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.certified import coverage
from engine.conformance import check_conformance
from engine.variants import company_text
from quality.methods import FULL, NO_CONTEXT, Method
from quality.questions import Form
from quality.report import Row, summarise
from quality.results import Progress
from quality.run import evaluate
from quality.sets import load_set
from quality.subject import Subject
from schemas.certificate import Certificate, CertifiedRow, Conformance

SET = "ruler"
POLICIES = ("epic", "infoflow", "closure")
FORM = Form(chunks=6)


def verify(
    subject: Subject,
    methods: Sequence[Method],
    *,
    limit: int,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[Progress], None] = lambda told: None,
) -> Certificate:
    """Check and measure; a model that fails a check is not measured, and its certificate says so.

    Args:
        methods: what is certified, `none` among them.
        limit: how many questions.
        note: told each check as it is done.
    """
    import torch

    model, template = subject.model, subject.template
    checks = check_conformance(model, template, template.tokenizer.encode(company_text()))
    for check in checks:
        note(told(check))
    rows: list[CertifiedRow] = []
    if all(check.passed for check in checks):
        questions = load_set(SET, None, n_chunks=FORM.chunks)
        results = evaluate(subject, questions, methods, form=FORM, limit=limit, progress=progress)
        by_name = {_name(method): method for method in methods}
        report = summarise(results, {})
        rows = [
            _certified(row, by_name[row["variant"], row["policy"], row["options"], row["budget"]])
            for row in report.rows
            if row["policy"] not in (FULL, NO_CONTEXT)
        ]
    measured: dict[str, Any] = {
        "set": SET,
        "form": FORM.as_dict(),
        "neighbours": subject.n_neighbours,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": str(torch.__version__),
    }
    return Certificate(
        model=model.fingerprint.model,
        dtype=model.fingerprint.dtype,
        covers=coverage(model.fingerprint, template, subject.company),
        checks=tuple(checks),
        questions=min(limit, len(load_set(SET, None).questions)) if rows else 0,
        measured=measured,
        rows=tuple(rows),
    )


def told(check: Conformance) -> str:
    """One line for people."""
    state = "ok" if check.passed else "FAILED"
    number = "" if check.error is None else f"error {check.error:.1e}, allowed {check.bound:.0e}"
    return f"{state:>6}  {check.name}: {number or check.says}"


def lines(rows: Iterable[CertifiedRow]) -> list[str]:
    """The certified rows for people."""
    return [
        f"{row.variant:14} {row.policy:10} {row.budget:4.0%}  KL {row.kl:.4f}, first {row.kl_first:.4f}, retention "
        f"{'unknown' if row.retention is None else f'{row.retention:.0%} of {row.asked}'}, TTFT {row.ttft_s:.2f} s"
        for row in rows
    ]


def _name(method: Method) -> tuple[str, str, str, float]:
    options = " ".join(f"{name}={value}" for name, value in method.options)
    return method.variant.name, method.policy, options, method.budget


def _certified(row: Row, method: Method) -> CertifiedRow:
    return CertifiedRow(
        variant=row["variant"],
        policy=row["policy"],
        options=dict(method.options),
        budget=row["budget"],
        kl=row["kl"],
        kl_high=max(row["kl"], row["kl_high"] or 0.0),
        kl_first=row["kl_first"],
        retention=row["retention"],
        asked=row["asked"],
        ttft_s=row["ttft_s"],
        ttft_ratio=row["ttft_ratio"],
    )
