"""A forward that is refused names what plans took, where some were measured: a budget that does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from elbowroom.fitting.attempts import Attempts, Taken
from elbowroom.fitting.commands import Refuse, RefusePresets
from elbowroom.fitting.observations import ForwardEnded
from elbowroom.fitting.phase import Phase
from elbowroom.fitting.state import FitState
from elbowroom.fitting.transitions import advance

LITTLE, MUCH = Taken(100, "a plan that held"), Taken(150, "a plan that did not")
STATE = FitState(SimpleNamespace(budget_nbytes=100), "memory", "now", "largest")
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
