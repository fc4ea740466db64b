"""The benchmark of settled steps: its quick form runs; its verdict follows from the rows."""

import importlib
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    threads = torch.get_num_threads()
    yield importlib.import_module("steady_state")
    torch.set_num_threads(threads)


def test_its_quick_form_runs_and_a_mode_that_cannot_is_a_row_that_says_so(
    script, tmp_path, monkeypatch
):
    path = tmp_path / "steady.json"
    monkeypatch.setattr("sys.argv", ["steady_state.py", "--quick", "--out", str(path)])
    script.main()
    result = json.loads(path.read_text())
    rows = {(row["net"], row["mode"]): row for row in result["rows"]}
    assert len(rows) == 3 * 8 + 4
    assert all(len(line) == len(result["table"]["head"]) for line in result["table"]["rows"])
    for row in rows.values():
        assert {"why_not", "us_call", "us_parameter"} & row.keys()
    # No exact action fits a ReLU's output that the next linear saves, too.
    assert "exact actions" in rows["linear stack", "fit, exact half"]["why_not"]
    assert rows["transformer", "fit, exact half"]["held"] < 0.95
    assert rows["transformer", "saving, dither"]["held"] < 0.2
    assert rows["transformer", "fit, idle"]["held"] == 1
    assert "us_call_alone" in rows["transformer", "fit, idle"]
    assert rows["conv stack", "hooks"]["packs"] == 2 * 9 + 1  # 2 + 6 + 1 a block, and the loss


def test_some_rows_are_shown_and_replace_no_result(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["steady_state.py", "--quick", "--only", "conv stack, hooks"])
    monkeypatch.setattr(script, "finish", None)
    script.main()
    assert capsys.readouterr().out.count("| conv stack") == 1


def test_own_kernels_are_what_plain_does_not_run(script):
    class Doubling:
        def __init__(self, times):
            self.times = times

        def __call__(self):
            for _ in range(self.times):
                torch.ones(4).view(2, 2).mul_(2)

    once, thrice = (script._recorded(Doubling(times)) for times in (1, 3))
    assert {key[0]: len(calls) for key, calls in thrice.found.items()} == {
        "aten.ones.default": 3,
        "aten.mul_.Tensor": 3,
    }
    assert script._kernels_s(once, once, 2) == 0
    assert script._kernels_s(thrice, once, 2) > 0 > script._kernels_s(once, thrice, 2)


def test_a_step_that_never_enters_as_many_functions_has_not_settled(script):
    class Growing(script.Step):
        def __call__(self):
            self.steps = getattr(self, "steps", 0) + 1
            for _ in range(100 * self.steps):
                _nothing()

    restless = Growing(None, None)
    mode = script.Mode("fit", nullcontext, settles=True)
    script._warm(mode, restless)
    assert mode.notes == [f"did not settle in {script.MAX_WARM_UP} steps"]
    assert restless.steps == script.MAX_WARM_UP


def _nothing() -> None:
    pass


def test_a_goal_is_met_by_rows_that_keep_to_it_and_whose_plan_was_followed(script):
    def met(**changes):
        row = {"net": "net", "mode": "fit, exact half", "us_pack_beyond": 5.0, "notes": []}
        goal = script.GOALS["exact"]._asdict()
        (line,) = script._targets([row | {"goal": goal} | changes])
        return line["met"]

    assert met()
    assert not met(us_pack_beyond=6.5)
    assert not met(notes=["did not settle in 40 steps"])
