"""A forward that is refused names what plans took, where some were measured: a budget that does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from elbowroom.fitting.attempts import Attempts, Taken
from elbowroom.fitting.commands import Refuse, RefusePresets
from elbowroom.fitting.observations import ForwardEnded
from elbowroom.fitting.phase import Phase
from elbowroom.fitting.refusals import measured_refusal, refusal
from elbowroom.fitting.state import FitState
from elbowroom.fitting.transitions import advance
from elbowroom.units import budget_argument

LITTLE, MUCH = Taken(100, "a plan that held"), Taken(150, "a plan that did not")
STATE = FitState(SimpleNamespace(budget_nbytes=100, noise=None), "memory", "now", "largest")
ENDED = ForwardEnded(preset=5, impossible=True, saving="saving")


@pytest.mark.parametrize(
    ("taken", "command"),
    # BLOOM at 40 % was told the sum of what presets hold and a plan's transients, which did not do.
    [
        ((MUCH,), Refuse(MUCH)),
        ((), RefusePresets("saving")),
        ((LITTLE, MUCH), RefusePresets("saving")),
    ],
)
def test_a_forward_that_is_refused_names_what_a_plan_took(taken, command):
    state = replace(STATE, phase=Phase.VERIFYING, attempts=Attempts(taken=taken))
    assert advance(state, ENDED) == (state, (command,))


@pytest.mark.parametrize("budget_nbytes", [90, 130, 170])
def test_a_budget_is_said_to_be_below_what_a_step_needs_only_if_it_is(budget_nbytes):
    """A GAN was told that 15 MiB are below the 13.8 that it needs, and to give these."""
    saving = SimpleNamespace(
        impossible=False, storages=(), largest_nbytes=0, ledger=SimpleNamespace(max_nbytes=60)
    )
    preset = SimpleNamespace(name="exact", exact=True)
    options = SimpleNamespace(budget_nbytes=budget_nbytes, presets=(preset,), exact=True)
    states = SimpleNamespace(lossy_helps=lambda: "")
    model_state = SimpleNamespace(weight_nbytes=40, states=states)
    memory = SimpleNamespace(static_nbytes=70, unallocated_nbytes=0)
    error = refusal(saving, options, model_state, memory, 30)
    assert error.least_nbytes > budget_nbytes
    assert error.least_nbytes == {90: 100, 130: 160, 170: 171}[budget_nbytes]
    assert f"give {budget_argument(error.least_nbytes)}" in str(error)


@pytest.mark.parametrize("held_nbytes", [20, 60])
@pytest.mark.parametrize("static_nbytes", [70, 110])
def test_the_parts_of_a_measured_peak_add_up_to_it(static_nbytes, held_nbytes):
    """A GAN was told that 39.3 MiB are 4.26 of weights, 15.6 of gradients and 25.2 of saved."""
    options = SimpleNamespace(budget_nbytes=90, offload=None, noise=None)
    model_state, memory = (
        SimpleNamespace(weight_nbytes=40),
        SimpleNamespace(static_nbytes=static_nbytes),
    )
    plan = SimpleNamespace(held_nbytes=held_nbytes, exact=True)
    error = measured_refusal(options, model_state, memory, plan, 100, "")
    assert sum(error.parts.values()) == error.least_nbytes == 100
    assert min(error.parts.values()) >= 0
