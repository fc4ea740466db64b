"""What a `FitState` asks for when it moves: `execute.py` carries it out."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elbowroom.errors import BudgetTooSmall
    from elbowroom.fitting.attempts import Taken
    from elbowroom.fitting.chosen import Chosen
    from elbowroom.fitting.forward import FittedSaving
    from elbowroom.fitting.observations import Observation
    from elbowroom.plan.rehearsal import ForwardProfile


class Line(Enum):
    """The lines that are logged when a state moves; `messages.py` has their words."""

    MEASURED = "prediction and measurement of a step"
    STRAY = "a step holds more than those before"
    OUTSIDE = "little of what a step takes is saved where it can be changed"
    ABOVE = "steps stay above the budget"
    SMALLEST = "the smallest plans are tried"
    RUNS_AGAIN = "recurrent layers run again"
    UNCORRECTED = "no plan has kept to the budget"
    GIVEN = "a plan that was given is of no use"
    UNKNOWN = "what codes add is not measured"
    NOISE = "what codes add"


@dataclass(frozen=True)
class Say:
    """Log this line. values: what it names, by the arguments of its function."""

    line: Line
    values: dict[str, Any]


def say(line: Line, **values: Any) -> Say:
    """Return the command to log this line with these values."""
    return Say(line, values)


@dataclass(frozen=True)
class ForgetScripts:
    """Forget how settled forwards went: they will be others."""


@dataclass(frozen=True)
class BeginPlan:
    """A plan is followed from now on: forget scripts, and try modules that run again."""


@dataclass(frozen=True)
class HoldAsGiven:
    """Hold states as the plan that was given was made for -> GivenHeld."""


@dataclass(frozen=True)
class MakePlan:
    """Make a plan by the profile, and take it -> PlanMade or NoPlan. again: see `NoPlan`."""

    again: bool = False


@dataclass(frozen=True)
class CheckPlan:
    """Raise BudgetTooSmall where no plan fits, whatever else could be followed."""


@dataclass(frozen=True)
class TakePlan:
    """Hold states as a plan was made for that was chosen before -> PlanTaken."""

    chosen: "Chosen"


@dataclass(frozen=True)
class MakeSmallest:
    """Make the plans of the least predicted peak -> SmallestMade."""


@dataclass(frozen=True)
class PlanByForward:
    """Make a plan by a rehearsed forward, and take it -> Rehearsed or RehearsedInVain."""

    heard: "ForwardProfile"


@dataclass(frozen=True)
class ForgetCalls:
    """Forwards of a step beyond so many were of an odd one."""

    calls: int


@dataclass(frozen=True)
class MakeRoomToWatch:
    """Make a plan that leaves so much free -> RoomToWatch."""

    margin_nbytes: int


@dataclass(frozen=True)
class StartMeter:
    """Look at what codes add from the next forward on."""


@dataclass(frozen=True)
class ReadMeter:
    """Look no longer -> NoiseMeasured."""


@dataclass(frozen=True)
class BlameNoClasses:
    """Leave out single modules that cannot run again, not all of their class."""


@dataclass(frozen=True)
class RunLayersAgain:
    """Let recurrent layers run again in backward from now on."""


@dataclass(frozen=True)
class Refuse:
    """Raise BudgetTooSmall, by the least measured peak: a budget that does if it is given."""

    least: "Taken"


@dataclass(frozen=True)
class RefuseRungs:
    """Raise BudgetTooSmall, by what the least rung would have held of this forward."""

    saving: "FittedSaving | None"


@dataclass(frozen=True)
class Raise:
    """Pass on an error of the planner."""

    error: "BudgetTooSmall"


@dataclass(frozen=True)
class Then:
    """Once all that was asked for before is done, go on with this observation."""

    observation: "Observation"


Command = (
    Say
    | ForgetScripts
    | BeginPlan
    | HoldAsGiven
    | MakePlan
    | CheckPlan
    | TakePlan
    | MakeSmallest
    | PlanByForward
    | ForgetCalls
    | MakeRoomToWatch
    | StartMeter
    | ReadMeter
    | BlameNoClasses
    | RunLayersAgain
    | Refuse
    | RefuseRungs
    | Raise
    | Then
)
