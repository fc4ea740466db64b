"""The forwards of one step: a model may run more than once before its backward.

Examples are the two branches of a siamese network, the real and fake batches of a discriminator,
and losses that are summed: the tensors that autograd saves in all of these forwards are alive at
the same time. So a forward that begins while the saved tensors of the last one still wait for
backward continues the step of that one: the step has one ledger, one measurement and one plan.

The number of forwards is unknown before the first step that has several. An unexpected forward is
rehearsed, which holds nothing, and gets the rest of the budget; if that is not enough, it gets as
little as it can be run with, and a warning is logged (`Rest`). Where codes are allowed, the tensors
that earlier forwards hold are encoded first; where no plan of two such forwards is known, the
forward is refused before it runs. From the next step on, all of them are planned as one.
"""

import sys
from dataclasses import dataclass, replace
from functools import reduce

from elbowroom.errors import BudgetTooSmall
from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.planner_settings import PlannerSettings
from elbowroom.fitting.signature import Signature
from elbowroom.measure.meter import NoiseMeter
from elbowroom.plan.plan import Plan
from elbowroom.plan.presets import Preset
from elbowroom.plan.profile import Profile
from elbowroom.plan.rehearsal import ForwardProfile
from elbowroom.runtime.context import Context

MOST_CALLS = 64  # of a step that is planned as one
_NEAR = 0.9  # of a later forward: large enough to learn from; what it takes is not scaled
_PATIENCE = 5  # steps with fewer forwards than some had, until they count as the usual ones


@dataclass(frozen=True)
class _Later:
    """A forward that is not the first of its step.

    seen         its rehearsed profile; None: it was never rehearsed
    """

    signature: Signature
    seen: ForwardProfile | None


class Calls:
    """Forwards of the steps that share one `Planning`.

    grew            this step had a forward that was not planned, so the step is learned again
    before_it_grew  number of forwards in a step, as this step began
    """

    def __init__(self) -> None:
        self._later: list[_Later] = []
        self._at = 0  # the forward that runs; 0: the first of its step
        self._fewer = 0  # steps in a row
        self._is_small = False  # one of this step's forwards is much smaller than before
        self.grew = False
        self.before_it_grew = 1

    def begin(self) -> None:
        """Begins a step with its first forward."""
        self._at, self.grew, self._is_small = 0, False, False
        self.before_it_grew = 1 + len(self._later)

    def forget(self, calls: int) -> None:
        """Forgets forwards beyond `calls`, which were of an odd step."""
        del self._later[calls - 1 :]

    @property
    def may_go_on(self) -> bool:
        """True if the step may have another forward."""
        return self._at < MOST_CALLS

    def go_on(self, signature: Signature, plan: Plan | None, *, rehearsed: bool) -> bool:
        """Continues the step with another forward; returns whether the plan includes it.

        plan: the current plan; rehearsed: it was made from forwards alone
        """
        self._at += 1
        known = self._later[self._at - 1 : self._at]
        if self.grew:
            return False  # nor was the forward in between
        if not known:
            return plan is not None and plan.has_call(self._at + 1)
        self._is_small |= signature.numel < _NEAR * known[0].signature.numel
        return known[0].signature.covers(signature) and not (rehearsed and known[0].seen is None)

    def note(self, signature: Signature, seen: ForwardProfile | None) -> None:
        """Records the signature and the rehearsed profile of the forward that runs."""
        later = self._later
        if self._at > len(later):
            later.append(_Later(signature, seen))
            return
        known = later[self._at - 1]
        if seen is None and known.signature.covers(signature):
            return
        if known.signature.structure == signature.structure:
            signature = known.signature.joined(signature)
        later[self._at - 1] = _Later(signature, seen)

    @property
    def is_whole(self) -> bool:
        """True if the last step can be learned from: no fewer forwards than usual, none smaller.

        Call this once a step. After several steps with fewer forwards, the others are forgotten.
        """
        if self._at >= len(self._later) and not self._is_small:
            self._fewer = 0
            return True
        self._fewer += 1
        if self._fewer >= _PATIENCE and not self._is_small:
            del self._later[self._at :]
            self._fewer = 0
        return False

    @property
    def at(self) -> int:
        """Index of the current forward in its step, from 0."""
        return self._at

    @property
    def are_seen(self) -> bool:
        """True if steps have several forwards, and all but the first have been rehearsed."""
        return bool(self._later) and all(one.seen is not None for one in self._later)

    def joined(self, first: ForwardProfile) -> ForwardProfile:
        """Returns the forwards of a step joined into one, which begins with `first`."""
        seen = (one.seen for one in self._later if one.seen is not None)
        return reduce(ForwardProfile.followed_by, seen, first)


class Rest:
    """Stand-in for a `Planning` that an unexpected forward follows; it allows any size."""

    def __init__(
        self,
        options: FitOptions,
        context: Context,
        plan: Plan | None,
        encoded: Preset | None = None,
    ) -> None:
        """plan: None where it could not be rehearsed.

        encoded: the preset that the forwards before it are held by now, if that has changed
        """
        self.options, self.context, self.plan, self.encoded = options, context, plan, encoded
        self.preset = len(options.presets) - 1
        self.meter: NoiseMeter | None = None
        self.redoes = False

    @property
    def recompute(self) -> frozenset[str]:
        return frozenset() if self.plan is None else self.plan.recompute

    def allowed_nbytes(self, guessed_nbytes: int) -> int:
        return sys.maxsize

    def lets_layers_run_again(self) -> bool:
        """Returns False: other forwards of this step have run without running layers again."""
        return False

    def surely_allowed_nbytes(self) -> int:
        return sys.maxsize

    @property
    def may_refuse(self) -> bool:
        return False

    def stray(self) -> None:
        pass  # the user has been warned already that the step may exceed the budget


def plan_rest(step: Profile, making: PlannerSettings) -> Plan | None:
    """Plans one forward of a step, with the backward of the whole step; None if nothing fits.

    step: its static bytes include what earlier forwards hold
    """
    exact = making.options.exact
    allowed = (True, None) if exact is None else (exact,)
    for some, recompute in ((some, again) for some in allowed for again in (False, True)):
        plan = making.plan_for(step, 0, exact=some, recompute=recompute)
        if plan is not None:
            return plan
    return None


def least_rest(step: Profile, making: PlannerSettings) -> Plan:
    """Returns the plan of the least peak, where `plan_rest` finds none."""
    exact = making.options.exact
    try:
        return making.make(step, 0, exact=exact)
    except BudgetTooSmall as error:
        least = making.options.within(error.least_nbytes)
    return replace(making, options=least).make(step, 0, exact=exact)
