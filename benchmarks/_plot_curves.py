"""Training loss above plain AdamW's, along the training, as `loss_curves.py` measures it.

    ./scripts/bench _plot_curves FILE.json        draws FILE.png again from a result

A panel for each network and beta2; each line a mean over paired seeds; shaded is the noise of the
final loss under another order of batches. Needs matplotlib (benchmarks/requirements.txt).
"""

import json
import sys
from pathlib import Path
from typing import Any

from _pictures import pyplot, save

_COLORS = ("#7a7a7a", "#1f5f8b", "#c8102e", "#f28e2b", "#2a9d8f", "#7b2cbf", "#8c564b", "#e377c2")


def draw(result: dict[str, Any], path: Path) -> Path | None:
    """Write the picture; None, and a line on stderr, if it cannot be drawn."""
    plots = pyplot()
    if plots is None:
        return None
    rows = [row for row in result["rows"] if row["arm"] not in ("plain", "order") and row["n"]]
    panels = list(dict.fromkeys((row["network"], row["beta2"]) for row in rows))
    colors = dict(zip(dict.fromkeys(row["arm"] for row in rows), _COLORS * 2, strict=False))
    figure, grid = plots.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axes, panel in zip(grid.flat, panels, strict=True):
        shown = [row for row in rows if (row["network"], row["beta2"]) == panel]
        _panel(axes, panel, shown, colors)
    lines, names = grid.flat[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle("Training loss above plain AdamW's; shaded: seed noise", fontsize=10)
    return save(figure, path)


def _panel(axes: Any, panel: tuple[str, float], rows: list[Any], colors: dict[str, str]) -> None:
    if rows[0]["noise"]:
        noise = 1e3 * rows[0]["noise"]["final"]
        axes.axhspan(-noise, noise, color="#f0ece4", zorder=0)
    for row in rows:
        along = [100 * (i + 0.5) / len(row["curve"]) for i in range(len(row["curve"]))]
        axes.plot(
            along, [1e3 * d for d in row["curve"]], color=colors[row["arm"]], label=row["arm"]
        )
    axes.axhline(0, color="#333333", lw=0.6)
    axes.set_title(f"{panel[0]}, beta2 {panel[1]}", fontsize=9, loc="left")
    axes.set_xlabel("share of the training, %", fontsize=8)
    axes.set_ylabel("thousandths of a nat", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        draw(json.loads(file.read_text()), file.with_suffix(".png"))
