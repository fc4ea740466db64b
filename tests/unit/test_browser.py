"""The pages in a browser: Chromium through Playwright, skipped where either is missing."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.report import Curve, Page, render, render_profile, step_page
from elbowroom.units import show_nbytes

playwright = pytest.importorskip("playwright.sync_api")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
EVIL = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def profile():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    x = torch.randn(2048, 256)
    found = er.measure(lambda: model(x).square().mean().backward(), model=model)
    storages = tuple(
        replace(one, saves=tuple(replace(save, modules=(EVIL,)) for save in one.saves))
        for one in found.storages
    )
    return replace(found, storages=storages)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(params=["light", "dark"])
def show(request, browser, tmp_path):
    """A function that opens HTML without a network; what the console says is an error."""
    context = browser.new_context(color_scheme=request.param, offline=True)
    said = []

    def open_page(html):
        path = tmp_path / "page.html"
        path.write_text(html)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        page.wait_for_selector(".legend td")
        return page

    yield open_page
    context.close()
    assert said == []


def figures(page):
    """What stands in the two tables below the pictures: name -> (at the cursor, at most)."""
    rows = page.eval_on_selector_all(
        ".legend tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return [row for row in rows if row[0]]


def test_plain_and_plan_stand_side_by_side_with_their_peaks(profile, show):
    plan = er.plan(profile, budget=int(0.95 * profile.peak))
    page = show(render_profile(step_page(profile, "Net", plan=plan)))
    boxes = [figure.bounding_box() for figure in page.query_selector_all("figure.plot")]
    assert len(boxes) == 2
    assert boxes[0]["y"] == boxes[1]["y"]
    drawn = page.evaluate("elbowroom.charts.map(chart => chart.level[chart.peak])")
    assert drawn == [plan.plain_peak, plan.peak]
    sums = [row for row in figures(page) if row[0] == "all"]
    assert [row[1] for row in sums] == [show_nbytes(n) for n in drawn]


def test_the_peak_is_that_of_the_json(profile, show, tmp_path):
    profile.save(tmp_path / "profile.json")
    peak = max(json.loads((tmp_path / "profile.json").read_text())["level"])
    page = show(render_profile(step_page(profile, "Net")))
    assert page.evaluate("elbowroom.charts[0].level[elbowroom.charts[0].peak]") == peak
    painted = page.evaluate(
        """() => {
          const canvas = document.querySelector("canvas");
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )
    assert painted > 4  # several bands, and no empty picture


def test_names_are_text(profile, show):
    page = show(render_profile(step_page(profile, EVIL)))
    page.click("button[data-view='1']")
    assert EVIL in [row[0] for row in figures(page)]
    assert page.title().startswith(EVIL)
    assert page.query_selector("img") is None


def test_keys_move_the_cursor_and_zoom(profile, show):
    page = show(render_profile(step_page(profile, "Net")))
    page.focus(".canvas")
    width = "elbowroom.charts[0].plot.scales.x.max - elbowroom.charts[0].plot.scales.x.min"
    whole = page.evaluate(width)
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    last = page.evaluate("elbowroom.charts[0].data.x.length") - 2
    page.wait_for_function(f"elbowroom.charts[0].plot.cursor.idx === {last}")
    assert page.inner_text(".said").count(":") == 1
    page.keyboard.press("+")
    page.wait_for_function(f"{width} < {0.6 * whole}")
    page.keyboard.press("0")
    page.wait_for_function(f"{width} >= {whole}")


def test_the_mouse_reads_and_zooms(profile, show):
    page = show(render_profile(step_page(profile, "Net")))
    page.locator(".canvas").scroll_into_view_if_needed()
    box = page.query_selector(".u-over").bounding_box()
    width = "elbowroom.charts[0].plot.scales.x.max - elbowroom.charts[0].plot.scales.x.min"
    whole = page.evaluate(width)
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.3 * box["width"], y)
    page.wait_for_function("document.querySelector('.legend th.n').textContent !== 'at the peak'")
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], y)
    page.mouse.up()
    page.wait_for_function(f"{width} < {0.4 * whole}")


def test_the_page_of_the_demo(show):
    curves = (
        Curve("plain", (0.0, 1.0, 2.0), (10 << 20, 30 << 20, 0), (("backward", 1.0),)),
        Curve("elbowroom", (0.0, 1.5, 3.0), (5 << 20, 12 << 20, 0), (("backward", 1.2),)),
    )
    page = show(render(Page("Title", "Lead", (), curves=curves)))
    assert [(row[0], row[2]) for row in figures(page)] == [
        ("plain", "30.0 MiB"),
        ("elbowroom", "12.0 MiB"),
    ]
