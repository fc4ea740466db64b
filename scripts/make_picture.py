"""The README's picture: the chart of a demo's page, as a file of its own.

./scripts/demo --out demo.html
.venv/bin/python scripts/make_picture.py demo.html docs/memory.svg
"""

import re
import sys
from pathlib import Path


def picture(page: str) -> str:
    """The first chart of a page, with the style that it needs inside."""
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    chart = re.search(r"<svg.*?</svg>", page, re.DOTALL)
    if style is None or chart is None:
        raise SystemExit("make_picture: expected a page of `elbowroom demo`, with a chart in it")
    head, rest = chart[0].split(">", 1)
    font = "text { font: 13px system-ui, sans-serif; }"
    ground = '<rect width="100%" height="100%" style="fill: var(--card)"/>'
    inside = f"<style>{style[1]}{font}</style>{ground}"
    return f'{head} xmlns="http://www.w3.org/2000/svg">{inside}{rest}\n'


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(picture(source.read_text()))
