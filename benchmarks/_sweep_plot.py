"""Slowdown against peak, a color a planner, medians and quartiles, as `budgets.py` draws it.

    ./scripts/bench _sweep_plot FILE.json        draws FILE.png again from a result

Needs matplotlib (benchmarks/requirements.txt); without it there is no picture.
"""

import json
import sys
from pathlib import Path
from typing import Any

from _pictures import pyplot, save

Spread = tuple[float, float]  # below and above the median, to its quartiles
Line = list[tuple[float, float, Spread]]
_OURS = {"elbowroom, exact": "#1f5f8b", "elbowroom, codes allowed": "#c8102e"}
_THEIRS = {
    "delta": "#7a7a7a",
    "dtr": "#2a9d8f",
    "capuchin": "#8c564b",
    "greedy": "#c9a000",
    "torch.compile": "#7b2cbf",
    "one codec everywhere": "#e377c2",
    "checkpoint, per block": "#222222",
}


def draw(result: dict[str, Any], path: Path) -> Path | None:
    """Write the picture; None, and a line on stderr, if it cannot be drawn."""
    plots = pyplot()
    if plots is None:
        return None
    figure, axes = plots.subplots(figsize=(9, 6.2))
    lines = _lines(result)
    for name, color in (_THEIRS | _OURS).items():
        points = sorted(lines.get(name, []))
        if points:
            peaks, slowdowns, spread = zip(*points, strict=True)
            ours = name in _OURS
            axes.plot(peaks, slowdowns, ":", color=color, lw=1, alpha=0.45)
            axes.errorbar(
                *(peaks, slowdowns, tuple(zip(*spread, strict=True))),
                fmt="o",
                color=color,
                ms=6 if ours else 4,
                elinewidth=1,
                alpha=1 if ours else 0.8,
                zorder=3 if ours else 2,
                label=name,
            )
    axes.plot([100], [1], marker="*", ms=13, color="#222222", ls="", label="plain PyTorch")
    axes.set(
        xlabel="measured peak of a whole step, % of plain PyTorch's",
        ylabel="time of a step, over the same without economies",
        title=f"{result['settings']['model']}: what each byte saved costs",
    )
    axes.grid(True, color="#e6e6e6", lw=0.8)
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.tight_layout()
    return save(figure, path)


def _lines(result: dict[str, Any]) -> dict[str, Line]:
    """Points (peak in % of plain's, slowdown, its spread), by the name in the legend."""
    plain = result["plain"]["static_nbytes"] + result["plain"]["peak_nbytes"]
    lines: dict[str, Line] = {}
    for row in result["rows"]:
        if row["slowdown"] is not None:
            ratio, (low, high) = row["time"]["ratio"], row["time"]["ratio_quartiles"]
            scale = row["slowdown"] / ratio
            spread = (scale * (ratio - low), scale * (high - ratio))
            point = (100 * row["whole_peak_nbytes"] / plain, row["slowdown"], spread)
            lines.setdefault(_family(row), []).append(point)
    return lines


def _family(row: dict[str, Any]) -> str:
    way = row["way"]
    if way.startswith("plan for"):
        return "elbowroom, exact" if row["exact"] else "elbowroom, codes allowed"
    if row["solver"] is not None:
        return str(row["solver"])
    if way.startswith("er.saving("):
        return "one codec everywhere"
    return next((name for name in _THEIRS if name in way.replace("torch.utils.", "")), way)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(draw(json.loads(Path(name).read_text()), Path(name).with_suffix(".png")))
