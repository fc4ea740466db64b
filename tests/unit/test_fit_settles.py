"""Whatever planners predict, a setting that `fit` settles on was measured, or more was said.

The state machine runs trainings that are made up: plans, predictions and true peaks are drawn, and
so are steps of another kind. Nothing here knows PyTorch.
"""

import random
from dataclasses import replace

import pytest

from elbowroom.fitting.commands import (
    Line,
    MakePlan,
    MakeRoomToWatch,
    MakeSmallest,
    PlanByForward,
    Raise,
    ReadMeter,
    Refuse,
    RefusePresets,
    Say,
    TakePlan,
    Then,
)
from elbowroom.fitting.observations import (
    CodesWithdrawn,
    CoResidentBytes,
    Fallbacks,
    ForwardEnded,
    ForwardProfiled,
    NoiseMeasured,
    NoPlan,
    NotRepeatable,
    OptionsChanged,
    OutputsHeld,
    PlanMade,
    PlanTaken,
    Rehearsed,
    RehearsedInVain,
    RoomToWatch,
    SmallestMade,
    StepBegan,
    UnexpectedStep,
)
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.transitions import advance
from fit_table.values import (
    AGAIN,
    ERROR,
    ESTIMATES,
    GIVEN,
    GRADIENTS,
    KEEPS,
    LOSSY,
    MEMORY,
    NEARLY,
    OF_FORWARD,
    ONE,
    OTHER,
    PLAN,
    TWO,
    UNSEEN,
    Profile,
    step,
    written,
)

PLANS = (PLAN, OTHER, AGAIN, LOSSY, KEEPS)
SAID = {Line.ABOVE, Line.OUTSIDE, Line.BLIND, Line.LARGER_STEP}


class Refused(Exception):
    pass


class Training:
    """A training whose settings have true peaks, which no planner knows.

    measured: the highest peak of each setting that a step was measured at
    """

    def __init__(self, seed: int, *, odd: float) -> None:
        self.draw, self.odd = random.Random(seed), odd
        given = GIVEN if self.draw.random() < 0.2 else None
        self.state = replace(UNSEEN, given=given)
        self.true = {name: self.draw.randrange(500, 1500) for name in self._names()}
        self.measured: dict[object, int] = {}
        self.said = False

    @staticmethod
    def _names():
        return (*range(6), GIVEN.name, *(one.plan.name for one in PLANS if one is not KEEPS))

    @property
    def setting(self):
        """A plan that changes nothing is the first preset."""
        plan = self.state.plan
        if plan is None:
            return self.state.preset
        return 0 if plan.changes_nothing else plan.name

    def tell(self, seen):
        self.state, commands = advance(self.state, seen)
        for command in commands:
            answer = self.answer(command)
            if answer is not None:
                self.tell(answer)

    def plan(self, profile=None):
        one, draw = self.draw.choice(PLANS), self.draw
        profile = Profile(peak=draw.randrange(600, 1400)) if profile is None else profile
        plan = replace(one.plan, peak=draw.randrange(600, 1000))
        return replace(one, plan=plan, candidate=replace(one.candidate, profile=profile))

    def answer(self, command):
        draw, state = self.draw, self.state
        match command:
            case Say(line):
                self.said |= line in SAID
            case Raise() | Refuse() | RefusePresets():
                raise Refused
            case Then(seen):
                return seen
            case MakePlan(again, fits):
                if draw.random() < 0.2:
                    return NoPlan(draw.choice((ERROR, NEARLY)), Fallbacks(), again)
                return PlanMade(self.plan(state.profile), MEMORY, fits)
            case TakePlan(one):
                return PlanTaken(one, MEMORY)
            case MakeSmallest():
                return SmallestMade(
                    *state.attempts.next_smallest(
                        lambda profile, again: self.plan(), lambda profile, again: 0
                    )
                )
            case PlanByForward():
                if draw.random() < 0.2:
                    return RehearsedInVain(ERROR)
                return Rehearsed(self.plan(), MEMORY, ESTIMATES)
            case MakeRoomToWatch():
                return RoomToWatch(draw.choice((None, LOSSY.plan)))
            case ReadMeter():
                return NoiseMeasured(None)
        return None

    def step(self, *, grew=False):
        """Run a step, of another kind now and then; return whether the next one is learned."""
        draw = self.draw
        odd = draw.random() < self.odd
        call = TWO if odd and draw.random() < 0.2 else ONE
        memory = GRADIENTS if odd and draw.random() < 0.2 else MEMORY
        self.tell(StepBegan(memory, call, grew=grew))
        if odd:
            kind = draw.randrange(6)
            if kind == 0:
                budget = draw.choice((700, 1000, 1300))
                self.tell(OptionsChanged(FitOptions(budget)))
            elif kind == 1:
                self.tell(CoResidentBytes(draw.randrange(60)))
            elif kind == 5:
                self.tell(OutputsHeld(draw.randrange(60)))
            elif kind == 2 and self.state.profile is not None:
                self.tell(NotRepeatable(self.state.profile))
            elif kind == 3:
                self.tell(UnexpectedStep(900))
            elif kind == 4 and self.state.profile is not None:
                self.tell(CodesWithdrawn(self.state.profile))
        measures = self.state.wants_measuring
        writes = self.state.wants_writing
        if measures and self.state.may_rehearse and draw.random() < 0.3:
            self.tell(ForwardProfiled(OF_FORWARD))
        self.tell(ForwardEnded(self.state.preset, impossible=False))
        if measures:
            self.measure(call, writes=writes)
        return odd and draw.random() < 0.2

    def measure(self, call, *, writes):
        draw = self.draw
        peak = 100 + (self.true[self.setting] - 100) * call.numel // ONE.numel
        within = draw.choice((None, 0, 1, 4))
        seen = written(Profile(peak=peak)) if writes else step(peak)
        if draw.random() < self.odd / 2:
            seen = replace(seen, peak=None, seen=None, profile=None)
        else:
            known = self.measured.get(self.setting, 0)
            self.measured[self.setting] = max(known, peak)
        climbed = draw.random() < self.odd / 2
        seen = replace(seen, climbed=climbed, watched=draw.random() < 0.5)
        self.tell(replace(seen, preset=self.state.preset, preset_within=lambda _: within))


@pytest.mark.parametrize("odd", [0.0, 0.1, 0.4])
def test_what_is_settled_was_measured(odd):
    settled = 0
    for seed in range(50):
        training, grew = Training(seed, odd=odd), False
        try:
            for _ in range(30):
                grew = training.step(grew=grew)
                state = training.state
                if training.said or not state.settled or state.unexpected.is_last:
                    continue
                settled += 1
                peak = training.measured.get(training.setting)
                assert peak is not None, (seed, training.setting)
                assert peak <= state.options.budget_nbytes, (seed, training.setting, peak)
        except Refused:
            continue
    assert settled > 25
