"""What `elbowroom run` says last, and ends with, where a budget was not kept."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from elbowroom.cli.outcome import say_not_kept, say_not_measured
from elbowroom.cli.run import _ScriptRun
from elbowroom.fitting import Summary
from elbowroom.fitting.messages import say_measured
from elbowroom.fitting.options import FitOptions
from elbowroom.runtime import compiler

MIB = 2**20


def told(last_nbytes: int | None) -> Summary:
    return Summary(
        model="Net",
        device="cpu",
        budget_nbytes=8 * MIB,
        plain_nbytes=None,
        predicted_nbytes=None,
        last_nbytes=last_nbytes,
        last_setting="plan",
        highest_nbytes=9 * MIB,
        setting="plan",
        slowdown=None,
        noise=None,
        exact=True,
        steps=9,
        lines=(),
    )


def test_a_model_of_which_no_step_was_measured_is_named_and_is_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert say_not_measured([told(8 * MIB), told(None)]) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "elbowroom: no step of Net was measured, so whether the budget was kept is not known"
    )
    assert not say_not_measured([told(8 * MIB), replace(told(None), setting="compiled")])
    assert not capsys.readouterr().err


def test_a_last_step_above_the_budget_is_said_and_is_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert say_not_kept(0, told(8 * MIB + 1)) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "the budget 8.00 MiB was not kept" in said
    assert "Give --budget 8.001MiB, or halve the batch" in said


@pytest.mark.parametrize(("code", "last_nbytes"), [(0, 8 * MIB), (0, None), (7, 9 * MIB)])
def test_a_budget_that_was_kept_and_a_script_that_failed_keep_the_scripts_code(
    code: int, last_nbytes: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say_not_kept(code, told(last_nbytes)) == code
    assert capsys.readouterr() == ("", "")


def test_an_optimizer_that_the_script_makes_late_is_counted(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import torch\n"
        "from elbowroom.runtime.attach import opener_of\n"
        "model = torch.nn.Linear(64, 64)\n"
        "first = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.ones(2, 64)).sum().backward()\n"
        "late = torch.optim.AdamW(model.parameters())\n"
        "other = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())\n"
        "assert opener_of(model).model_state.optimizers() == [first, late]\n"
    )
    assert _ScriptRun("64MiB", True, None, None).of(script, []) == 0


def test_exact_is_said_against_eager_where_compiled_code_ran_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def remark() -> str:
        return next(row[3] for row in told(MIB).rows() if row[0] == "exact")

    monkeypatch.setattr(compiler, "_said", False)
    assert remark() == "no bit of a gradient changed"
    monkeypatch.setattr(compiler, "_said", True)
    assert remark().startswith("no bit of a gradient changed against eager PyTorch")


@pytest.mark.parametrize("over", [False, True])
def test_a_measured_step_above_the_budget_is_called_so(over, caplog) -> None:
    with caplog.at_level(logging.INFO, "elbowroom"):
        say_measured(FitOptions(8 * MIB), None, 9 * MIB if over else 8 * MIB)
    (record,) = caplog.records
    assert record.levelname == ("WARNING" if over else "INFO")
    peak = "9.00 MiB, above the budget" if over else "8.00 MiB"
    assert record.getMessage() == f"budget 8.00 MiB: peak measured {peak}"
