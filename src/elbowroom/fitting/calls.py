"""The forwards of one step: a model may run more than once before its backward.

Examples are the two branches of a siamese network, the real and fake batches of a discriminator,
and losses that are summed: the tensors that autograd saves in all of these forwards are alive at
the same time. So a forward that begins while the saved tensors of the last one still wait for
backward continues the step of that one: the step has one ledger, one measurement and one plan.

How many there will be, nobody knows before the first step that has them. A forward that comes
unexpected is rehearsed, which holds nothing, and gets what is left of the budget, or, if that does
not do, as little as it can with a warning (`Rest`). Where codes are allowed, what the forwards
before it hold is encoded first; where no plan of two such forwards is known, it is refused before
it runs. From the next step on all are planned as one.

A step that several models share (`guests.py`) goes on after a backward that has not come to all of
it: the discriminator's update, and then the generator's. Such a step has parts, one a backward
(`plan/parts.py`). It may be of several patterns, too, one for each of the updates: a forward of
another structure than the one known at its place does not replace that if the plan has room for it.
"""

import sys
from dataclasses import dataclass, replace

from elbowroom.fitting.options import FitOptions
from elbowroom.fitting.planner_settings import PlannerSettings
from elbowroom.fitting.signature import Signature
from elbowroom.measure.meter import NoiseMeter
from elbowroom.plan.parts import StepPart
from elbowroom.plan.plan import Plan
from elbowroom.plan.presets import Preset
from elbowroom.plan.profile import Profile
from elbowroom.plan.rehearsal import ForwardProfile
from elbowroom.runtime.context import Context

MAX_CALLS = 64  # of a step that is planned as one
_NEAR = 0.9  # of a later forward: large enough to learn from; what it takes is not scaled
_PATIENCE = 5  # steps with fewer forwards than some had, until they count as the usual ones


@dataclass(frozen=True)
class _LaterForward:
    """A forward that is not the first of its step.

    seen         profile of its rehearsal; None: it was never rehearsed
    part         of the step that it belongs to, from 0
    """

    signature: Signature
    seen: ForwardProfile | None
    part: int = 0


class Calls:
    """Forwards of the steps that one `Planner` plans.

    grew            this step had a forward that was not planned, so the step is learned again
    before_it_grew  number of forwards in a step, as this step began
    was_said     the user was told that this step may be above the budget
    was_said_blind  the user was told that such steps cannot be measured here
    """

    def __init__(self) -> None:
        self._later: list[_LaterForward] = []
        self._others: list[tuple[int, Signature]] = []  # of other patterns: place and signature
        self._is_other = False
        self._part = 0
        self._waits: dict[int, frozenset[int]] = {}  # by part: forwards that waited as it began
        self._at = 0  # the forward that runs; 0: the first of its step
        self._fewer = 0  # steps in a row
        self._is_small = False  # one of this step's is much smaller than it was
        self.grew = self.was_said = self.was_said_blind = False
        self.before_it_grew = 1

    def begin(self) -> None:
        """Begins a step with its first forward."""
        self._at, self.grew, self._is_small = 0, False, False
        self._is_other = self.was_said = False
        self._part = 0
        self.before_it_grew = 1 + len(self._later)

    def forget(self, calls: int) -> None:
        """Forgets forwards beyond `calls`, which were of an odd step."""
        del self._later[calls - 1 :]

    @property
    def may_go_on(self) -> bool:
        """True if the step may have another forward."""
        return self._at < MAX_CALLS

    def go_on(
        self,
        signature: Signature,
        plan: Plan | None,
        *,
        from_rehearsal: bool,
        waits: frozenset[int] | None = None,
    ) -> bool:
        """Goes on with another forward of the step; returns whether the plan knew of it.

        plan: the current one; from_rehearsal: it was made from rehearsals; waits: numbers of the
        forwards whose backward is still to come, if a part of the step is over
        """
        self._at += 1
        if waits is not None:
            self._part += 1
            self._waits[self._part] = waits
        known = self._later[self._at - 1 : self._at]
        if self.grew:
            return False  # nor was the forward in between
        if not known:
            return plan is not None and plan.has_call(self._at + 1)
        if any(at == self._at and one.covers(signature) for at, one in self._others):
            self._is_other = True
            return True
        self._is_small |= signature.numel < _NEAR * known[0].signature.numel
        return known[0].signature.covers(signature) and not (
            from_rehearsal and known[0].seen is None
        )

    def leave(self, waits: frozenset[int]) -> None:
        """Ends a step in which these forwards still wait for a backward that never comes."""
        if self._at == len(self._later) and not self._is_other:
            self._waits[self._part + 1] = waits

    def note_other(self, signature: Signature) -> None:
        """Records that the step is of another pattern from the forward that runs on."""
        self._is_other = True
        if len(self._others) < MAX_CALLS:
            self._others.append((self._at, signature))

    def is_other(self, signature: Signature) -> bool:
        """Returns whether a forward of another structure is known at the place of this one."""
        known = self._later[self._at - 1 : self._at]
        return bool(known) and known[0].signature.structure != signature.structure

    def note(self, signature: Signature, seen: ForwardProfile | None) -> None:
        """Records the signature and the rehearsed profile of the forward that runs."""
        later = self._later
        if self._at > len(later):
            later.append(_LaterForward(signature, seen, self._part))
            return
        known = later[self._at - 1]
        if seen is None and known.signature.covers(signature):
            return
        if known.signature.structure == signature.structure:
            signature = known.signature.joined(signature)
        later[self._at - 1] = _LaterForward(signature, seen, self._part)

    def is_whole(self, *, had_backward: bool = True) -> bool:
        """Returns whether the last step can be learned from: no fewer forwards, none smaller.

        To be asked once a step. After several steps with fewer forwards, the others are forgotten.
        Images that a generator makes for the discriminator's update alone have no backward, and are
        no such step.
        """
        if self._at >= len(self._later) and not (self._is_small or self._is_other):
            self._fewer = 0
            return True
        if not had_backward:
            return False
        self._fewer += 1
        if self._fewer >= _PATIENCE and not self._is_small:
            del self._later[0 if self._is_other else self._at :]
            self._others.clear()
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

    def parts(self, first: ForwardProfile) -> list[StepPart]:
        """Returns the forwards of a step, which begins with `first`, by its parts."""
        seen = {0: (0, first)}
        for nth, one in enumerate(self._later, start=1):
            if one.seen is not None:
                seen[nth] = one.part, one.seen
        last = max(part for part, _ in seen.values())
        found: list[StepPart] = []
        carried: list[int] = []
        for part in range(last + 1):
            calls = carried + [nth for nth, (of, _) in seen.items() if of == part]
            waits = self._waits.get(part + 1, frozenset())
            carried_before, carried = carried, [nth for nth in calls if nth in waits]
            if len(calls) > len(carried_before):
                forwards = {nth: seen[nth][1] for nth in calls}
                found.append(StepPart(forwards, frozenset(carried)))
        return found


class Rest:
    """Stand-in for a `Planner` that an unexpected forward follows; it allows any size."""

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

    def lets_rows_wait(self) -> bool:
        """Returns False: likewise, rows were made at once."""
        return False

    def surely_allowed_nbytes(self) -> int:
        return sys.maxsize

    @property
    def may_refuse(self) -> bool:
        return False

    def diverge(self, held_nbytes: int) -> None:
        pass  # the user has been warned already that the step may exceed the budget


def plan_rest(step: Profile, settings: PlannerSettings) -> Plan | None:
    """Plans one forward of a step, with the backward of the whole step; None if nothing fits.

    step: its static bytes include what earlier forwards hold
    """
    exact = settings.options.exact
    allowed = (True, None) if exact is None else (exact,)
    for some, recompute in ((some, again) for some in allowed for again in (False, True)):
        plan = settings.plan_for(step, 0, exact=some, recompute=recompute)
        if plan is not None:
            return plan
    return None


def least_rest(step: Profile, settings: PlannerSettings, *, exact: bool | None) -> Plan:
    """Returns the plan of the least peak."""
    finer = replace(settings, finest=settings.options.budget_nbytes >> 8)
    return finer.smallest_plan(step, exact=exact)
