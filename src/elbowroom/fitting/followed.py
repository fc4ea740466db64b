"""What forwards and their readers ask of a kind of forward: all of it is read off its state."""

from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.signature import Signature
from elbowroom.fitting.state import FitState
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile


class Followed:
    """The forwards of one kind, as their state says that they run."""

    def __init__(self, state: FitState) -> None:
        self.state = state

    @property
    def terms(self) -> FitOptions:
        """What the user asks for."""
        return self.state.terms

    @property
    def stock(self) -> MemoryState:
        """The memory as the step began."""
        return self.state.stock

    @property
    def now(self) -> Signature:
        """The call that runs, or has run last; of a step that has several, the first."""
        return self.state.now

    @property
    def largest(self) -> Signature:
        """The least signature that covers all calls of this kind."""
        return self.state.largest

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed."""
        return self.state.plan

    @property
    def given(self) -> Plan | None:
        """The plan that it began with."""
        return self.state.given

    @property
    def rung(self) -> int:
        """Where on the ladder all tensors are, if no plan is followed."""
        return self.state.rung

    @property
    def profile(self) -> Profile | None:
        """The step that was written down."""
        return self.state.profile

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be learned."""
        return self.state.settled

    @property
    def rehearsed(self) -> bool:
        """Whether that is an estimate, made from a forward alone."""
        return self.state.rehearsed

    @property
    def setting(self) -> str:
        """What forwards run at: "plan", or the name of a rung."""
        return "plan" if self.plan is not None else self.terms.rungs[self.rung].name

    @property
    def numel(self) -> int:
        """Elements of the largest call."""
        return self.largest.numel

    @property
    def recompute(self) -> frozenset[str]:
        """Modules whose forward runs again in backward."""
        return self.state.recompute

    @property
    def may_refuse(self) -> bool:
        """Whether a forward that holds too much is refused; else it is another one for once."""
        return self.state.may_refuse

    def allowed_nbytes(self, guessed_nbytes: int) -> int:
        """What may be held for backward. As long as nothing is measured, the rest is guessed."""
        return self.state.allowed_nbytes(guessed_nbytes)

    def surely_allowed_nbytes(self) -> int:
        """The same without guesses."""
        return self.state.surely_allowed_nbytes()

    def covers(self, signature: Signature) -> bool:
        """Whether what was learned is safe for this call, too."""
        learned = self.plan is not None or self.settled
        return learned and self.largest.covers(signature)
