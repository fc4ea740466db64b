"""A page as one HTML file: no font, no image, no script and no address outside of it.

The template engine escapes all data. The data of charts is JSON in which "<" is escaped, so that no
tag can end inside of it.
"""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from elbowroom.files import write_text
from elbowroom.report.chart import curves_chart
from elbowroom.report.page import Page
from elbowroom.report.profile import StepPage

_TEMPLATES = Environment(
    loader=PackageLoader("elbowroom.report", "."),
    autoescape=True,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)


def render(page: Page) -> str:
    """The page as HTML text."""
    charts = [curves_chart(page.curves)] if page.curves else []
    return _render("page.html.j2", page, charts)


def render_profile(page: StepPage) -> str:
    """The page of a step as HTML text."""
    return _render("profile.html.j2", page, page.charts)


def write(page: Page, path: Path) -> None:
    """Writes the page so that `path` is always the old file or the whole new one, never a part."""
    write_text(render(page), path)


def _render(template: str, page: Page | StepPage, charts: Sequence[dict[str, Any]]) -> str:
    shown = {
        "library": _part("uplot/uPlot.iife.min.js"),
        "script": _part("chart.js"),
        "plot_style": _part("uplot/uPlot.min.css"),
    }
    return _TEMPLATES.get_template(template).render(page=page, found=charts, **shown)


@cache
def _part(name: str) -> Markup:
    """A file of this package that goes into the page as it is."""
    return Markup(files("elbowroom.report").joinpath(name).read_text(encoding="utf-8"))
