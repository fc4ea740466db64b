"""Commands that a `FitState` gives when it moves: `execute.py` carries them out."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elbowroom.errors import BudgetTooSmall
    from elbowroom.fitting.attempts import Chosen, Taken
    from elbowroom.fitting.forward import FittedSaving
    from elbowroom.fitting.observations import Observation
    from elbowroom.plan.rehearsal import ForwardProfile


class Line(Enum):
    """Names of the lines that are logged when a state moves; `messages.py` has their words."""

    MEASURED = "prediction and measurement of a step"
    LARGER_STEP = "a step holds more than those before"
    OUTSIDE = "little of what a step takes is saved where it can be changed"
    BLIND = "five steps could not be measured"
    ABOVE = "steps stay above the budget"
    SMALLEST = "the smallest plans are tried"
    NEAR = "the smallest plan is near the budget"
    RUNS_AGAIN = "recurrent layers run again"
    OPENS = "checkpoints of the program's own are opened"
    UNCORRECTED = "no plan has kept to the budget"
    GIVEN = "a plan that was given is of no use"
    UNKNOWN = "what codes add is not measured"
    NOISE = "what codes add"


@dataclass(frozen=True)
class Say:
    """Command: log this line. values: what it names, by the arguments of its function."""

    line: Line
    values: dict[str, Any]


def say(line: Line, **values: Any) -> Say:
    """Returns the command to log this line with these values."""
    return Say(line, values)


@dataclass(frozen=True)
class ForgetScripts:
    """Command: forget the scripts of settled forwards, since later forwards will differ."""


@dataclass(frozen=True)
class BeginPlan:
    """Command: forget scripts, and test modules to be recomputed, since a new plan is followed."""


@dataclass(frozen=True)
class HoldAsGiven:
    """Command: convert states to the format that the given plan was made for -> GivenHeld."""


@dataclass(frozen=True)
class MakePlan:
    """Command: make a plan from the profile, and adopt it -> PlanMade or NoPlan.

    replans: see `NoPlan`. fits: the current plan was measured within the budget.
    """

    replans: bool = False
    fits: bool = False


@dataclass(frozen=True)
class CheckPlan:
    """Command: raise BudgetTooSmall where no plan fits, whatever else could be followed."""


@dataclass(frozen=True)
class TakePlan:
    """Command: convert states to the format that an earlier plan was made for -> PlanTaken."""

    chosen: "Chosen"


@dataclass(frozen=True)
class MakeSmallest:
    """Command: make the plans of the least predicted peak -> SmallestMade."""


@dataclass(frozen=True)
class PlanByForward:
    """Command: plan by a rehearsed forward, and adopt it -> Rehearsed or RehearsedInVain."""

    forward_profile: "ForwardProfile"


@dataclass(frozen=True)
class ForgetCalls:
    """Command: forget forwards of a step beyond this number, which belonged to an unusual step."""

    calls: int


@dataclass(frozen=True)
class MakeRoomToWatch:
    """Command: make a plan that leaves this many bytes free -> RoomToWatch."""

    margin_nbytes: int


@dataclass(frozen=True)
class StartMeter:
    """Command: measure the noise of codes from the next forward on.

    predicts: there is no memory for it, so what predicts the noise is measured.
    """

    predicts: bool = False


@dataclass(frozen=True)
class ReadMeter:
    """Command: stop measuring the noise of codes -> NoiseMeasured."""


@dataclass(frozen=True)
class BlameNoClasses:
    """Command: exclude single modules that cannot be recomputed, rather than all of their class."""


@dataclass(frozen=True)
class RunLayersAgain:
    """Command: allow recomputation of recurrent layers from now on.

    rounds: in stretches of time, with gradients that differ by rounding; else each as a whole
    """

    rounds: bool


@dataclass(frozen=True)
class LetRowsWait:
    """Command: make large rows that are gathered when they are read, from now on."""


@dataclass(frozen=True)
class RunProductsAgain:
    """Command: let plans rebuild what is made of a linear layer's result, from now on."""


@dataclass(frozen=True)
class OpenCheckpoints:
    """Command: run what the program's own checkpoints hold as if it had none, from now on."""


@dataclass(frozen=True)
class TakeSmall:
    """Command: plan tensors below min_nbytes, too, from now on."""


@dataclass(frozen=True)
class Refuse:
    """Command: raise BudgetTooSmall, and name a sufficient budget by the least measured peak."""

    least: "Taken"


@dataclass(frozen=True)
class RefusePresets:
    """Command: raise BudgetTooSmall, by the bytes that the strictest preset would have held."""

    saving: "FittedSaving | None"


@dataclass(frozen=True)
class Raise:
    """Command: pass on an error of the planner."""

    error: "BudgetTooSmall"


@dataclass(frozen=True)
class Then:
    """Command: continue with this observation once all commands before it are done."""

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
    | LetRowsWait
    | RunProductsAgain
    | OpenCheckpoints
    | TakeSmall
    | Refuse
    | RefusePresets
    | Raise
    | Then
)
