"""What the callbacks of trainers fit, and the line in which they say what became of the budget."""

import pytest
import torch
from torch import nn

import elbowroom as er
from elbowroom.fitting import Summary
from elbowroom.fitting.compiled import CompiledFitting
from elbowroom.integrations.budgeted import Budgeted, verdict
from elbowroom.runtime.attach import opener_of

MIB = 2**20


def told(last, highest, *, plain=None, predicted=None, setting="plan"):
    return Summary(
        model="Net",
        device="cpu",
        budget_nbytes=40 * MIB,
        plain_nbytes=plain,
        predicted_nbytes=predicted,
        last_nbytes=last,
        last_setting=setting,
        highest_nbytes=highest,
        setting=setting,
        slowdown=None,
        noise=None,
        exact=True,
        steps=9,
        lines=(),
    )


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        # The last batch of an epoch may be small: its peak says nothing about the others.
        (
            told(10 * MIB, 38 * MIB, plain=38 * MIB),
            "was kept: steps take up to 38.0 MiB (exact), plain training 38.0 MiB",
        ),
        (
            told(39 * MIB, 42 * MIB),
            "was kept: the last step took 39.0 MiB, an earlier one 42.0 MiB (exact)",
        ),
        (told(41 * MIB, 42 * MIB), "was NOT kept: the last measured step took 41.0 MiB (exact)"),
        (told(None, None), "no step was measured"),
        (
            told(None, None, predicted=20 * MIB, setting="compiled"),
            "planned inside torch.compile for 20.0 MiB (estimated, exact)",
        ),
    ],
)
def test_the_verdict_names_the_peak_of_the_largest_steps(summary, line):
    assert verdict(summary).endswith(line)


@pytest.mark.parametrize(
    ("settings", "is_planned"), [({"exact": True}, True), ({"solver": "greedy"}, False)]
)
def test_what_a_trainer_compiles_is_planned_inside_torch_compile(settings, is_planned):
    net = nn.Linear(4, 4)
    one = Budgeted("1 GiB", settings)
    one.begin(net, [torch.optim.SGD(net.parameters())], compiled=True)
    assert isinstance(opener_of(net), CompiledFitting) is is_planned
    assert one.summary is not None
    one.release()
    assert opener_of(net) is None
    with pytest.raises(er.errors.PlanError):
        er.summary(net)
