"""Bands of memory over one step, one upon the other, as an inline SVG.

    x = seconds of the step        y = bytes held, from zero

A step has more moments than the chart has columns, so a column shows the moment with the highest
level: no peak is lost.
"""

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from elbowroom.plan.profile import Profile
from elbowroom.report.bands import Band
from elbowroom.report.svg import BOTTOM, COLUMNS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, nice_ticks
from elbowroom.units import show_nbytes, show_seconds

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def stack(profile: Profile, bands: Sequence[Band]) -> str:
    """The bands, the level above them, where backward begins, and the peak."""
    level = np.array(profile.level, np.int64)
    shown, edges = _columns(profile, level)
    unit, size = next((one for one in _UNITS if level.max(initial=0) >= one[1]), ("B", 1))
    ticks = nice_ticks(max(float(level.max(initial=0)), 1.0) / size)
    top = ticks[-1] * size
    bottom = np.zeros(len(shown), np.int64)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="chart" '
        f'aria-label="Memory over one training step, by module">'
    ]
    for band in bands:
        upper = bottom + band.nbytes[shown]
        parts.append(
            f'<path class="band b{band.colour}" d="{_area(edges, bottom, upper, top)}">'
            f"<title>{escape(band.name)}, at most {show_nbytes(band.most_nbytes)}</title></path>"
        )
        bottom = upper
    parts += _grid(ticks, size, unit, profile.seconds)
    line = " L".join(_stairs(edges, level[shown], top))
    parts.append(f'<path class="level" d="M{line}"/>')
    parts += _backward(profile)
    parts += _peak(profile, level, top)
    return "\n".join([*parts, "</svg>"])


def _columns(profile: Profile, level: NDArray[np.int64]) -> tuple[list[int], list[float]]:
    """The moment that each column shows, and the edges of columns as shares of the step."""
    end_s = max(profile.seconds, *profile.starts_s, 1e-9)
    shares = [start_s / end_s for start_s in profile.starts_s]
    best: dict[int, int] = {}
    for moment, share in enumerate(shares):
        column = min(int(share * COLUMNS), COLUMNS - 1)
        if column not in best or level[moment] > level[best[column]]:
            best[column] = moment
    edges = [0.0, *(column / COLUMNS for column in list(best)[1:]), 1.0]
    return list(best.values()), edges


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(nbytes: float, top: float) -> float:
    return HEIGHT - BOTTOM - nbytes / top * (HEIGHT - TOP - BOTTOM)


def _stairs(edges: Sequence[float], nbytes: NDArray[np.int64], top: float) -> list[str]:
    points = []
    for start, end, size in zip(edges, edges[1:], nbytes.tolist(), strict=False):
        y = _y(size, top)
        points += [f"{_x(start):.1f} {y:.1f}", f"{_x(end):.1f} {y:.1f}"]
    return points


def _area(
    edges: Sequence[float], lower: NDArray[np.int64], upper: NDArray[np.int64], top: float
) -> str:
    there, back = _stairs(edges, upper, top), reversed(_stairs(edges, lower, top))
    return f"M{' L'.join([*there, *back])} Z"


def _grid(ticks: Sequence[float], size: int, unit: str, seconds: float) -> list[str]:
    parts = [f'<text class="axis" x="{LEFT - 48}" y="18">{unit} held</text>']
    for tick in ticks:
        y = _y(tick * size, ticks[-1] * size)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'opacity=".5"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, anchor = _x(share), "end" if share == 1.0 else "middle"
        told = show_seconds(share * seconds) if share else "0"
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" '
            f'text-anchor="{anchor}">{told}</text>'
        )
    return parts


def _backward(profile: Profile) -> list[str]:
    end_s = max(profile.seconds, *profile.starts_s, 1e-9)
    x = _x(profile.starts_s[profile.backward] / end_s)
    return [
        f'<line class="begins" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
        f'<text class="halo" x="{x + 6:.1f}" y="{TOP - 6}">backward begins</text>',
    ]


def _peak(profile: Profile, level: NDArray[np.int64], top: float) -> list[str]:
    end_s = max(profile.seconds, *profile.starts_s, 1e-9)
    moment = int(level.argmax())
    share = profile.starts_s[moment] / end_s
    x, y = _x(share), _y(int(level[moment]), top)
    late = share > 0.75
    label_y = y - 7 if y > TOP + 14 else y + 18  # the line of "backward begins" stays free
    anchor = "end" if late else "start"
    return [
        f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="currentColor"/>',
        f'<text class="halo" x="{x + (-8 if late else 8):.1f}" y="{label_y:.1f}" '
        f'text-anchor="{anchor}">peak {show_nbytes(int(level[moment]))}</text>',
    ]
