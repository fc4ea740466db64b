"""A page's rows as a table for the terminal."""

from rich.table import Table
from rich.text import Text

from elbowroom.report.page import Page


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
