"""Data that the page's script draws: curves over one step, thinned to what a screen shows.

A chart is drawn by uPlot 1.6.32 (uplot/, MIT), which is one file of 50 kB that needs no network and
draws stepped areas with a cursor and zoom. Plotly would add a few megabytes to every page.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elbowroom.report.bands import Band, by_category, by_module
from elbowroom.report.page import Curve
from elbowroom.report.step import Step

COLUMNS = 800  # of a chart: what happens within one is shown by its highest moment


def step_chart(step: Step, name: str, kind: str) -> dict[str, Any]:
    """Returns the chart of one step: bands by category and by module, the level, the peak."""
    profile = step.profile
    views = {"category": by_category(step), "module": by_module(step)}
    chart = stacked_chart(profile.starts_s, profile.seconds, step.level, views)
    marks = []
    if len(step.level):
        backward_s = profile.starts_s[profile.backward]
        marks = [{"name": "backward begins", "x": backward_s, "color": -1}]
    return {**chart, "name": name, "kind": kind, "marks": marks}


def stacked_chart(
    starts_s: Sequence[float],
    seconds: float,
    level: Any,
    views: Mapping[str, Sequence[Band]],
    unit: str = "s",
) -> dict[str, Any]:
    """Returns bands upon each other, in one or more views; together they come to the level."""
    shown = _columns(starts_s, level, seconds)
    return {
        "name": "",
        "kind": "measured",
        "unit": unit,
        "x": [*(starts_s[i] for i in shown), _end_s(starts_s, seconds)],
        "views": [{"name": name, "bands": _shown(bands, shown)} for name, bands in views.items()],
        "marks": [],
        "peak": max(map(int, level), default=0),
        "stacked": True,
    }


def curves_chart(curves: Sequence[Curve]) -> dict[str, Any]:
    """Returns the chart of several curves over the share of their step, each from zero."""
    bands: list[dict[str, Any]] = []
    marks: list[dict[str, Any]] = []
    grid = np.arange(COLUMNS + 1) / COLUMNS
    for number, curve in enumerate(curves):
        end_s = max([*curve.times_s, *(at_s for _, at_s in curve.marks), 1e-9])
        values = on_grid(curve, end_s)
        peak = max([*curve.nbytes, 0])
        bands.append({"name": curve.name, "color": 9 + number, "values": values, "most": peak})
        marks += [
            {"name": f"{mark} begins, {curve.name}", "x": at_s / end_s, "color": 9 + number}
            for mark, at_s in curve.marks
            if mark == "backward"
        ]
    return {
        "name": "",
        "kind": "measured",
        "unit": "share",
        "x": grid.tolist(),
        "views": [{"name": "curve", "bands": bands}],
        "marks": marks,
        "peak": max((band["most"] for band in bands), default=0),
        "stacked": False,
    }


def on_grid(curve: Curve, end_s: float) -> list[int]:
    """Returns the highest level within each column, and the last one."""
    found = [0] * COLUMNS
    level = column = 0
    for at_s, nbytes in zip(curve.times_s, curve.nbytes, strict=True):
        now = min(int(at_s / end_s * COLUMNS), COLUMNS - 1)
        if now != column:
            found[column + 1 : now + 1] = [level] * (now - column)
            column = now
        level = nbytes
        found[column] = max(found[column], level)
    found[column + 1 :] = [level] * (COLUMNS - 1 - column)
    return [*found, level]


def _shown(bands: Sequence[Band], shown: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for band in bands:
        values = [int(n) for n in band.nbytes[list(shown)]] if len(shown) else [0]
        if band.max_nbytes:
            found.append(
                {
                    "name": band.name,
                    "color": band.color,
                    "values": [*values, values[-1]],
                    "most": band.max_nbytes,
                }
            )
    return found


def _columns(starts_s: Sequence[float], level: Any, seconds: float) -> list[int]:
    """Returns the moment that each column shows: the one with the highest level."""
    end_s = _end_s(starts_s, seconds)
    best: dict[int, int] = {}
    for moment, start_s in enumerate(starts_s):
        column = min(int(start_s / end_s * COLUMNS), COLUMNS - 1)
        if column not in best or level[moment] > level[best[column]]:
            best[column] = moment
    return list(best.values())


def _end_s(starts_s: Sequence[float], seconds: float) -> float:
    return max(seconds, *starts_s, 1e-9) * (1 + 1e-9)  # the end is behind the last moment
