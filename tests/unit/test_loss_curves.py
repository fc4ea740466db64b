"""The loss-curve benchmark: its quick form runs and resumes; its verdict follows from the runs."""

import importlib
import json
from math import sqrt
from pathlib import Path

import pytest

from quick import quick

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "loss_curves.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("loss_curves")


def test_its_quick_form_runs_and_goes_on_where_it_stood(script, tmp_path, monkeypatch):
    path = tmp_path / "curves.json"
    quick(script, monkeypatch, path)
    result = json.loads(path.read_text())
    assert len(result["runs"]) == 2 * 2 * 2 * len(script.ARMS)
    assert len(result["table"]["rows"]) == 2 * 2 * len(script.ARMS)
    assert not any(line["met"] for line in result["targets"])  # two seeds prove nothing
    by = {row["arm"]: row for row in result["rows"] if row["network"] == "gpt"}
    assert by["plain"]["nbytes"] > by["coat"]["nbytes"] > by["int4x2"]["nbytes"]
    assert by["24-bit"]["nbytes"] == pytest.approx(by["fp32"]["nbytes"] - 3, abs=0.01)

    known = result["runs"].pop("gpt 0.95 int8 1")
    result["runs"]["gpt 0.95 int8 0"]["held_out"] = 7.0  # as only what was done before can be
    path.write_text(json.dumps(result))
    quick(script, monkeypatch, path)
    again = json.loads(path.read_text())["runs"]
    assert again["gpt 0.95 int8 1"] == known
    assert again["gpt 0.95 int8 0"]["held_out"] == 7.0

    with pytest.raises(SystemExit, match=r"(?s)threads: 1, now 2.*--fresh"):
        quick(script, monkeypatch, path, "--threads", "2")


def runs(script, **above: list[float]) -> dict:
    """Every arm's runs, a seed each, that many nats above plain's."""
    base = [3.0, 3.1, 2.9, 3.2, 3.05]

    def run(loss: float) -> dict:
        return {"final": loss, "held_out": loss + 0.5, "nbytes": 16.0, "curve": [loss]}

    return {
        arm: {
            str(seed): run(loss + d)
            for seed, (loss, d) in enumerate(zip(base, above.get(arm, [0.0] * 5), strict=True))
        }
        for arm in script.ARMS
    }


def test_within_noise_is_a_bound_against_the_spread_of_other_batch_orders(script):
    noisy = [0.02, -0.02, 0.02, -0.02, 0.02]
    close, far = [0.001, -0.001, 0.002, 0.0, 0.001], [0.02, 0.021, 0.019, 0.02, 0.022]
    wide = [0.05, -0.05, 0.05, -0.05, 0.0]  # no worse on average, but who knows
    made = script.rows_of(runs(script, order=noisy, coat=close, int8=far, sr=wide))
    by = {row["arm"]: row for row in made}
    assert by["coat"]["noise"]["held_out"] == pytest.approx(0.02 / sqrt(2))
    assert by["coat"]["held_out_mean"] == pytest.approx(0.0006)
    # sd 0.00114, t(0.95, 4) = 2.132
    assert by["coat"]["held_out_bound"] == pytest.approx(
        0.0006 + 2.132 * 0.00114 / sqrt(5), abs=1e-5
    )
    verdicts = [by[arm]["within"] for arm in ("fp32", "coat", "int8", "sr")]
    assert verdicts == ["yes", "yes", "no", "open"]
    assert "within" not in by["plain"]
    assert "within" not in by["order"]


def test_a_goal_needs_every_network_and_five_seeds(script):
    row = {"network": "gpt", "beta2": 0.95, "n": 5, "within": "yes"}
    row["noise"] = {"final": 0.01, "held_out": 0.01}
    row |= {"final_bound": 0.001, "held_out_bound": 0.002}
    assert script.goal("int8", [row, row])["met"]
    assert not script.goal("int8", [row, row | {"n": 4}])["met"]
    for verdict in ("no", "open"):
        assert not script.goal("int8", [row, row | {"within": verdict}])["met"]
    unfinished = {key: value for key, value in row.items() if key != "within"}
    assert not script.goal("int8", [row, unfinished])["met"]
