"""Observations of steps of one kind, and answers of planners: the inputs of all transitions."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elbowroom.errors import BudgetTooSmall
    from elbowroom.fitting.attempts import Attempts, Chosen, KnownStep, Smallest
    from elbowroom.fitting.forward import FittedSaving
    from elbowroom.fitting.headroom import Headroom
    from elbowroom.fitting.options import FitOptions, MemoryState
    from elbowroom.fitting.signature import Signature
    from elbowroom.plan.plan import Plan
    from elbowroom.plan.profile import Profile
    from elbowroom.plan.rehearsal import ForwardProfile
    from elbowroom.plan.shares import AddedVariance, NoiseShares


@dataclass(frozen=True)
class Fallbacks:
    """Relaxations that are still possible where no plan fits.

    products        linear layers may run again where a plan rebuilds what is made of their results
    checkpoints     checkpoints of the program's own may be opened: plans decide on what is inside
    rows            large rows that are gathered may be made when they are read
    blamed_classes  modules that cannot be recomputed exclude all others of their class
    layers          recurrent layers may be recomputed in backward, each as a whole: exactly
    stretches       they may be recomputed a few time steps after the other: sums are rounded
                    otherwise
    small           tensors below min_nbytes may be planned, too
    """

    blamed_classes: bool = False
    layers: bool = False
    stretches: bool = False
    small: bool = False
    rows: bool = False
    products: bool = False
    checkpoints: bool = False


@dataclass(frozen=True)
class StepBegan:
    """Observation: a step begins with its first forward.

    grew   the step before had a forward that was not planned
    calls  number of forwards in a step before that
    """

    memory: "MemoryState"
    signature: "Signature"
    grew: bool = False
    calls: int = 1


@dataclass(frozen=True)
class CoResidentBytes:
    """Observation: this many bytes are resident beside the model as a step begins."""

    nbytes: int


@dataclass(frozen=True)
class OutputsHeld:
    """Observation: so many bytes of outputs of earlier forwards are held until this one ends."""

    nbytes: int


@dataclass(frozen=True)
class ModelJoined:
    """Observation: another model runs in this step. memory: as the step began, with its own."""

    memory: "MemoryState"


@dataclass(frozen=True)
class GivenHeld:
    """Observation: states have the format that the given plan was made for. memory: since then."""

    memory: "MemoryState"


@dataclass(frozen=True)
class CannotRehearse:
    """Observation: a forward that was rehearsed runs a backward, which asks for what it dropped."""


@dataclass(frozen=True)
class OptionsChanged:
    """Observation: the user, or an exhausted device, changes the options."""

    options: "FitOptions"


@dataclass(frozen=True)
class LargerKnown:
    """Observation: a larger kind of forward is known.

    Until they are measured, transients are bounded by those of that kind.

    headroom: of that kind
    """

    headroom: "Headroom"


@dataclass(frozen=True)
class NotRepeatable:
    """Observation: a module was found whose second run gives another result.

    profile  without modules of that kind
    """

    profile: "Profile | None"


@dataclass(frozen=True)
class CodesWithdrawn:
    """Observation: tensors whose codes made gradients wrong are kept from now on.

    profile  in which they stay exact
    """

    profile: "Profile"


@dataclass(frozen=True)
class UnexpectedStep:
    """Observation: this step differs from those before, and holds more.

    held_nbytes: the most that it has held so far
    """

    held_nbytes: int = 0


@dataclass(frozen=True)
class HeldMore:
    """Observation: a settled forward held much more than the one that was measured.

    Or other modules will run again in its backward, or save more, which is held then.

    held_nbytes  the most that it held, and what was resident before it
    ran_again    modules whose forward runs again, and how many tensors they save
    """

    held_nbytes: int
    ran_again: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class LayersHeldTooMuch:
    """Observation: recurrent layers would hold too much in a forward that was never profiled."""

    fallbacks: Fallbacks


@dataclass(frozen=True)
class RowsTakeTooMuch:
    """Observation: rows that are gathered do not fit into the rest of the budget."""


@dataclass(frozen=True)
class NoPlanLeft:
    """Observation: no plan of a rehearsal fits."""

    fallbacks: Fallbacks


@dataclass(frozen=True)
class ForwardEnded:
    """Observation: a forward has ended.

    impossible    the strictest preset held too much
    before_nbytes what the step has saved so far, in plain autograd
    """

    preset: int
    impossible: bool
    saving: "FittedSaving | None" = None
    before_nbytes: int = 0


@dataclass(frozen=True)
class StepMeasured:
    """Observation: a step has ended, and was measured.

    memory        as the next step begins
    static_nbytes resident bytes as it began
    co_resident_nbytes the part of these that does not belong to the model
    outputs_nbytes  of outputs of earlier forwards that were held until its forward ended
    makes_states  the optimizer had no states as it began
    ran_trials    modules were run again in it as a trial, which takes memory beside what it held
    writes        it was to be profiled
    peak          in bytes; None: this thread could not measure it
    seen          its profile; None: it was not profiled, or was no whole step
    profile       the same, as the planner uses it
    climbed       it has left the plan, or the preset that it began with
    preset          that it ended at
    before_nbytes of what it saved, in plain autograd; after_nbytes: as it was held
    max_nbytes   the most that was held
    ran_again    modules whose forward ran again in its backward, and how many tensors they saved
    unknown_sites     it saved tensors that are not in the plan
    watched       enough steps have been watched
    may_measure   steps can be measured here
    preset_within   the mildest preset that would have held at most so many bytes
    saving        of its last forward
    others_learn  another model ran inside of it that has not settled yet, and may take less
    """

    memory: "MemoryState"
    static_nbytes: int
    peak: int | None
    co_resident_nbytes: int = 0
    outputs_nbytes: int = 0
    makes_states: bool = False
    ran_trials: bool = False
    writes: bool = False
    seen: "Profile | None" = None
    profile: "Profile | None" = None
    climbed: bool = False
    preset: int = 0
    before_nbytes: int = 0
    after_nbytes: int = 0
    max_nbytes: int = 0
    ran_again: Counter[str] = field(default_factory=Counter)
    unknown_sites: bool = False
    watched: bool = False
    may_measure: bool = True
    fallbacks: Fallbacks = Fallbacks()
    preset_within: Callable[[int], int | None] = lambda allowed_nbytes: None
    saving: "FittedSaving | None" = None
    others_learn: bool = False


@dataclass(frozen=True)
class NoiseMeasured:
    """Observation: the noise of codes was measured, or predicted.

    shares     None if that was inconclusive, and no limit is given
    predicted  they are predicted
    added      by the codes of the plan that was watched, if that is predicted
    """

    shares: "NoiseShares | None"
    predicted: bool = False
    added: "AddedVariance | None" = None


@dataclass(frozen=True)
class NoiseUsed:
    """Observation: a plan was made with the noise of codes, which was measured or predicted."""

    is_measured: bool


@dataclass(frozen=True)
class RoomToWatch:
    """Observation: a plan with memory for measuring noise was made; None: the budget has none.

    predicts: the plan that is followed has memory for what predicts it
    """

    plan: "Plan | None"
    predicts: bool = True


@dataclass(frozen=True)
class PlanMade:
    """Observation: a plan was made from the profile, and states have its format.

    fits: the plan before it was measured within the budget
    """

    chosen: "Chosen"
    memory: "MemoryState"
    fits: bool = False


@dataclass(frozen=True)
class PlanTaken:
    """Observation: states have the format of a plan that was chosen before."""

    chosen: "Chosen"
    memory: "MemoryState"


@dataclass(frozen=True)
class NoPlan:
    """Observation: no plan of the profile fits.

    replans: no step was measured since, but the budget or the call is new.
    """

    error: "BudgetTooSmall"
    fallbacks: Fallbacks
    replans: bool = False


@dataclass(frozen=True)
class SmallestMade:
    """Observation: the plans of the least predicted peak were made.

    found: one that was not measured yet.
    """

    attempts: "Attempts"
    found: "Smallest | None"


@dataclass(frozen=True)
class NothingToDo:
    """Observation: a forward rehearsed before the first step shows that all may be kept.

    Measuring the step is better than an estimate.
    """


@dataclass(frozen=True)
class PlanOutgrown:
    """Observation: a forward holds more than its plan, made for another one, leaves room for.

    Nothing was measured of that plan. The forward has been undone, and begins again.
    """


@dataclass(frozen=True)
class ForwardProfiled:
    """Observation: a forward has run without holding tensors."""

    forward_profile: "ForwardProfile"


@dataclass(frozen=True)
class Rehearsed:
    """Observation: a plan was made from a rehearsed forward, and states have its format.

    known  the estimated steps, with more or less care
    """

    chosen: "Chosen"
    memory: "MemoryState"
    known: "tuple[KnownStep, ...]"


@dataclass(frozen=True)
class RehearsedInVain:
    """Observation: no plan of a rehearsed forward fits."""

    error: "BudgetTooSmall"


Observation = (
    StepBegan
    | CoResidentBytes
    | OutputsHeld
    | ModelJoined
    | GivenHeld
    | CannotRehearse
    | OptionsChanged
    | LargerKnown
    | NotRepeatable
    | CodesWithdrawn
    | UnexpectedStep
    | HeldMore
    | LayersHeldTooMuch
    | RowsTakeTooMuch
    | NoPlanLeft
    | ForwardEnded
    | StepMeasured
    | NoiseMeasured
    | NoiseUsed
    | RoomToWatch
    | PlanMade
    | PlanTaken
    | NoPlan
    | SmallestMade
    | NothingToDo
    | PlanOutgrown
    | ForwardProfiled
    | Rehearsed
    | RehearsedInVain
)
