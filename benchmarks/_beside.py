"""Plans beside rivals at the rivals' own measured peaks: what came out, from the rows of a result.

`budgets.py` writes it down, and `report.py` says it again from the rows, so that no text can claim
more than was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCE = 1.02
_SAME_PEAK = 1.005  # a plan that takes more than this of the rival's peak does not stand beside it


@dataclass(frozen=True)
class Beside:
    """One rival, and the plan for its peak. Times over the same step without economies."""

    rival: str
    theirs: float
    ours: float
    fits: bool

    @property
    def loses(self) -> bool:
        """The plan is slower by more than the tolerance, or takes more memory."""
        return self.ours > self.theirs * TOLERANCE or not self.fits

    @property
    def wins(self) -> bool:
        """The rival is slower by more than the tolerance."""
        return self.fits and self.theirs > self.ours * TOLERANCE


def compared(rows: Sequence[dict[str, Any]]) -> list[Beside]:
    """Every rival for whose peak there is a plan, if both have a time."""
    plans = {rival: row for row in rows for rival in row["rivals"] if rival}
    pairs = [(row, plans[row["way"]]) for row in rows if row["way"] in plans]
    return [
        Beside(row["way"], row["slowdown"], ours["slowdown"], _fits(row, ours))
        for row, ours in pairs
        if row["slowdown"] is not None and ours["slowdown"] is not None
    ]


def _fits(row: dict[str, Any], ours: dict[str, Any]) -> bool:
    return bool(ours["whole_peak_nbytes"] <= row["whole_peak_nbytes"] * _SAME_PEAK)


def lowest(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan with the lowest peak, and the rival with the lowest."""
    plans = [row for row in rows if row["way"].startswith("plan for")]
    rivals = [row for row in rows if not row["way"].startswith("plan for")]
    return min(plans, key=_peak), min(rivals, key=_peak)


def _peak(row: dict[str, Any]) -> int:
    return int(row["whole_peak_nbytes"])


def claim(rows: Sequence[dict[str, Any]], plain_nbytes: int) -> str:
    """What was found, in one sentence."""
    found = compared(rows)
    wins, loses = sum(one.wins for one in found), sum(one.loses for one in found)
    ours, theirs = (100 * _peak(row) / plain_nbytes for row in lowest(rows))
    return (
        f"Plans at the measured peaks of {len(found)} rivals: at {wins} the plan is faster by more "
        f"than {100 * (TOLERANCE - 1):.0f} %, at {loses} the rival is, at "
        f"{len(found) - wins - loses} neither; plans go down to {ours:.1f} % of plain's peak, "
        f"rivals to {theirs:.1f} %."
    )
