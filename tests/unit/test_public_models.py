"""The benchmark of public models: its quick form runs; its verdict follows from the rows."""

import importlib
import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from quick import quick

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "public_models.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    with warnings.catch_warnings():  # of torch's own inductor, which a rival needs
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("public_models")


def test_its_quick_form_runs_and_a_model_that_cannot_is_a_row_that_says_so(
    script, tmp_path, monkeypatch
):
    path = tmp_path / "public.json"
    more = ("--only", "tiny_transformer,tiny_absent", "--lossy", "dither levels=4")
    quick(script, monkeypatch, path, *more)
    result = json.loads(path.read_text())
    row, absent = result["rows"]
    assert row["plain"]["same_twice"]
    assert row["exact"]["bit_equal"]
    assert row["exact"]["gerr2"] == 0
    assert row["dither levels=4"]["saved_less"] > row["exact"]["saved_less"] > 1
    assert 0 < row["dither levels=4"]["gerr2"] < 1
    assert row["checkpoint"]["bit_equal"]
    assert row["checkpoint"]["saved_less"] > 2
    assert row["fit"].keys() == {"70%", "40%"}
    assert {fit["outcome"] for fit in row["fit"].values()} <= {"held", "refused"}
    assert "error" not in row
    assert "not installed" in absent["error"]
    assert all(len(line) == len(result["table"]["head"]) for line in result["table"]["rows"])


def test_one_that_takes_too_long_keeps_what_is_known(script, tmp_path, monkeypatch):
    path = tmp_path / "public.json"
    quick(script, monkeypatch, path, "--only", "tiny_transformer", "--limit-s", "0.5")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["error"] == "more than 0 s, in start"


def test_an_unknown_name_is_said_with_those_that_exist(script, tmp_path, monkeypatch, capsys):
    out = str(tmp_path / "public.json")
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--quick", "--out", out, "--only", "lama"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert "no model lama; there are tiny_transformer" in capsys.readouterr().err


def test_blocks_are_those_of_the_longest_list_and_of_its_like(script):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    model = nn.Module()
    model.encoder = nn.ModuleList(Block() for _ in range(3))
    model.decoder = nn.ModuleList(Block() for _ in range(2))
    model.head = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert set(script.blocks(model)) == {*model.encoder, *model.decoder}
    assert script.blocks(nn.Linear(2, 2)) == []


def made(script, **changes):
    way = {"bit_equal": True, "saved_less": 10.0, "gerr2": 0.01, "time": {"ratio": 1.1}}
    fit = {
        "outcome": "held",
        "settled_peak": 0.99,
        "first_peak": 1.0,
        "settling_steps": 7.0,
        "time": {"ratio": 1.1},
    }
    plain = {"saved_nbytes": 100, "room_nbytes": 120}
    row = {"name": "llama", "transformer": True, "plain": plain, "exact": way, "s": way}
    return row | {"fit": {"70%": fit, "40%": fit}} | changes


def verdict(script, monkeypatch, rows):
    monkeypatch.setattr(script, "_lossy", lambda setting: torch.nn.Identity())
    monkeypatch.setattr(torch.nn.Identity, "name", "s", raising=False)
    return {line["target"]: line["met"] for line in script.goals(rows, ["s"], fits=True)}


def test_targets_are_met_by_rows_that_keep_to_them_and_by_no_others(script, monkeypatch):
    good = made(script)
    assert all(verdict(script, monkeypatch, [good]).values())
    cases = {
        "gives plain's bits": {"exact": {**good["exact"], "bit_equal": False}},
        "on every transformer": {"exact": {**good["exact"], "saved_less": 1.5}},
        "no step slower": {"exact": {**good["exact"], "time": {"ratio": 1.2}}},
        ">= 8x below plain": {"s": {**good["s"], "saved_less": 7.0}},
        "whose room is activations": {"s": {**good["s"], "saved_less": 3.0}},
        "on every one": {"s": {**good["s"], "gerr2": 0.06}},
        "holds 70%": {"fit": {**good["fit"], "70%": {"outcome": "refused"}}},
        "holds 40%": {"fit": {**good["fit"], "40%": {"outcome": "died"}}},
    }
    for target, change in cases.items():
        met = verdict(script, monkeypatch, [made(script, **change)])
        assert [target in line for line, is_met in met.items() if not is_met].count(True) == 1
    failed = {"name": "broken", "transformer": False, "error": "killed by signal 11, in exact"}
    met = verdict(script, monkeypatch, [good, failed])
    assert not met["er.saving() gives plain's bits on all"]
