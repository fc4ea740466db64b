"""The page: correct numbers, nothing from outside, nothing half-written."""

import io
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from rich.console import Console

from elbowroom.report import Curve, Page, Row, render, table, write
from elbowroom.report.svg import chart, columns, nice_ticks

MIB = 2**20
CURVES = (
    Curve("plain", (0.0, 1.0, 2.0), (10 * MIB, 30 * MIB, 0), (("backward", 1.0),)),
    Curve("ours", (0.0, 1.5, 3.0), (5 * MIB, 12 * MIB, 0), (("backward", 1.2), ("optimizer", 2.9))),
)
PAGE = Page(
    title="A <title>",
    lead="Lead & more",
    rows=(
        Row("saved bytes", "30.0 MiB", "12.0 MiB", "2.5x less", good=True, note="before backward"),
        Row("slowdown", "", "4 %", "", good=None, kind="estimated"),
        Row("accuracy", "90 %", "80 %", "-10 [points]", good=False),
    ),
    curves=CURVES,
    details={"Ledger": "keep  <3>"},
    settings={"bits": "2"},
    versions={"torch": "2.13.0"},
    notes=("A note.",),
)


def test_the_page_is_self_contained_and_escaped():
    html = render(PAGE)
    assert "A &lt;title&gt;" in html
    assert "Lead &amp; more" in html
    assert "keep  &lt;3&gt;" in html
    assert not re.search(r"<script|<link|<img|src=|href=|@import|url\(|https?://", html)


def test_every_tag_is_closed():
    class Balance(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open_tags = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta",):
                self.open_tags.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            assert self.open_tags.pop() == tag

    checker = Balance()
    checker.feed(render(PAGE))
    assert checker.open_tags == []


def test_measured_and_estimated_are_said_on_every_row():
    html = render(PAGE)
    assert html.count('<td class="kind">measured</td>') == 2
    assert html.count('<td class="kind">estimated</td>') == 1


def test_a_page_without_curves_has_no_chart():
    assert "<svg" not in render(Page("t", "l", PAGE.rows))


def test_the_chart_is_xml_with_both_curves_and_the_boundary():
    svg = ElementTree.fromstring(chart(CURVES))
    lines = [e for e in svg.iter() if "line c" in e.get("class", "")]
    assert len(lines) == 2
    text = " ".join("".join(e.itertext()) for e in svg.iter("text"))
    assert "plain, peak 30.0" in text
    assert "backward begins, ours" in text
    marks = [e for e in svg.iter("line") if e.get("class", "").startswith("mark")]
    assert len(marks) == 3


def test_names_in_the_chart_are_escaped():
    ElementTree.fromstring(chart([Curve("<&", (0.0,), (MIB,), (("a<b", 0.0),))]))


@pytest.mark.parametrize("curve", [Curve("empty", (), ()), Curve("flat", (0.0, 1.0), (0, 0))])
def test_a_curve_without_height(curve):
    ElementTree.fromstring(chart([curve]))


def test_thinning_loses_no_peak():
    times = [i / 10_000 for i in range(10_000)]
    nbytes = [MIB] * 10_000
    nbytes[7_777] = 99 * MIB
    points = columns(Curve("c", times, nbytes), 1.0)
    assert max(mib for _, mib in points) == 99
    assert len(points) < 3_000


def test_a_staircase_has_no_slopes():
    times = [0.0, 0.1, 0.1004, 0.5, 0.9]
    nbytes = [5 * MIB, 9 * MIB, 2 * MIB, 3 * MIB, 7 * MIB]
    points = columns(Curve("c", times, nbytes), 1.0)
    for (share, mib), (next_share, next_mib) in pairwise(points):
        assert share == next_share or mib == next_mib
    assert max(share for share, mib in points if mib == 3) == pytest.approx(0.9, abs=0.01)
    assert points[-1] == (1.0, 7.0)


@pytest.mark.parametrize(
    ("top", "last", "step"), [(352.3, 400, 100), (1, 1, 0.2), (0.03, 0.03, 0.005)]
)
def test_ticks_are_round_and_reach_the_top(top, last, step):
    ticks = nice_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] == pytest.approx(last)
    assert ticks[1] == pytest.approx(step)


def test_writing_replaces_the_file_whole(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    write(PAGE, path)
    assert path.read_text() == render(PAGE)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(self, target):
        raise OSError("disk is full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk is full"):
        write(PAGE, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_terminal_table_shows_brackets_as_they_are():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(PAGE))
    text = console.export_text()
    assert "-10 [points]" in text
    assert "estimated" in text
