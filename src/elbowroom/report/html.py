"""A page as one HTML file: no script, no font, no image and no address outside of it.

Everything that comes from data is escaped by the template engine; the chart escapes its own names.
"""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from elbowroom.files import write_text
from elbowroom.plan.profile import Profile
from elbowroom.report.bands import bands
from elbowroom.report.page import Page
from elbowroom.report.profile import StepPage
from elbowroom.report.stack import stack
from elbowroom.report.svg import chart

_TEMPLATES = Environment(
    loader=PackageLoader("elbowroom.report", "."),
    autoescape=True,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)


def render(page: Page) -> str:
    """The page as HTML text."""
    drawn = Markup(chart(page.curves)) if page.curves else ""
    return _TEMPLATES.get_template("page.html.j2").render(page=page, chart=drawn)


def render_profile(page: StepPage, profile: Profile) -> str:
    """The page of a profiled step as HTML text."""
    drawn = Markup(stack(profile, bands(profile)))
    return _TEMPLATES.get_template("profile.html.j2").render(page=page, chart=drawn)


def write(page: Page, path: Path) -> None:
    """Write the page so that `path` is always the old file or the whole new one, never a part."""
    write_text(render(page), path)
