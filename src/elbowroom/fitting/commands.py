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
    """Lines that are logged when a state moves, by the name of the function in `messages.py`."""

    MEASURED = "say_measured"
    LARGER_STEP = "warn_larger_step"
    OUTSIDE = "warn_outside"
    BLIND = "warn_blind"
    ABOVE = "warn_above"
    SMALLEST = "warn_smallest"
    NEAR = "warn_near"
    RUNS_AGAIN = "warn_runs_again"
    OPENS = "say_opens"
    UNCORRECTED = "warn_uncorrected"
    GIVEN = "warn_given"
    UNKNOWN = "say_unknown"
    NOISE = "say_noise"
    ADDED = "say_added"


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
class Relax:
    """Command: lift a restriction of plans from now on.

    changes  attributes of `runtime.context.Context`, and their new values
    """

    changes: tuple[tuple[str, bool], ...]


BLAME_NO_CLASSES = Relax((("blames_classes", False),))
LET_ROWS_WAIT = Relax((("rows_wait", True),))
RUN_PRODUCTS_AGAIN = Relax((("products_again", True),))
OPEN_CHECKPOINTS = Relax((("opens_checkpoints", True),))
TAKE_SMALL = Relax((("takes_small", True),))
RUN_LAYERS_AGAIN = Relax((("runs_again", True), ("keeps_bits", True)))  # each as a whole
RUN_STRETCHES_AGAIN = Relax((("runs_again", True), ("keeps_bits", False)))  # sums are rounded anew


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
    | Relax
    | Refuse
    | RefusePresets
    | Raise
    | Then
)
