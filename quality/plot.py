"""The plot as SVG, written by hand: quality against what is repaired, and quality against time to the first token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from quality.methods import FULL, NO_CONTEXT
from quality.report import Report, Row

_WIDTH, _HEIGHT, _PANEL = 1040, 420, 400  # of the picture, and the width of a panel
_LEFT, _TOP, _TALL = 70, 50, 300
SHARE = "repaired_share"  # not the budget: some policies have their own idea of how much that is
_COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#777777",
    "#ee8866",
    "#44bb99",
    "#332288",
    "#000000",
)


@dataclass(frozen=True)
class _Line:
    name: str
    points: list[tuple[float, float]]  # x, KL
    colour: str
    dashed: bool


def svg(report: Report, set_name: str) -> str:
    """Two panels for one set; KL on a logarithmic scale, lower is better. Each variant has its own kind of line."""
    rows = [row for row in report.rows if row["set"] == set_name and row["policy"] not in (FULL, NO_CONTEXT)]
    nothing = [row["kl"] for row in report.rows if row["set"] == set_name and row["policy"] == NO_CONTEXT]
    values = [max(float(row["kl"]), 1e-6) for row in rows] + nothing
    if not values:
        values = [1e-3, 1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    high = max(high, low + 1)
    longest = max((float(row["ttft_s"]) for row in rows), default=1.0)
    largest = max((_at(row, SHARE) for row in rows), default=0.2) or 0.2
    panels = [
        _panel("share of chunk tokens repaired", SHARE, rows, largest, (low, high), nothing, 0),
        _panel("median seconds to the first token", "ttft_s", rows, longest, (low, high), nothing, 1),
    ]
    legend = _legend(_lines(rows, SHARE))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT + 18 * len(_lines(rows, SHARE))}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{_LEFT}" y="24" font-size="15">KL(full ‖ method), {escape(set_name)}: lower is better</text>'
        f"{''.join(panels)}{legend}</svg>\n"
    )


def _at(row: Row, field: str) -> float:
    return float(row[field] or 0.0)


def _lines(rows: Sequence[Row], field: str) -> list[_Line]:
    """One line per variant and method; `none`, the same at every budget, starts all lines of its variant."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    policies = list(dict.fromkeys((row["policy"], row["options"]) for row in rows))
    lines = []
    for variant in variants:
        for number, policy in enumerate(policies):
            members = [row for row in rows if row["variant"] == variant and (row["policy"], row["options"]) == policy]
            points = sorted((_at(row, field), max(float(row["kl"]), 1e-6)) for row in members)
            if points:
                name = f"{variant}: {' '.join(policy).strip()}"
                lines.append(_Line(name, points, _COLOURS[number % len(_COLOURS)], variants.index(variant) > 0))
    return lines


def _panel(
    title: str,
    field: str,
    rows: Sequence[Row],
    longest: float,
    decades: tuple[int, int],
    nothing: Sequence[float],
    number: int,
) -> str:
    left = _LEFT + number * (_PANEL + 110)
    low, high = decades

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log10(y) - low) / (high - low)
        return round(left + x / longest * _PANEL, 1), round(_TOP + (1 - share) * _TALL, 1)

    parts = [f'<rect x="{left}" y="{_TOP}" width="{_PANEL}" height="{_TALL}" fill="none" stroke="#999"/>']
    for decade in range(low, high + 1):
        _, y = at(0, 10.0**decade)
        parts.append(f'<line x1="{left}" x2="{left + _PANEL}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{10.0**decade:g}</text>')
    for step in range(5):
        x, _ = at(longest * step / 4, 10.0**low)
        value = longest * step / 4
        label = f"{value:.0%}" if field == SHARE else f"{value:.2f}"
        parts.append(f'<text x="{x}" y="{_TOP + _TALL + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{left + _PANEL / 2}" y="{_TOP + _TALL + 36}" text-anchor="middle">{title}</text>')
    for value in nothing:
        _, y = at(0, value)
        parts.append(f'<line x1="{left}" x2="{left + _PANEL}" y1="{y}" y2="{y}" stroke="#999" stroke-dasharray="2 4"/>')
        parts.append(f'<text x="{left + _PANEL - 4}" y="{y - 4}" text-anchor="end" fill="#777">no context</text>')
    for line in _lines(rows, field):
        points = [at(*point) for point in line.points]
        drawn = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{line.colour}"/>' for x, y in points]
    return "".join(parts)


def _legend(lines: Sequence[_Line]) -> str:
    parts = []
    for number, line in enumerate(lines):
        y = _HEIGHT + 18 * number
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + 30}" y1="{y}" y2="{y}" stroke="{line.colour}" stroke-width="2"{dash}/>'
        )
        parts.append(f'<text x="{_LEFT + 38}" y="{y + 4}">{escape(line.name)}</text>')
    return "".join(parts)
