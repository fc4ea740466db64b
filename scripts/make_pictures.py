"""Takes the pictures in docs/images/, light and dark, by headless Chromium.

pip install playwright; apt install chromium
python scripts/make_pictures.py                # the report: plain and a plan, side by side
python scripts/make_pictures.py demo           # the chart of the first page of `elbowroom demo`

The figures on them are measured on the machine that takes them.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from playwright.sync_api import sync_playwright
from torch import nn

import elbowroom as er
from elbowroom.demo.compare import try_out
from elbowroom.demo.models import ResNet18
from elbowroom.demo.page import first_page
from elbowroom.demo.tasks import task
from elbowroom.report import render, render_profile, step_page

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def profile(model: nn.Module) -> er.Profile:
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return er.measure(step, model=model, optimizer=optimizer)


def take(html: str, name: str, size: dict[str, int], part: str = "body") -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        path = Path(folder) / "page.html"
        path.write_text(html)
        browser = running.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        IMAGES.mkdir(exist_ok=True)
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.goto(path.as_uri())
            page.wait_for_selector(".legend td")
            where = IMAGES / f"{name}-{scheme}.png"
            if part == "body":
                page.screenshot(path=where)
            else:
                page.locator(part).screenshot(path=where)
        browser.close()


def report() -> None:
    torch.manual_seed(0)
    found = profile(ResNet18(width=32))
    plan = er.plan(found, budget=int(0.7 * er.plan(found, budget="1 TiB").plain_peak))
    page = render_profile(step_page(found, "ResNet-18", plan=plan))
    take(page, "report", {"width": 1180, "height": 1104})


def demo() -> None:
    glance = try_out(task("resnet18"), lambda: er.saving("dither", levels=6))
    take(render(first_page(glance, {})), "demo", {"width": 1000, "height": 900}, "figure.plot")


if __name__ == "__main__":
    draw: Callable[[], None] = demo if sys.argv[1:] == ["demo"] else report
    draw()
