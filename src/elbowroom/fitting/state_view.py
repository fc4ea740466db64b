"""Read-only view of the state of one kind of forward."""

from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.signature import Signature
from elbowroom.fitting.state import FitState
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile


class StateView:
    """Properties of forwards of one kind, read from their state."""

    def __init__(self, state: FitState) -> None:
        self.state = state

    @property
    def options(self) -> FitOptions:
        """Options that the user gave."""
        return self.state.options

    @property
    def memory(self) -> MemoryState:
        """Memory as the step began."""
        return self.state.memory

    @property
    def now(self) -> Signature:
        """Signature of the current or last call; of the first call if a step has several."""
        return self.state.now

    @property
    def largest(self) -> Signature:
        """Least signature that covers all calls of this kind."""
        return self.state.largest

    @property
    def plan(self) -> Plan | None:
        """Plan that is followed."""
        return self.state.plan

    @property
    def given(self) -> Plan | None:
        """Plan that this kind of forward began with."""
        return self.state.given

    @property
    def preset(self) -> int:
        """Index of the preset of all tensors if no plan is followed."""
        return self.state.preset

    @property
    def profile(self) -> Profile | None:
        """Profile of the profiled step."""
        return self.state.profile

    @property
    def settled(self) -> bool:
        """True if learning has ended."""
        return self.state.settled

    @property
    def from_rehearsal(self) -> bool:
        """True if the profile is an estimate, made from a forward alone."""
        return self.state.from_rehearsal

    @property
    def setting(self) -> str:
        """Name of the setting that forwards run at: "plan", or the name of a preset."""
        return "plan" if self.plan is not None else self.options.presets[self.preset].name

    @property
    def numel(self) -> int:
        """Number of elements of the largest call."""
        return self.largest.numel

    @property
    def recompute(self) -> frozenset[str]:
        """Modules that are recomputed in backward."""
        return self.state.recompute

    @property
    def may_refuse(self) -> bool:
        """True if a forward that holds too much is refused; otherwise it is tolerated."""
        return self.state.may_refuse

    def allowed_nbytes(self, guessed_nbytes: int) -> int:
        """Returns the bytes that may be held for backward.

        Until a step was measured, the transients are guessed.
        """
        return self.state.allowed_nbytes(guessed_nbytes)

    def surely_allowed_nbytes(self) -> int:
        """Returns the bytes that may be held for backward, without guesses."""
        return self.state.surely_allowed_nbytes()

    def covers(self, signature: Signature) -> bool:
        """Returns whether the plan is safe for this call, too."""
        learned = self.plan is not None or self.settled
        return learned and self.state.covers(signature)
