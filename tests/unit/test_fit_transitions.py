"""The state machine of a fit, row by row: a state, what is seen, the next state, what is asked for.

Nothing here knows PyTorch: plans, profiles and calls are plain values that stand in for them.
"""

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

import elbowroom
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.options import MemoryState
from elbowroom.fitting.parts import UnexpectedSteps, Watched
from elbowroom.fitting.phase import FOLLOWS, Phase
from elbowroom.fitting.state import FitState, ReplacedState
from elbowroom.fitting.transitions import advance
from fit_table import begun, measured, planned, verified
from fit_table.values import (
    AGAIN,
    CORRECTING,
    FRESH,
    GIVENS,
    GUESSED,
    IDLE,
    KNOWN,
    LAST,
    ONE,
    SETTLED,
    SMALLEST,
    TWO,
    VERIFYING,
    WATCHING,
    WRITING,
    Call,
    P,
    following,
)

ROWS = begun.ROWS | measured.ROWS | verified.ROWS | planned.ROWS


@pytest.mark.parametrize("name", ROWS)
def test_one_row(name):
    before, seen, after, asks = ROWS[name]
    expected = after if isinstance(after, FitState) else replace(before, **after)
    state, commands = advance(before, seen)
    assert state == expected
    assert commands == asks


def test_the_picture_of_the_phases_is_the_table():
    """Each phase that may follow another does so in a row, and no row does anything else."""
    moved = {(row.before.phase, advance(row.before, row.seen)[0].phase) for row in ROWS.values()}
    drawn = {(phase, after) for phase, others in FOLLOWS.items() for after in others}
    assert {(phase, after) for phase, after in moved if phase is not after} == drawn


STEPS = {
    P.GUESSING: (FRESH, True, False),
    P.WRITING: (WRITING, True, True),
    P.IDLE: (IDLE, False, True),
    P.GIVEN: (GIVENS, True, False),
    P.CORRECTING: (CORRECTING, True, True),
    P.VERIFYING: (VERIFYING, True, False),
    P.SMALLEST: (SMALLEST, True, False),
    P.WATCHING: (WATCHING, True, False),
    P.LAST_RESORT: (LAST, True, False),
    P.SETTLED: (SETTLED, False, False),
}


@pytest.mark.parametrize("phase", Phase)
def test_which_steps_are_measured_and_which_are_written_down(phase):
    state, measured, writes = STEPS[phase]
    assert state.phase is phase
    assert state.wants_measuring is measured
    assert not measured or state.wants_writing is writes
    assert state.may_rehearse is (phase in {P.GUESSING, P.WRITING, P.IDLE})


@pytest.mark.parametrize(
    ("state", "measured", "writes"),
    [
        (replace(FRESH, memory=MemoryState(100, 0, 9)), True, True),  # it makes states
        (replace(LAST, memory=MemoryState(100, 0, 9)), True, False),
        (replace(GIVENS, memory=MemoryState(100, 0, 9)), True, False),
        (replace(IDLE, now=TWO), True, True),  # a larger call than nothing need be done for
        (GUESSED, True, True),  # which ends all guessing
        (replace(GUESSED, now=TWO, largest=TWO), True, True),
        (replace(GUESSED, memory=MemoryState(100, 0, 9)), True, True),
        (replace(GUESSED, phase=P.SMALLEST), True, True),
        (replace(following(AGAIN), from_rehearsal=True), True, False),  # a module runs again
        (replace(WATCHING, now=TWO, largest=TWO), True, False),  # profiles take more than plans
        (replace(VERIFYING, now=TWO, largest=TWO), True, True),
        (replace(VERIFYING, largest=Call(10)), True, False),
        (replace(VERIFYING, now=Call(12), largest=TWO), True, True),
        (replace(VERIFYING, largest=Call(11)), False, False),  # too small to verify a plan by
        (replace(VERIFYING, gradient_nbytes=11), False, False),  # others begin with gradients
        (replace(VERIFYING, gradient_nbytes=10), True, False),
        (replace(VERIFYING, gradient_nbytes=11, skipped_steps=8), False, False),
        (replace(VERIFYING, gradient_nbytes=11, skipped_steps=9), True, False),
        (replace(FRESH, gradient_nbytes=11), True, False),  # nothing is known without it
        (replace(WATCHING, gradient_nbytes=11), True, False),
        (replace(WATCHING, largest=TWO, only_largest=True), True, False),
        (replace(FRESH, largest=TWO, only_largest=True), False, False),
        (replace(LAST, largest=TWO, only_largest=True), False, False),
    ],
)
def test_what_else_decides_about_measuring(state, measured, writes):
    assert state.wants_measuring is measured
    assert not measured or state.wants_writing is writes


def test_a_fresh_state_knows_what_no_measurement_has_told():
    """A reset is a new value: of what was learned only what outlives a reset is left."""
    learned = replace(
        VERIFYING,
        unexpected=UnexpectedSteps(count=2, varies=True, is_last=True),
        only_largest=True,
        is_recurrent=True,
        small_nbytes=9,
        before=ReplacedState(SETTLED, 2),
        headroom=Headroom(5, 6, 7),
        infeasible=True,
        watched=Watched(is_done=True),
    )
    kept = {
        "unexpected": UnexpectedSteps(count=2, varies=True),
        "only_largest": True,
        "is_recurrent": True,
    }
    kept["small_nbytes"] = 9
    known = {"before": ReplacedState(SETTLED, 2), "headroom": Headroom(guess_nbytes=6)}
    assert learned.fresh() == replace(FRESH, **kept, **known)


def test_a_call_is_scaled_only_by_a_profile_that_is_known():
    assert replace(KNOWN, largest=TWO).ratio == 2
    assert replace(FRESH, profiled=ONE, largest=TWO).ratio == 1


def test_a_state_is_a_value():
    with pytest.raises(FrozenInstanceError):
        FRESH.phase = P.SETTLED
    assert replace(FRESH, unexpected=UnexpectedSteps(count=1)) != FRESH


def test_the_machine_runs_where_there_is_no_torch():
    code = """
import sys, types
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is not to be asked for")
sys.meta_path.insert(0, NoTorch())
for name in ("elbowroom", "elbowroom.fitting"):
    package = types.ModuleType(name)
    package.__path__ = ["/".join([sys.argv[1], *name.split(".")[1:]])]
    sys.modules[name] = package
import elbowroom.fitting.transitions
assert "torch" not in sys.modules
"""
    where = str(Path(elbowroom.__file__).parent)
    subprocess.run([sys.executable, "-c", code, where], check=True)


def test_a_plan_for_another_size_is_no_ground_to_refuse():
    """A plan of its own may hold less, as a graph with more edges and fewer nodes shows."""
    assert VERIFYING.may_refuse
    assert not replace(VERIFYING, now=ONE, largest=TWO).may_refuse
    assert not replace(VERIFYING, largest=TWO, now=TWO).may_refuse, (
        "its profile is of a smaller one"
    )
    assert replace(FRESH, now=ONE, largest=TWO).may_refuse, "nothing was planned for another one"


def test_a_plan_is_outgrown_only_if_it_was_neither_measured_nor_given():
    assert GUESSED.may_be_outgrown
    assert not replace(GUESSED, attempts=LAST.attempts).may_be_outgrown
    assert not replace(GUESSED, has_fit=True).may_be_outgrown, "it is an exception"
    assert not GIVENS.may_be_outgrown
    assert not FRESH.may_be_outgrown
