"""A report as data: what is compared, how much it is, and whether that was measured or estimated.

A figure never travels without its kind, so no drawing of a page can put the two in one column by
mistake.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.table import Table
from rich.text import Text

Kind = Literal["measured", "estimated"]


@dataclass(frozen=True)
class ReportRow:
    """One line of the comparison: the figures as text, and what the line means.

    `verdict` says the change in words ("12.3x less"); `good` colors it: better, worse, or neither.
    """

    name: str
    plain: str
    ours: str
    verdict: str = ""
    good: bool | None = None
    kind: Kind = "measured"
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """Bytes held over time: `nbytes[i]` from `times_s[i]` on; marks are (name, seconds)."""

    name: str
    times_s: Sequence[float]
    nbytes: Sequence[int]
    marks: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class Page:
    """Everything that a report shows."""

    title: str
    lead: str
    rows: Sequence[ReportRow]
    curves: Sequence[Curve] = ()
    curves_note: str = ""
    details: Mapping[str, str] = field(
        default_factory=dict
    )  # heading -> text in a fixed-width font
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def table(page: Page) -> Table:
    """The comparison, one row a figure; what is estimated says so in a column of its own."""
    drawn = Table(title=Text(page.title, style="bold"), title_justify="left")
    drawn.add_column("one step")
    for name in ("plain", "elbowroom", "change"):
        drawn.add_column(name, justify="right")
    drawn.add_column("kind", style="dim")
    for row in page.rows:
        style = {True: "green", False: "red", None: ""}[row.good]
        cells = (row.name, ""), (row.plain, ""), (row.ours, "bold"), (row.verdict, style)
        drawn.add_row(*(Text(text, style=style) for text, style in cells), row.kind)
    return drawn
