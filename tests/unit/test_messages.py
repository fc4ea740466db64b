"""Messages as somebody new reads them: what happened, in numbers, and what to do."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import elbowroom as er
from elbowroom.cli import app
from elbowroom.fitting import commands, messages
from elbowroom.fitting.commands import Line, say
from elbowroom.fitting.execute import execute
from elbowroom.fitting.options import FitOptions
from elbowroom.runtime.context import Context
from elbowroom.units import show_percent


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "0 %"),
        (4e-11, "less than 0.01 %"),
        (0.0004, "0.04 %"),
        (0.0123, "1.2 %"),
        (0.27, "27 %"),
        (12.0, "1200 %"),
    ],
)
def test_percents_are_rounded_as_a_person_would(share, shown):
    assert show_percent(share) == shown


def test_plan_of_a_script_says_which_two_commands_to_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print()\n")
    done = CliRunner().invoke(app, ["plan", str(script), "--budget", "1GiB"])
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "is a script" in said
    assert f'"elbowroom profile {script}" writes profile.json' in said
    assert "JSONDecodeError" not in said


@pytest.mark.parametrize(("codecs", "helps"), [(None, ""), (("dither",), "leave out codecs=")])
def test_who_has_allowed_codes_is_not_told_to_allow_them(codecs, helps):
    said = FitOptions(1000, exact=False, codecs=codecs).lossy_helps
    assert "exact=None" not in said
    assert said.startswith(helps)
    assert bool(said) is bool(helps)


def test_an_op_of_no_module_is_named_as_such_and_what_is_made_smaller_has_no_reason():
    model, x = (
        nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)),
        torch.ones(256, 256),
    )
    with er.saving("exact") as saved:
        loss = F.cross_entropy(model(x), torch.zeros(256, dtype=torch.long))
    loss.backward()
    lines = str(saved.ledger).splitlines()
    assert any("(no module)" in line and "cross_entropy" in line for line in lines)
    assert not any("rebuild" in line and "no exact action" in line for line in lines)


def test_fp8_that_replaces_nothing_says_nothing_of_products():
    assert "products are" not in str(er.nn.fp8(nn.Sequential(nn.ReLU())))
    assert "products are" in str(er.nn.fp8(nn.Sequential(nn.Linear(64, 64))))


def test_lines_name_functions_and_relaxations_name_attributes():
    """Commands are data without torch: what they name must be there when they are executed."""
    assert all(callable(getattr(messages, line.value)) for line in commands.Line)
    relaxed = [one for one in vars(commands).values() if isinstance(one, commands.Relax)]
    assert len(relaxed) == 7
    context = vars(Context())
    assert all(type(context[name]) is bool for one in relaxed for name, _ in one.changes)


@pytest.mark.parametrize(("noise", "level"), [(0.6, "WARNING"), (0.01, "INFO")])
def test_noise_that_cannot_be_watched_is_said_by_sizes(noise, level, caplog):
    caplog.set_level("INFO", "elbowroom")
    messages.say_unknown(FitOptions(1000), "the budget leaves no room to look", noise)
    (record,) = caplog.records
    assert record.levelname == level
    assert f"by the sizes of tensors alone, is {show_percent(noise)} of" in record.message


def test_a_measurement_is_said_once(caplog) -> None:
    """A plan that recomputes modules was measured three times, and said three times."""
    options = FitOptions(40 * 2**20)
    planner: Any = SimpleNamespace(options=options, said_last=None)
    with caplog.at_level(logging.INFO, "elbowroom"):
        for peak_nbytes in (50 * 2**20, 50 * 2**20 + 8, 60 * 2**20, 50 * 2**20):
            execute(planner, say(Line.MEASURED, plan=None, peak_nbytes=peak_nbytes))
    assert [line.split()[5] for line in caplog.messages] == ["50.0", "60.0", "50.0"]
