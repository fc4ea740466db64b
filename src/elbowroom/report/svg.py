"""Curves of memory over one step, as an inline SVG that reads in light and in dark.

    x = share of the step's own time, 0 to 100 %       y = MiB above the level before the step

Each curve is a staircase, since the level changes only when something is allocated or freed. A step
has thousands of changes and the chart a few hundred columns, so a column keeps its highest and its
lowest level: no peak is lost. Time is a share because the profiler stretches a step; the two runs
are then compared phase by phase.
"""

import math
from collections.abc import Sequence
from html import escape

from elbowroom.report.page import Curve

WIDTH, HEIGHT = 920, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 52, 46
COLUMNS = 420
MIB = 2**20


def chart(curves: Sequence[Curve]) -> str:
    """Draws all curves in one chart; the first is behind the others, filled."""
    top_mib = max((max(curve.nbytes, default=0) for curve in curves), default=0) / MIB or 1.0
    ticks = nice_ticks(top_mib)
    scale = _Scale(ticks[-1])
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="chart" '
        f'aria-label="Memory over one training step">',
        *_grid(scale, ticks),
    ]
    for number, curve in enumerate(curves):
        parts += _curve(scale, curve, number)
    return "\n".join([*parts, *_labels(scale, curves), *_legend(curves), "</svg>"])


def nice_ticks(top: float, most: int = 6) -> list[float]:
    """0, step, 2 step, ... to the first that reaches `top`; step is 1, 2 or 5 times a power of 10.

    >>> nice_ticks(352.3)
    [0.0, 100.0, 200.0, 300.0, 400.0]
    """
    power = 10.0 ** math.floor(math.log10(top / most))
    step = next(f * power for f in (1, 2, 5, 10) if math.ceil(top / (f * power)) <= most)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


class _Scale:
    """The scale from shares of the step and MiB to the chart's coordinates."""

    def __init__(self, top_mib: float) -> None:
        self.top_mib = top_mib

    def x(self, share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, mib: float) -> float:
        return HEIGHT - BOTTOM - mib / self.top_mib * (HEIGHT - TOP - BOTTOM)


def _grid(scale: _Scale, ticks: Sequence[float]) -> list[str]:
    parts = []
    for mib in ticks:
        y = scale.y(mib)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mib:g}</text>'
        )
    for percent in range(0, 101, 20):
        x, anchor = scale.x(percent / 100), "end" if percent == 100 else "middle"
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" '
            f'text-anchor="{anchor}">{percent} %</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{LEFT - 48}" y="18">MiB above the level before the step</text>'
    )
    parts.append(
        f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        "share of the step's time</text>"
    )
    return parts


def _curve(scale: _Scale, curve: Curve, number: int) -> list[str]:
    end_s = _end_s(curve)
    points = " L".join(
        f"{scale.x(share):.1f} {scale.y(mib):.1f}" for share, mib in columns(curve, end_s)
    )
    base = scale.y(0)
    parts = [
        f'<path class="area c{number}" d="M{scale.x(0):.1f} {base:.1f} L{points} '
        f'L{scale.x(1):.1f} {base:.1f} Z"/>',
        f'<path class="line c{number}" d="M{points}"/>',
    ]
    for name, at_s in curve.marks:
        x = scale.x(at_s / end_s)
        parts.append(
            f'<line class="mark c{number}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{base:.1f}">'
            f"<title>{escape(curve.name)}: {escape(name)} begins</title></line>"
        )
    return parts


def _labels(scale: _Scale, curves: Sequence[Curve]) -> list[str]:
    """Draws where backward begins, above the curves; the earliest to the left of its mark."""
    marks = [
        (at_s / _end_s(curve), number, curve.name)
        for number, curve in enumerate(curves)
        for name, at_s in curve.marks
        if name == "backward"
    ]
    parts = []
    for i, (share, number, name) in enumerate(sorted(marks)):
        before = i == 0 and len(marks) > 1
        x, anchor = scale.x(share) + (-6 if before else 6), "end" if before else "start"
        parts.append(
            f'<text class="label c{number}" x="{x:.1f}" y="{TOP - 8}" text-anchor="{anchor}">'
            f"backward begins, {escape(name)}</text>"
        )
    return parts


def _end_s(curve: Curve) -> float:
    """The end of the step: its last change or mark."""
    return max([*curve.times_s, *(at_s for _, at_s in curve.marks), 1e-9])


def columns(curve: Curve, end_s: float) -> list[tuple[float, float]]:
    """The staircase as (share, MiB), thinned: each column keeps its highest and lowest level."""
    points = [(0.0, 0.0)]
    level = 0.0
    column, high, low = 0, 0.0, 0.0
    for at_s, nbytes in zip(curve.times_s, curve.nbytes, strict=True):
        now = min(int(at_s / end_s * COLUMNS), COLUMNS - 1)
        if now != column:
            points += _extremes(column, high, low, level)
            points.append((now / COLUMNS, level))  # nothing changed in the columns between
            column, high, low = now, level, level
        level = nbytes / MIB
        high, low = max(high, level), min(low, level)
    points += _extremes(column, high, low, level)
    return [*points, (1.0, level)]


def _extremes(column: int, high: float, low: float, last: float) -> list[tuple[float, float]]:
    """The points of one column; it ends on the level that the next one begins with."""
    start, end = column / COLUMNS, (column + 1) / COLUMNS
    if high == low:
        return [(start, last), (end, last)]
    return [(start, high), (start, low), (start, last), (end, last)]


def _legend(curves: Sequence[Curve]) -> list[str]:
    parts = []
    x = WIDTH - RIGHT - 300
    for number, curve in enumerate(curves):
        peak_mib = max([*curve.nbytes, 0]) / MIB
        parts.append(
            f'<rect class="key c{number}" x="{x}" y="8" width="14" height="12" rx="2"/>'
            f'<text class="tick" x="{x + 20}" y="18">'
            f"{escape(curve.name)}, peak {peak_mib:.1f}</text>"
        )
        x += 145
    return parts
