"""What is said of plans beside rivals is what the committed rows say."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RESULT = {name: RESULTS / f"budgets-{name}.json" for name in ("resnet18", "gpt")}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def row(way, slowdown, peak, rivals=(), solver=None):
    return {
        "way": way,
        "slowdown": slowdown,
        "whole_peak_nbytes": peak,
        "rivals": rivals,
        "solver": solver,
    }


def test_a_plan_wins_loses_or_neither(load):
    rows = [
        row("checkpoint", 1.30, 600),
        row("plan for 600", 1.20, 590, ["checkpoint", "larger"], "auto"),
        row("compile", 1.00, 800),
        row("plan for 800", 1.03, 800, ["compile", "close", ""], "auto"),
        row("close", 1.02, 800),
        row("larger", 1.30, 580),
        row("fails", None, 100),
        row("plan for 100", 1.50, 100, ["fails"], "auto"),
        row("alone", 1.00, 90),
    ]
    beside = load("_beside")
    found = {one.rival: (one.wins, one.loses) for one in beside.compared(rows)}
    assert found == {
        "checkpoint": (True, False),
        "compile": (False, True),
        "close": (False, False),
        "larger": (False, True),  # the plan takes more than it
    }
    said = beside.claim(rows, 1000)
    assert "of 4 rivals: at 1 the plan is faster by more than 2 %, at 2 the rival is" in said
    assert said.endswith("down to 10.0 % of plain's peak, rivals to 9.0 %.")


@pytest.mark.parametrize("name", RESULT)
def test_the_claim_is_what_the_rows_say(load, name):
    result = json.loads(RESULT[name].read_text())
    plain = result["plain"]["static_nbytes"] + result["plain"]["peak_nbytes"]
    assert result["claim"] == load("_beside").claim(result["rows"], plain)


def test_the_page_is_the_one_that_its_generator_makes(load):
    report = load("report")
    results = sorted(map(report._read, RESULTS.glob("*.json")), key=report._place)
    assert (RESULTS / "README.md").read_text() == report.readme(results)


def test_the_page_of_benchmarks_counts_as_the_rows_do(load):
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    said = re.search(
        r"plans are more than 2 % slower than (\d+) of (\d+) rivals, and more than 2 % faster than "
        r"(\d+)\..*? plans are slower than (\d+) of (\d+) rivals, and faster than (\d+)\..*? "
        r"the peaks of all (\d+) plans were predicted within ([\d.]+) %",
        text,
    )
    found, off = [], []
    for path in RESULT.values():
        rows = json.loads(path.read_text())["rows"]
        beside = load("_beside").compared(rows)
        found += [
            sum(one.loses for one in beside),
            len(beside),
            sum(one.wins for one in beside),
        ]
        off += [r["whole_peak_nbytes"] / r["predicted_nbytes"] for r in rows if r["solver"]]
    *counts, within = said.groups()
    assert [int(count) for count in counts] == [*found, len(off)]
    worst = max(100 * abs(ratio - 1) for one in off for ratio in (one, 1 / one))
    assert 0 <= float(within) - worst < 0.1
