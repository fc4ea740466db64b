"""The page: correct numbers, nothing from outside, nothing half-written."""

import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from elbowroom.report import Curve, Page, ReportRow, render, table, write
from elbowroom.report.chart import COLUMNS, curves_chart, on_grid

MIB = 2**20
CURVES = (
    Curve("plain", (0.0, 1.0, 2.0), (10 * MIB, 30 * MIB, 0), (("backward", 1.0),)),
    Curve("ours", (0.0, 1.5, 3.0), (5 * MIB, 12 * MIB, 0), (("backward", 1.2), ("optimizer", 2.9))),
)
PAGE = Page(
    title="A <title>",
    lead="Lead & more",
    rows=(
        ReportRow(
            "saved bytes", "30.0 MiB", "12.0 MiB", "2.5x less", good=True, note="before backward"
        ),
        ReportRow("slowdown", "", "4 %", "", good=None, kind="estimated"),
        ReportRow("accuracy", "90 %", "80 %", "-10 [points]", good=False),
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
    assert not re.search(r"<link|<img|src=|href=|@import|url\(", html)
    assert html.count("https://") == 1  # the name of the library's home, in a comment of its own


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
    assert "<figure" not in render(Page("t", "l", PAGE.rows))


def test_the_chart_has_both_curves_and_where_backward_begins():
    chart = curves_chart(CURVES)
    bands = chart["views"][0]["bands"]
    assert [(band["name"], band["most"]) for band in bands] == [
        ("plain", 30 * MIB),
        ("ours", 12 * MIB),
    ]
    assert [(mark["name"], mark["x"]) for mark in chart["marks"]] == [
        ("backward begins, plain", 0.5),
        ("backward begins, ours", pytest.approx(0.4)),
    ]
    assert all(len(band["values"]) == len(chart["x"]) for band in bands)


@pytest.mark.parametrize("curve", [Curve("empty", (), ()), Curve("flat", (0.0, 1.0), (0, 0))])
def test_a_curve_without_height(curve):
    chart = curves_chart([curve])
    assert chart["peak"] == 0
    assert set(chart["views"][0]["bands"][0]["values"]) == {0}


def test_thinning_loses_no_peak():
    times = [i / 10_000 for i in range(10_000)]
    nbytes = [MIB] * 10_000
    nbytes[7_777] = 99 * MIB
    values = on_grid(Curve("c", times, nbytes), 1.0)
    assert max(values) == 99 * MIB
    assert len(values) == COLUMNS + 1


def test_a_level_stays_until_the_next():
    values = on_grid(Curve("c", (0.0, 0.1, 0.5, 0.9), (5, 2, 3, 7)), 1.0)
    assert values[int(0.3 * COLUMNS)] == 2
    assert values[int(0.7 * COLUMNS)] == 3
    assert values[-1] == 7


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
