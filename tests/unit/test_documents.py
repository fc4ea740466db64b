"""README.md is short and its example runs; troubleshooting knows every error; the site has all."""

import inspect
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import elbowroom as er
from elbowroom import errors

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ERRORS = [
    name
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.ElbowroomError)
]


RESULTS = ROOT / "benchmarks" / "results"
LOG = (ROOT / "docs" / "log.md").read_text()
GROUPS = {"ElbowroomError", "CodecError", "OptimizerError"}  # their members are listed
LISTED = [name for name in ERRORS if name not in GROUPS]


def test_the_readme_is_short_enough_to_be_read():
    assert len(README.encode()) <= 8 * 1024


def test_the_example_of_the_readme_runs_and_prints_what_it_says(capsys):
    code = re.search(r"## Ten lines\n\n```python\n(.+?)```", README, re.DOTALL)[1]
    names = {}
    exec(code, names)
    er.release(names["model"])
    assert all(p.grad is not None for p in names["model"].parameters())
    printed = capsys.readouterr().out.splitlines()
    shown = README[README.index(printed[0]) :].splitlines()
    # Its figures, and the actions at the end, may be others on another machine.
    for one, other in zip(printed[:7], shown[:7], strict=True):
        one = one.partition(" against eager PyTorch")[0]  # if another test has compiled something
        assert re.sub(r"\d[\d.]*", "N", one).split() == re.sub(r"\d[\d.]*", "N", other).split()


def test_the_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", LISTED)
def test_troubleshooting_says_what_to_do_about_every_error(name):
    assert f"`{name}`" in (ROOT / "docs" / "troubleshooting.md").read_text()


def test_the_site_leads_to_every_page():
    shown = (ROOT / "mkdocs.yml").read_text()
    assert yaml.safe_load(shown)["strict"]
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert {page for page in pages if page not in shown} == set()


@pytest.mark.parametrize("name", ["convnets", "medical", "gnn", "recommenders"])
def test_the_example_of_a_guide_runs(name, capsys):
    text = (ROOT / "docs" / "guides" / f"{name}.md").read_text()
    exec(re.search(r"```python\n(.+?)```", text, re.DOTALL)[1], {"__name__": "guide"})
    assert 0 < float(capsys.readouterr().out) < 10


def test_the_codec_of_the_reference_is_registered_planned_with_and_honest():
    text = (ROOT / "docs" / "reference" / "codecs.md").read_text()
    example = re.search(r"```python\n(.+?)```", text, re.DOTALL)[1]
    code = f"""{example}
from elbowroom.codecs.quality import broken_promise, measured
from elbowroom.plan.registered import chosen_settings

assert chosen_settings(["scaled_int8"]) == (ScaledInt8(),)
assert broken_promise(ScaledInt8()) == ""
assert measured(ScaledInt8(), maps=False).unbiased
"""
    done = subprocess.run(  # what is registered stays so
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.returncode, done.stderr
    assert "scaled_int8" in done.stdout


def rows_of(name, key):
    """The rows of a file of results, by their name, and what a plain step takes there."""
    told = json.loads((RESULTS / f"{name}.json").read_text())
    return {row[key]: row for row in told["rows"]}, told.get("plain")


def as_cells(peak, plain, time):
    return f"{100 * peak / plain:.0f} %", f"{time['ratio']:.2f}"


@pytest.mark.parametrize(
    ("name", "rival", "ours"),
    [
        ("budgets-resnet18", "torch.utils.checkpoint, per block", "plan for 135.5 MiB, exact"),
        ("budgets-gpt", "torch.utils.checkpoint, per block", "plan for 81.4 MiB, exact"),
    ],
)
def test_rows_of_the_readme_with_a_plan_have_the_figures_of_the_results(name, rival, ours):
    rows, plain = rows_of(name, "way")
    whole = plain["peak_nbytes"] + plain["static_nbytes"]
    peak, time = as_cells(rows[rival]["whole_peak_nbytes"], whole, rows[rival]["time"])
    _, own = as_cells(0, whole, rows[ours]["time"])
    assert rows[ours]["whole_peak_nbytes"] <= rows[rival]["whole_peak_nbytes"]
    assert f"| {peak} | {time} | {own} in the same memory, exact |" in README.replace("**", "")


def public_cells():
    """Returns for each public model: peak and time of each way, gErr2 of codes, time of a fit."""
    rows = json.loads((RESULTS / "public-models.json").read_text())["rows"]
    for row in rows:
        cells = []
        for way in ("checkpoint", "exact", "dither levels=16"):
            ran = way in row and row[way].get("time")
            cells += [f"{100 / row[way]['peak_less']:.0f} %" if ran else "n/a"]
            cells += [f"{row[way]['time']['ratio']:.2f}" if ran else "n/a"]
        fit = row["fit"]["40%"]
        held = fit["outcome"] == "held"
        gerr2 = f"{row['dither levels=16']['gerr2']:.3f}"
        yield row["name"], cells, gerr2, f"{fit['time']['ratio']:.2f}" if held else fit["outcome"]


def test_the_page_of_benchmarks_has_the_figures_of_all_public_models():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    said = [line for line in text.splitlines() if line.startswith("| ")]
    for name, cells, gerr2, fit in public_cells():
        assert f"| {name} | {' | '.join([*cells, gerr2, fit])} |" in said


def test_rows_of_the_readme_of_public_models_have_the_figures_of_the_results():
    said = dict(re.findall(r"^\| ([\w-]+) \([\w ]+\) \| (.+) \|$", README, re.MULTILINE))
    assert len(said) == 6
    by_name = {name: (cells, gerr2) for name, cells, gerr2, _ in public_cells()}
    for label, row in said.items():
        cells, gerr2 = by_name[label.lower().replace("-", "")]
        pairs = [f"{peak}, {time}" for peak, time in zip(cells[::2], cells[1::2], strict=True)]
        assert row == f"{' | '.join(pairs)}, {gerr2}"


def test_the_row_of_the_readme_with_codes_has_the_figures_of_the_results():
    rows, plain = rows_of("training-resnet18", "way")
    rival = rows['er.saving("group", bits=2, group_size=256, rebuild=False)']
    ours = rows['er.saving("dither", levels=6)']
    cells = [
        as_cells(row["peak_nbytes"], plain["peak_nbytes"], row["time"]) for row in (rival, ours)
    ]
    (peak, time), (own_peak, own_time) = cells
    row = next(line for line in README.splitlines() if "ActNN; gErr2" in line).replace("**", "")
    assert f"gErr2 {rival['gerr2']:.3f}" in row
    assert f"| {peak} | {time} | {own_time} at {own_peak}, gErr2 {ours['gerr2']:.3f} |" in row


@pytest.mark.parametrize(("budget", "ours"), [("0.5", "ours 0.5"), ("0.3", "ours 0.3")])
def test_rows_of_the_readme_inside_torch_compile_have_the_figures_of_the_results(budget, ours):
    rows, _ = rows_of("compiled-gpt-small", "arm")
    plain = rows["plain"]["peak_nbytes"]
    cells = [
        as_cells(rows[arm]["peak_nbytes"], plain, rows[arm]["time"])
        for arm in (f"budget {budget}", ours)
    ]
    (peak, time), (own_peak, own_time) = cells
    assert rows[ours]["g_err2"] == 0
    row = next(line for line in README.splitlines() if f"activation_memory_budget={budget}" in line)
    assert f"| {peak} | {time} | compiled: {own_time} at {own_peak}, exact |" in row


@pytest.mark.parametrize(
    ("name", "budget", "ours"),
    [
        ("budgets-resnet18", "0.8", "plan for 154.0 MiB, exact"),
        ("budgets-gpt", "0.6", "plan for 139.6 MiB, exact"),
    ],
)
def test_rows_of_the_readme_beside_torch_compile_have_the_figures_of_the_results(
    name, budget, ours
):
    rows, plain = rows_of(name, "way")
    rival = rows[f"torch.compile, activation_memory_budget={budget}"]
    whole = plain["peak_nbytes"] + plain["static_nbytes"]
    peak, own = as_cells(rival["whole_peak_nbytes"], whole, rows[ours]["time"])
    time = rival["time"]["ratio"] / rows["torch.compile"]["time"]["ratio"]
    row = next(line for line in README.splitlines() if f"activation_memory_budget={budget}" in line)
    said = f"| {peak} | {time:.2f} | not compiled: {own} in the same memory, exact |"
    assert said in row.replace("**", "")


def test_an_entry_of_the_log_opens_with_its_decision():
    entries = re.split(r"^### ", LOG, flags=re.MULTILINE)[1:]
    assert [one.partition("\n")[0] for one in entries if "\n\n**Decided: " not in one] == []


def test_the_contents_of_the_log_lead_to_every_entry():
    script = runpy.run_path(str(ROOT / "scripts" / "log_contents.py"))
    assert script["with_contents"](LOG) == LOG, "run python scripts/log_contents.py"
