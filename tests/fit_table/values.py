"""Plans, profiles, calls and states that rows are made of; none of them knows PyTorch."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.attempts import Attempts, Candidate, Chosen, KnownStep, Smallest, Taken
from elbowroom.fitting.commands import (
    BeginPlan,
    ForgetScripts,
    Line,
    MakePlan,
    say,
)
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.observations import (
    Fallbacks,
    StepMeasured,
)
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.parts import Watched
from elbowroom.fitting.phase import Phase
from elbowroom.fitting.state import FitState

P = Phase


@dataclass(frozen=True)
class Call:
    """A signature of one dimension."""

    numel: int
    structure: str | None = "call"

    def covers(self, other):
        return self.numel >= other.numel

    def joined(self, other):
        return Call(max(self.numel, other.numel))


@dataclass(frozen=True)
class Profile:
    static: int = 100
    peak: int = 1200
    is_recurrent: bool = False
    small_nbytes: int = 0
    noise: Any = None
    most_noise: float = 12.0
    backward_peak: int = 700

    def shifted(self, nbytes):
        return replace(self, static=self.static + nbytes, peak=self.peak + nbytes)

    def with_outputs(self, nbytes):
        """Return the step with more in forward, where its peak is taken to be."""
        return replace(self, peak=self.peak + nbytes)

    @property
    def followed_peak(self):
        return self.peak

    def peak_with(self, new_nbytes):
        return self.peak + new_nbytes


@dataclass(frozen=True)
class Plan:
    """Of the budget 1000: it holds 300 bytes, and leaves 500 for what passes."""

    name: str
    peak: int = 900
    profiled_peak: int = 0
    held_nbytes: int = 300
    largest_nbytes: int = 10
    exact: bool = True
    is_lossy: bool = False
    recompute: frozenset[str] = frozenset()
    changes_nothing: bool = False
    watched: int = 0
    seconds: float = 1.2
    plain_seconds: float = 1.0
    noise: float = 0.0
    sites: dict[Any, Any] = field(default_factory=dict)


def chosen(plan, profile=Profile()):
    return Chosen(Candidate("fp32", profile), plan)


OPTIONS, MEMORY, ONE, TWO = FitOptions(1000), MemoryState(100), Call(8), Call(16)
GRADIENTS = MemoryState(250, gradient_nbytes=150)  # those of micro-batches before
PLAN, OTHER = chosen(Plan("one")), chosen(Plan("other"))
HIGH = chosen(Plan("high", peak=1150))  # predicted above the budget, and followed to be measured
AGAIN = chosen(Plan("again", recompute=frozenset({"block"})))
LOSSY = chosen(Plan("lossy", exact=False, is_lossy=True))
KEEPS = chosen(Plan("keeps", changes_nothing=True))
WHOLE = chosen(Plan("whole", profiled_peak=1101))  # a profiled step reads nothing as it is held
GIVEN, WATCHED = Plan("given"), Plan("watched", exact=False, is_lossy=True, watched=4)
LIMITED = FitOptions(1000, noise=0.1)
ERROR = BudgetTooSmall("no plan fits", least_nbytes=1100)
NEARLY = BudgetTooSmall("no plan fits", least_nbytes=1099)
FORGET, BEGIN, MAKE = ForgetScripts(), BeginPlan(), MakePlan()
MORE = Fallbacks(blamed_classes=True, layers=True)

UNSEEN = FitState(
    OPTIONS, MEMORY, Call(0, None), Call(0, None)
)  # before the first step of its kind
FRESH = FitState(OPTIONS, MEMORY, ONE, ONE)
WRITING = replace(FRESH, phase=P.WRITING, headroom=Headroom(400))
GIVENS = replace(FRESH, phase=P.GIVEN, plan=GIVEN, given=GIVEN, headroom=Headroom(500))
CORRECTING = replace(GIVENS, phase=P.CORRECTING, given=None, from_rehearsal=True)
KNOWN = replace(WRITING, profile=Profile(), profiled=ONE, attempts=Attempts().knowing(Profile()))
IDLE = replace(KNOWN, phase=P.IDLE, preset=0)


def following(one, phase=P.VERIFYING, **more):
    """Return the state in which a plan has just been made and begun."""
    plan = one.plan
    headroom = Headroom(plan.peak - 100 - plan.held_nbytes)
    return replace(KNOWN, phase=phase, plan=plan, chosen=one, headroom=headroom, **more)


VERIFYING = following(PLAN)
GUESSED = following(PLAN, from_rehearsal=True, was_rehearsed=True, attempts=Attempts())
WATCHING = following(LOSSY, P.WATCHING, watched=Watched(is_done=True), has_fit=True)
SETTLED = following(PLAN, P.SETTLED, has_fit=True)
MUCH = Taken(1100, PLAN)  # a plan that did not hold
TRIED = Attempts(taken=(MUCH,))
SMALLEST = following(OTHER, P.SMALLEST, attempts=TRIED)
LAST = replace(KNOWN, phase=P.LAST_RESORT, preset=5, attempts=TRIED, was_rehearsed=True)


def step(peak, **more):
    """Return a measured step that held 300 bytes, 350 at most."""
    seen = {"after_nbytes": 300, "max_nbytes": 350, "before_nbytes": 800, "preset": 1}
    return StepMeasured(MEMORY, 100, peak, **(seen | more))


def written(profile=Profile(), **more):
    return step(profile.peak, writes=True, seen=profile, profile=profile, **more)


def said(one, peak_nbytes):
    return say(Line.MEASURED, plan=one.plan, peak_nbytes=peak_nbytes)


def above(peak_nbytes):
    """Return the line about a step at a preset."""
    return say(Line.MEASURED, plan=None, peak_nbytes=peak_nbytes)


def said_given(peak_nbytes):
    return say(Line.MEASURED, plan=GIVEN, peak_nbytes=peak_nbytes)


class ForwardProfile(NamedTuple):
    profile: Profile


class Row(NamedTuple):
    """after: the state, or what changes in it."""

    before: FitState
    seen: Any
    after: Any
    asks: tuple[Any, ...] = ()


OF_FORWARD = ForwardProfile(Profile(is_recurrent=True, small_nbytes=60))
ESTIMATES = (KnownStep(Profile(), from_rehearsal=True),)
LEFT = Attempts(taken=(MUCH,), smallest=(Smallest(OTHER, from_rehearsal=False),))
DROPPED = say(Line.GIVEN, plan=GIVEN)
ABOVE = {"why": "took no less by what else was tried"}
CLIMBED = {"why": "hold more than was planned for"}
