"""gErr2 against bits an element, a line a family, as `rate_distortion.py` draws it.

    ./scripts/bench _plot FILE.json        draws FILE.png again from a result

Needs matplotlib (benchmarks/requirements.txt); without it there is no picture. A label stands at
the end of its line, moved up or down until none lies on another. Rows that change no gradient have
no place on a logarithmic axis.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _pictures import pyplot, save

_OURS = ("#c8102e", "#f28e2b", "#7b2cbf", "#8c564b", "#e377c2", "#c9a000", "#5f0f40")
_BASELINES = ("#1f5f8b", "#2a9d8f", "#3c78d8", "#52796f")
_PEERS = ("#7a7a7a", "#9a9a9a", "#5c5c5c", "#b0a08a", "#8a8f98")
_COLORS = {"ours": _OURS, "baseline": _BASELINES, "peer": _PEERS}
_LEADER = {"arrowstyle": "-", "lw": 0.5, "alpha": 0.55, "relpos": (0, 0.5), "shrinkA": 2}
_STYLES = {"ours": "-", "baseline": "--", "peer": ":"}


def draw(result: dict[str, Any], path: Path) -> Path | None:
    """Write the picture; None, and a line on stderr, if it cannot be drawn."""
    plots = pyplot()
    if plots is None:
        return None
    lines = _lines(result["rows"])
    if not lines:
        return None
    figure, axes = plots.subplots(figsize=(10, 7.2))
    _lay_out(axes, result, lines)
    biased = {row["family"] for row in result["rows"] if row["biased"]}
    ends = []
    counts = dict.fromkeys(_COLORS, 0)
    for (family, kind), points in lines.items():
        color = _COLORS[kind][counts[kind] % len(_COLORS[kind])]
        counts[kind] += 1
        bits, errors = zip(*points, strict=True)
        width = 1.8 if kind == "ours" else 1.3
        axes.plot(bits, errors, _STYLES[kind], color=color, lw=width, marker="o", ms=4)
        name = f"{family} (biased)" if family in biased else family
        ends.append((name, color, points[-1]))
    _front(axes, result["rows"])
    _label(figure, axes, ends)
    return save(figure, path)


Line = list[tuple[float, float]]


def _lines(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Line]:
    """(family, kind) -> its points (bits, gErr2) in the order of bits."""
    lines: dict[tuple[str, str], Line] = {}
    for row in rows:
        if 0 < row["gerr2"] < float("inf"):
            point = (row["bits_per_element"], row["gerr2"])
            lines.setdefault((row["family"], row["kind"]), []).append(point)
    return {key: sorted(points) for key, points in lines.items()}


def _lay_out(axes: Any, result: dict[str, Any], lines: dict[tuple[str, str], Line]) -> None:
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    points = [point for line in lines.values() for point in line]
    low, high = min(bits for bits, _ in points), max(bits for bits, _ in points)
    bottom, top = min(e for _, e in points), max(e for _, e in points)
    axes.set(xscale="log", yscale="log", xlim=(low / 1.06, high * 1.06))
    axes.set_ylim(bottom / 2, top * 2)
    marks = [
        bits for bits in (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24) if low <= bits <= high
    ]
    axes.set_xticks(marks)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("bits an element, of all that autograd saves, everything counted")
    axes.set_ylabel("gErr2: E |g~ - g|² / |g|² of the whole gradient")
    axes.set_title(
        f"{result['settings']['model']}: gradient error against bits; lower left is better\n"
        "solid: ours, dashed: baselines, dotted: programs of others; shaded: beaten by some row",
        loc="left",
        fontsize=10,
    )


def _front(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Shade what the front beats in both."""
    best = sorted((row["bits_per_element"], row["gerr2"]) for row in rows if row["front"])
    if not best:
        return
    (right, top) = axes.get_xlim()[1], axes.get_ylim()[1]
    bits, errors = zip(*best, strict=True)
    steps = [*bits, right], [*errors, errors[-1]]
    axes.fill_between(*steps, top, step="post", color="#f5f1ea", zorder=0)
    axes.step(*steps, where="post", color="#c9bfae", lw=0.8, zorder=0.5)


def _label(figure: Any, axes: Any, ends: Sequence[tuple[str, str, tuple[float, float]]]) -> None:
    """A column of names right of the axes, each at the height of its line's end if it can be."""
    figure.subplots_adjust(left=0.08, right=0.75, top=0.91, bottom=0.08)
    figure.canvas.draw()
    to_pixels, height = axes.transData.transform, axes.bbox.height
    gap = min(15 * figure.dpi / 72, height / max(len(ends), 1))
    wanted = sorted(((to_pixels(end)[1], name, color, end) for name, color, end in ends))
    places = spread([y for y, *_ in wanted], gap, axes.bbox.y0, axes.bbox.y1)
    inverse = axes.transAxes.inverted()
    for place, (_, name, color, end) in zip(places, wanted, strict=True):
        y = inverse.transform((0, place))[1]
        axes.annotate(
            name,
            xy=end,
            xytext=(1.03, y),
            textcoords="axes fraction",
            color=color,
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops={"color": color, **_LEADER},
        )


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places at least `gap` apart between low and high, as near as can be to `wanted`, which rises.

    Least squares: neighbors that are too close share the mean of what they want.
    """
    blocks: list[tuple[float, int]] = []  # what they want on average, less gap a place; how many
    for i, y in enumerate(wanted):
        mean, count = y - i * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, n = blocks.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        blocks.append((mean, count))
    most = high - (len(wanted) - 1) * gap
    bases = [max(low, min(mean, most)) for mean, count in blocks for _ in range(count)]
    return [base + i * gap for i, base in enumerate(bases)]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        draw(json.loads(file.read_text()), file.with_suffix(".png"))
