"""View of a kind of forward for forwards and their readers: all of it is read off its state."""

from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.signature import Signature
from elbowroom.fitting.state import FitState
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile


class Followed:
    """Forwards of one kind, as their state says that they run."""

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
        """Signature of the call that runs, or has run last; of several in a step, the first."""
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
        """Index of the preset that all tensors are at if no plan is followed."""
        return self.state.preset

    @property
    def profile(self) -> Profile | None:
        """Profile of the step that was written down."""
        return self.state.profile

    @property
    def settled(self) -> bool:
        """True if nothing more is to be learned."""
        return self.state.settled

    @property
    def rehearsed(self) -> bool:
        """True if the profile is an estimate, made from a forward alone."""
        return self.state.rehearsed

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
        """Modules whose forward runs again in backward."""
        return self.state.recompute

    @property
    def may_refuse(self) -> bool:
        """True if a forward that holds too much is refused; otherwise it passes as an exception."""
        return self.state.may_refuse

    def allowed_nbytes(self, guessed_nbytes: int) -> int:
        """Returns the bytes that may be held for backward.

        As long as no step was measured, the transients are guessed.
        """
        return self.state.allowed_nbytes(guessed_nbytes)

    def surely_allowed_nbytes(self) -> int:
        """Returns the bytes that may be held for backward, without guesses."""
        return self.state.surely_allowed_nbytes()

    def covers(self, signature: Signature) -> bool:
        """Returns whether what was learned is safe for this call, too."""
        learned = self.plan is not None or self.settled
        return learned and self.largest.covers(signature)
