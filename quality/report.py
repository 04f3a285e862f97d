"""From results to rows of a table: JSON, Markdown, and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quality.methods import FULL, NO_CONTEXT
from quality.metrics import Retention, mean_interval, retention
from quality.results import Result

Row = dict[str, Any]
_Name = tuple[str, str, str, float]  # variant, policy, options, budget


@dataclass(frozen=True)
class Report:
    """One row per set and method, and what they were made with."""

    rows: tuple[Row, ...]
    about: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"about": self.about, "rows": list(self.rows)}


def summarise(results: Iterable[Result], about: dict[str, Any]) -> Report:
    """Aggregate results; a method's row covers the questions that it and the baselines have in common.

    Args:
        results: of any sets, questions and methods; of two with one key the last counts.
        about: model, machine, command and the like, copied into the report.
    """
    by_set: dict[str, dict[_Name, dict[str, Result]]] = {}
    for result in results:
        options = " ".join(f"{name}={value}" for name, value in result.options.items())
        name = (result.variant, result.policy, options, result.budget)
        by_set.setdefault(result.set, {}).setdefault(name, {})[result.question] = result
    rows = []
    for set_name, methods in by_set.items():
        full, nothing = (methods.get(("", policy, "", 0.0), {}) for policy in (FULL, NO_CONTEXT))
        best = _best(methods)
        for name, each in methods.items():
            row = _row(set_name, name, list(each.values()), full, nothing)
            rows.append(row | _against_best(each, best.get(name)))
    return Report(tuple(rows), about)


def _best(methods: dict[_Name, dict[str, Result]]) -> dict[_Name, dict[str, Result]]:
    """For every method that repairs, where there are several: results of the best with its variant and budget."""
    groups: dict[tuple[str, float], list[_Name]] = {}
    for name in methods:
        variant, _, _, budget = name
        if budget:
            groups.setdefault((variant, budget), []).append(name)
    best: dict[_Name, dict[str, Result]] = {}
    for group in groups.values():
        if len(group) > 1:
            least = min((methods[name] for name in group), key=_mean_kl)
            best |= dict.fromkeys(group, least)
    return best


def _mean_kl(results: dict[str, Result]) -> float:
    return statistics.fmean(result.kl for result in results.values())


def _against_best(results: dict[str, Result], best: dict[str, Result] | None) -> Row:
    """KL less the best method's, over the questions of both, with a paired bootstrap interval."""
    if best is None:
        return {"kl_over_best": None, "kl_over_best_low": None, "kl_over_best_high": None}
    more = [results[question].kl - best[question].kl for question in results if question in best]
    low, high = mean_interval(more) if len(more) > 1 else (None, None)  # one question says nothing of others
    mean = statistics.fmean(more) if more else None
    return {"kl_over_best": mean, "kl_over_best_low": low, "kl_over_best_high": high}


def _row(
    set_name: str, name: _Name, results: Sequence[Result], full: dict[str, Result], nothing: dict[str, Result]
) -> Row:
    variant, policy, options, budget = name
    low, high = mean_interval([result.kl for result in results])
    kept = _retention(results, full, nothing)
    ttft = statistics.median(result.seconds.ttft for result in results)
    full_ttft = [full[result.question].seconds.ttft for result in results if result.question in full]
    seconds = [asdict(result.seconds) for result in results]
    f1s = [result.f1 for result in results if result.f1 is not None]
    return {
        "set": set_name,
        "variant": variant,
        "policy": policy,
        "options": options,
        "budget": budget,
        "questions": len(results),
        "kl": statistics.fmean(result.kl for result in results),
        "kl_low": low,
        "kl_high": high,
        "kl_first": statistics.fmean(result.kl_first for result in results),
        "retention": kept.value if kept else None,
        "retention_low": kept.low if kept else None,
        "retention_high": kept.high if kept else None,
        "asked": kept.asked if kept else 0,
        "kept": kept.kept if kept else 0,
        "lost": kept.lost if kept else 0,
        "gained": kept.gained if kept else 0,
        "f1": statistics.fmean(f1s) if f1s else None,
        "ttft_s": ttft,
        "ttft_ratio": statistics.median(full_ttft) / ttft if full_ttft and ttft else None,
        **{f"{part}_s": statistics.median(each[part] for each in seconds) for part in seconds[0]},
        "prompt_tokens": statistics.fmean(result.prompt_tokens for result in results),
        "repaired_share": _share(results),
    }


def _share(results: Sequence[Result]) -> float | None:
    total = sum(result.chunk_tokens for result in results)
    return sum(result.repaired_tokens for result in results) / total if total else None


def _retention(results: Sequence[Result], full: dict[str, Result], nothing: dict[str, Result]) -> Retention | None:
    """Over the questions whose answer is known, and that full attention and no context have answered too."""
    table = [
        (full[result.question].right, nothing[result.question].right, result.right)
        for result in results
        if result.question in full and result.question in nothing and result.right is not None
    ]
    if not table:
        return None
    columns = [[bool(value) for value in column] for column in zip(*table, strict=True)]
    return retention(*columns)


_COLUMNS = (
    ("variant", "variant", ""),
    ("policy", "method", ""),
    ("budget", "budget", ".0%"),
    ("kl", "KL", ".4f"),
    ("kl_first", "KL first", ".4f"),
    ("f1", "F1", ".3f"),
    ("retention", "retention", ".0%"),
    ("ttft_s", "TTFT s", ".2f"),
    ("ttft_ratio", "times sooner", ".1f"),
)


def markdown(report: Report) -> str:
    """One table per set; of every variant and budget the best KL is bold, and ≈ marks what cannot be told from it.

    A method cannot be told from the best when the paired 95 % interval of their difference holds 0; few questions
    tell little apart.
    """
    parts = []
    for set_name in dict.fromkeys(row["set"] for row in report.rows):
        rows = [row for row in report.rows if row["set"] == set_name]
        n = max(row["questions"] for row in rows)
        parts.append(f"### {set_name}, {n} questions\n\n| {' | '.join(title for _, title, _ in _COLUMNS)} |")
        parts.append("|---|---|" + "--:|" * (len(_COLUMNS) - 2))
        parts += ["| " + " | ".join(_cell(row, *column[::2]) for column in _COLUMNS) + " |" for row in rows]
        parts.append("")
    return "\n".join(parts)


def _cell(row: Row, field: str, form: str) -> str:
    value = row[field]
    if field == "policy":
        return f"{str(value).replace('_', ' ')} {row['options']}".strip()
    if value is None or (field == "budget" and not value):
        return ""
    text = format(value, form)
    if field == "retention" and row["asked"]:
        span = f"{row['retention_low']:.0%} to {row['retention_high']:.0%}"
        text += f" ({row['kept']}/{row['asked']}, {span}, +{row['gained']})"
    if field == "kl" and row["kl_over_best"] is not None:
        if row["kl_over_best"] == 0:
            return f"**{text}**"
        return text if (row["kl_over_best_low"] or 0) > 0 else f"{text} ≈"
    return text


def terminal(row: Row) -> str:
    """One line for people."""
    told = f"{row['retention']:.0%} of {row['asked']}" if row["retention"] is not None else "no question qualifies"
    f1 = "" if row["f1"] is None else f"  F1 {row['f1']:.3f}"
    name = f"{row['variant']:14} {row['policy']} {row['options']}".strip()
    budget = f" {row['budget']:.0%}" if row["budget"] else ""
    return (
        f"{row['set']:10} {name}{budget}: KL {row['kl']:.4f}, first {row['kl_first']:.4f}{f1}, "
        f"retention {told}, TTFT {row['ttft_s']:.2f} s ({row['questions']} questions)"
    )
