"""The end-to-end benchmark: its quick form runs and resumes; a promise needs bytes and losses."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from quick import quick

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "end_to_end.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("end_to_end")


def test_its_quick_form_runs_and_goes_on_where_it_stood(script, tmp_path, monkeypatch):
    path = tmp_path / "whole.json"
    quick(script, monkeypatch, path)
    result = json.loads(path.read_text())
    by = {row["arm"]: row for row in result["rows"]}
    assert by.keys() == script.ARMS.keys()
    assert len(result["table"]["rows"]) == len(script.ARMS)
    for name, arm in script.ARMS.items():  # saving less or releasing changes no bit
        assert arm.twin is None or by[name]["same_bits"] is True, name
    for name, nbytes in (("plain", 16.0), ("masters", 16.0), ("residual", 7.1), ("sr, coat", 6.1)):
        assert sum(by[name]["parts"]) == pytest.approx(nbytes, abs=0.02)
    assert not any("at equal loss" in line["target"] and line["met"] for line in result["targets"])

    known = result["found"].pop("residual")
    result["found"]["masters"]["peak_nbytes"] = 7  # as only what was done before can be
    path.write_text(json.dumps(result))
    quick(script, monkeypatch, path)
    again = json.loads(path.read_text())
    assert again["found"]["residual"]["parts"] == known["parts"]
    assert again["found"]["masters"]["peak_nbytes"] == 7
    assert again["runs"] == result["runs"]


def promised(script, **changes) -> list[bool]:
    row = {"arm": "residual, coat", "parts": [2, 0, 3.05, 2], "same_bits": None, "n": 3}
    row |= {"line_less": [2.2, 2.1], "peak_less": [3.0, 2.6], "within": "yes"}
    row |= {"noise": {"final": 0.01, "held_out": 0.01}, "final_bound": 0.001}
    row |= {"held_out_bound": 0.001, **changes}
    return [line["met"] for line in script.goals([row], "residual, coat")]


def test_the_whole_must_be_half_at_both_loads_and_at_equal_loss(script):
    assert promised(script) == [True, True]
    assert promised(script, parts=[2, 0, 3.2, 2]) == [False, True]
    for change in (
        {"line_less": [1.9, 2.1]},
        {"peak_less": [3.0]},  # masters were not measured
        {"within": "open"},
        {"n": 2},
        {"same_bits": False},
    ):
        assert promised(script, **change) == [True, False], change


def test_masters_step_as_float32_weights_do(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    llama = importlib.import_module("_llama")
    wide = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    plain = torch.nn.Parameter(wide.clone())
    narrow = torch.nn.Parameter(wide.bfloat16())
    torch_adamw = torch.optim.AdamW([plain], fused=True, **llama.RECIPE)
    masters = llama.MasterAdamW([narrow], **llama.RECIPE)
    for _ in range(3):
        narrow.grad = torch.ones_like(narrow)
        plain.grad = torch.ones_like(plain)
        torch_adamw.step()
        masters.step()
    assert torch.equal(masters.param_groups[0]["params"][0], plain)
    assert torch.equal(narrow, plain.bfloat16())
    assert narrow.grad is None
