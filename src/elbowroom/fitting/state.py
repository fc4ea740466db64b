"""State of the forwards of one kind, as one frozen value; `transitions.py` has its transitions."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from elbowroom.fitting.attempts import Attempts
from elbowroom.fitting.headroom import Headroom
from elbowroom.fitting.parts import HigherSteps, Margins, UnexpectedSteps, Watched
from elbowroom.fitting.phase import Phase

if TYPE_CHECKING:
    from collections import Counter

    from elbowroom.fitting.attempts import Chosen
    from elbowroom.fitting.observations import Fallbacks
    from elbowroom.fitting.options import FitOptions, MemoryState
    from elbowroom.fitting.signature import Signature
    from elbowroom.plan.plan import Plan
    from elbowroom.plan.profile import Profile

PLAIN = 0  # index of "keep" in every ladder
SAFEST_EXACT = 1  # index of "exact" in every ladder
_MAX_WAITS = 8  # steps that are measured while another model, which runs inside of them, learns
_MAX_SKIPPED = 8  # steps with fewer gradients or outputs, until one is measured all the same
_LITTLE = 0.01  # of the budget: a difference of gradients below this is ignored
_MANY_SMALL = 0.05  # of the budget: if tensors below min_nbytes hold more, they may be planned, too
_AS_MUCH = 0.9  # of the bytes that an unexpected step saved: a step with as many is learned from
_MAX_HIGHER = 4  # times that settled steps are measured again since one held much more
_MAX_SMALLER = 8  # steps in a row that save less, until one is learned from all the same
_NEAR = 0.75  # of the largest call: large enough to verify a plan by
_ANY = 1 << 62  # bytes
_MEASURES = (Phase.WRITING, Phase.VERIFYING, Phase.SMALLEST)
_PROFILED = 1.1  # of the budget: the peak that a profiled step may have


class ReplacedState(NamedTuple):
    """Settled state that was replaced because a step had more forwards, or saved more, than others.

    calls: number of forwards in a step until then
    """

    state: "FitState"
    calls: int


@dataclass(frozen=True)
class FitState:
    """Immutable state of forwards of one kind: what is known of them, and what they run at.

    phase         what the next step is for

    Of the current step, and of steps like it:

    options       the options of the user
    memory        the memory as the step began
    now           signature of the current or last call; of the first one if a step has several
    largest       the smallest signature that covers all calls of this kind. No call need have it: a
                  graph may have many nodes, and another one many edges
    most          the signature of the call with the most elements; None: that is `largest`

    The setting of forwards:

    plan          the plan that is followed; None: all tensors are at `options.presets[preset]`
    chosen        the choice of plan and state format; None: the plan was given, or is watched
    given         the plan to begin with; None: there is none, or it is not used any more
    headroom      bytes that a step needs besides resident and held ones

    The profile that plans are made from, and margins that measured plans have shown to be needed:

    profile       of a step that was profiled, or of a rehearsal: a forward that ran without holding
                  tensors, whose backward is estimated (`rehearse.py`)
    from_rehearsal  the profile is of a rehearsal, or is an estimate for another reason
    profiled      signature of the call that was profiled
    profiled_at   preset of the profiled step; None: it was a rehearsal, or followed a plan
    co_resident_nbytes      bytes of other models and graphs that the profile includes
    max_co_resident_nbytes  the largest such number that this kind of forward was replanned for
    outputs_nbytes          the most bytes of earlier outputs that a forward has begun with
    margins       bytes by which measured plans were too optimistic
    is_recurrent  the profile has recurrent layers that could be recomputed
    small_nbytes  bytes that the profile has in tensors smaller than min_nbytes

    Attempts so far:

    rounds        plans that were replaced because a measurement exceeded the budget
    tries         steps that were measured under a plan, or profiled
    unmeasured    steps in a row that could not be measured
    attempts      plans that were measured, and profiles to make smaller plans from
    measured_least  the least that plans were measured to take before learning last began anew; 0:
                  none was, or one was within the budget, or restrictions were relaxed since
    gradient_nbytes  the most bytes of gradients that a measured step has begun with
    skipped_steps    steps that were not measured because they began with fewer gradients than
                     that, or with fewer outputs of earlier forwards
    others_learn  another model that is not settled yet ran inside the last step
    infeasible    the strictest preset holds too much, or a step had more forwards: rehearse
    takes_anything  backward runs inside of forward, so that nothing can be rehearsed, or gradients
                    of before may go before it: steps are measured whatever they take, from a preset
                    on, until the smallest plans were
    has_fit       a step of this kind was measured within the budget
    proven        the calls that the plan was measured to fit for, until it is for the largest
    exceeded      elements of a call that was above the budget although a smaller one had shown, by
                  its scaled peak, that it would not be; 0: there was none
    withdrawn     codes of the plan were withdrawn since, so that it holds more than it predicts
    was_rehearsed the first plan is of a rehearsal, so that no uniform preset was measured to fit
    watched       what is known of the noise of codes

    Steps that differ from those before:

    unexpected    those that held more than the budget allows
    higher        settled ones that held more than the measured ones, and are measured, too
    only_largest  measure calls of the largest size alone: scaled measurements did not suffice. From
                  then on the largest call is the one with the most elements (`most`)
    before        the settled state before a step had more forwards, or saved more
    """

    options: "FitOptions"
    memory: "MemoryState"
    now: "Signature"
    largest: "Signature"
    phase: Phase = Phase.GUESSING
    plan: "Plan | None" = None
    chosen: "Chosen | None" = None
    given: "Plan | None" = None
    preset: int = SAFEST_EXACT
    headroom: Headroom = field(default_factory=Headroom)
    profile: "Profile | None" = None
    from_rehearsal: bool = False
    profiled: "Signature | None" = None
    profiled_at: int | None = None
    co_resident_nbytes: int = 0
    max_co_resident_nbytes: int = 0
    outputs_nbytes: int = 0
    margins: Margins = field(default_factory=Margins)
    is_recurrent: bool = False
    small_nbytes: int = 0
    rounds: int = 0
    tries: int = 0
    unmeasured: int = 0
    attempts: Attempts = field(default_factory=Attempts)
    measured_least: int = 0
    gradient_nbytes: int = 0
    skipped_steps: int = 0
    others_learn: bool = False
    infeasible: bool = False
    takes_anything: bool = False
    has_fit: bool = False
    proven: "tuple[Signature, ...]" = ()
    exceeded: int = 0
    withdrawn: bool = False
    was_rehearsed: bool = False
    watched: Watched = field(default_factory=Watched)
    unexpected: UnexpectedSteps = field(default_factory=UnexpectedSteps)
    higher: HigherSteps = field(default_factory=HigherSteps)
    only_largest: bool = False
    most: "Signature | None" = None
    before: ReplacedState | None = None

    def fresh(self) -> Self:
        """Returns a state without what was measured, as before the first forward."""
        return type(self)(
            self.options,
            self.memory,
            self.now,
            self.largest,
            headroom=self.headroom.forgotten(),
            is_recurrent=self.is_recurrent,
            small_nbytes=self.small_nbytes,
            takes_anything=self.takes_anything,
            measured_least=self.taken_nbytes,
            max_co_resident_nbytes=self.max_co_resident_nbytes,
            outputs_nbytes=self.outputs_nbytes,
            unexpected=replace(self.unexpected, is_last=False),
            higher=self.higher.forgotten(),
            only_largest=self.only_largest,
            most=self.most,
            before=self.before,
        )

    def back(self, before: "FitState") -> Self:
        """Returns the state with the setting of `before`, an earlier state of the same forwards.

        If its plan was still being verified, learning begins anew after the current step.
        """
        return replace(
            self.fresh(),
            phase=Phase.SETTLED,
            plan=before.plan,
            chosen=before.chosen,
            given=before.given,
            preset=before.preset,
            headroom=before.headroom,
            profile=before.profile,
            from_rehearsal=before.from_rehearsal,
            profiled=before.profiled,
            profiled_at=before.profiled_at,
            co_resident_nbytes=before.co_resident_nbytes,
            infeasible=before.infeasible,
            has_fit=before.settled,
            was_rehearsed=before.was_rehearsed,
            watched=before.watched,
            before=None,
        ).with_unexpected(is_last=self.unexpected.is_last or not before.settled)

    def with_unexpected(self, **fields: Any) -> Self:
        """Returns the state with some facts of unexpected steps replaced."""
        return replace(self, unexpected=replace(self.unexpected, **fields))

    def with_higher(self, **fields: Any) -> Self:
        """Returns the state with some facts of higher steps replaced."""
        return replace(self, higher=replace(self.higher, **fields))

    def with_watched(self, **fields: Any) -> Self:
        """Returns the state with some facts of the noise of codes replaced."""
        return replace(self, watched=replace(self.watched, **fields))

    def knowing(self, profile: "Profile") -> Self:
        """Returns the state with those facts of a profile that say which relaxations may help."""
        return replace(self, is_recurrent=profile.is_recurrent, small_nbytes=profile.small_nbytes)

    @property
    def has_many_small(self) -> bool:
        """True if tensors below min_nbytes hold so much that to plan them may help."""
        return self.small_nbytes > _MANY_SMALL * self.options.budget_nbytes

    def may_gain(self, fallbacks: "Fallbacks") -> bool:
        """Returns whether a relaxation may help but for classes that are not blamed."""
        layers = fallbacks.layers or fallbacks.stretches
        small = fallbacks.small and self.has_many_small
        always = fallbacks.rows or fallbacks.products or fallbacks.checkpoints
        return always or small or (layers and self.is_recurrent)

    def covers(self, signature: "Signature") -> bool:
        """Returns whether a call is no larger than the largest one."""
        if self.only_largest and self.largest.structure == signature.structure:
            return signature.numel <= self.largest.numel
        return self.largest.covers(signature)

    def with_call(self, signature: "Signature") -> Self:
        """Returns the state in which such a call is known, and covered by the largest one."""
        if self.largest.structure is None:
            return replace(self, largest=signature)
        if self.covers(signature):
            is_more = self.most is not None and signature.numel > self.most.numel
            return replace(self, most=signature) if is_more else self
        largest = signature if self.only_largest else self.largest.joined(signature)
        if largest == signature:
            return replace(self, largest=largest, most=None)
        known = (self.most or self.largest, signature)
        return replace(self, largest=largest, most=max(known, key=lambda one: one.numel))

    @property
    def settled(self) -> bool:
        """True if nothing more is to be learned."""
        return self.phase is Phase.SETTLED

    @property
    def is_blind(self) -> bool:
        """True if a plan was settled on although its last steps could not be measured."""
        return self.settled and self.plan is not None and self.unmeasured > 0

    @property
    def follows_given(self) -> bool:
        """True if the plan that is followed is the one that was given."""
        return self.plan is not None and self.plan is self.given

    @property
    def ran_at(self) -> int | None:
        """Preset that the step ran at, also under a plan that is as good as none; None: a plan."""
        if self.plan is None:
            return self.preset
        return PLAIN if self.plan.changes_nothing else None

    def has_profiled(self, preset: int) -> bool:
        """Returns whether a step at this preset was profiled, and was within the budget."""
        profile, budget_nbytes = self.profile, self.options.budget_nbytes
        return profile is not None and self.profiled_at == preset and profile.peak <= budget_nbytes

    @property
    def is_learned(self) -> bool:
        """True if anything is known of such steps."""
        return self.plan is not None or self.profile is not None or self.settled

    @property
    def may_rehearse(self) -> bool:
        """True if a forward that holds too much begins again, rehearsed; otherwise it climbs."""
        return self.phase in (Phase.GUESSING, Phase.WRITING, Phase.IDLE)

    @property
    def may_refuse(self) -> bool:
        """True if a forward that holds too much is refused.

        False once a step of this kind was measured within the budget: this one is an exception.
        False also while all is learned anew after such a step: the next may be an exception, too.
        Nor is one refused that follows a plan for another size: a plan of its own may hold less.
        """
        is_guess = self.plan is not None and self.is_scaled
        return not (self.has_fit or self.settled or self.unexpected.varies or is_guess)

    @property
    def may_be_outgrown(self) -> bool:
        """True if a forward that holds too much for its plan is planned anew, not refused.

        The plan was made for another forward, and never measured: this one may loop more often. A
        plan that was given is not dropped so: nobody would hear of it.
        """
        follows = self.plan is not None and not self.follows_given
        return self.may_refuse and follows and not self.attempts.taken

    @property
    def refuses_last_resort(self) -> bool:
        """True if the budget is refused where the last resort, a uniform preset, exceeds it, too.

        Else the setting with the lowest measured peak is kept: a preset was measured to fit once.
        """
        return self.was_rehearsed and not self.unexpected.varies

    @property
    def corrects(self) -> bool:
        """True if smaller plans are measured where no plan fits, rather than a budget refused."""
        return self.plan is not None and (self.rounds > 0 or self.from_rehearsal)

    @property
    def is_estimated(self) -> bool:
        """True if the plan was made from a forward alone, and no plan was measured before."""
        return self.from_rehearsal and not self.attempts.taken

    @property
    def taken_nbytes(self) -> int:
        """The least that a step was measured to take; 0: one was within the budget, or none was.

        A refusal that names less, by an estimate, could be followed by one by a measurement.
        """
        if self.has_fit:
            return 0
        least, before = self.attempts.least, self.measured_least
        return min(least.peak_nbytes, before or least.peak_nbytes) if least else before

    @property
    def waits_for_others(self) -> bool:
        """True if the peak may decrease by itself, because another model is still learning."""
        return self.others_learn and self.tries < _MAX_WAITS

    @property
    def ratio(self) -> float:
        """Size of the largest call relative to the profiled one."""
        if self.profile is None or self.profiled is None:
            return 1.0
        return self.largest.numel / self.profiled.numel

    @property
    def is_scaled(self) -> bool:
        """True if the call that was measured is not the largest: no ground to refuse."""
        return self.now != self.largest or self.ratio > 1

    @property
    def _outruns_profile(self) -> bool:
        return self.profiled is not None and self.now.numel > self.profiled.numel

    @property
    def recompute(self) -> frozenset[str]:
        """Modules that are recomputed in backward."""
        return frozenset() if self.plan is None else self.plan.recompute

    @property
    def margin_nbytes(self) -> int:
        """Bytes that plans like the current one leave free: with recomputed modules, or without."""
        return self.margins.recompute_nbytes if self.recompute else self.margins.plain_nbytes

    def with_margin(self, nbytes: int) -> Self:
        """Returns the state with another `margin_nbytes`."""
        if self.recompute:
            return replace(self, margins=replace(self.margins, recompute_nbytes=nbytes))
        return replace(self, margins=replace(self.margins, plain_nbytes=nbytes))

    def allowed_nbytes(self, guessed_nbytes: int) -> int:
        """Returns the bytes that may be held for backward.

        As long as no step was measured, the transients are guessed.
        """
        if self.takes_anything and self.phase in _MEASURES:
            return _ANY
        return self.headroom.allowed_nbytes(self.options, self.memory, self.plan, guessed_nbytes)

    def surely_allowed_nbytes(self) -> int:
        """Returns the bytes that may be held for backward, without guesses."""
        if self.takes_anything and self.phase in _MEASURES:
            return _ANY
        return self.headroom.surely_allowed_nbytes(self.options, self.memory, self.plan)

    def holds_too_much(self, max_nbytes: int) -> bool:
        """Returns whether a settled forward, which held so much at most, exceeds the budget."""
        if not (self.settled and self.has_fit):
            return False
        return self.headroom.is_exceeded(self.options, self.memory, max_nbytes)

    def is_higher(self, max_nbytes: int, ran_again: "Counter[str]") -> bool:
        """Returns whether a settled forward held so much that a step like it is to be measured.

        So is one in whose backward other modules run again, or save more, which is held then.
        """
        headroom = self.headroom
        if not (self.settled and headroom.held_nbytes) or self.higher.count >= _MAX_HIGHER:
            return False
        holds_more = headroom.is_surpassed(self.options, self.memory, max_nbytes)
        return holds_more or not ran_again <= self.higher.ran_again

    def saves_less(self, before_nbytes: int) -> bool:
        """Returns whether a step saved less than the one that made learning begin anew.

        Unknown where modules are recomputed, since what these save is not counted.
        """
        return not self.recompute and before_nbytes < _AS_MUCH * self.unexpected.nbytes

    def is_smaller(self, before_nbytes: int) -> bool:
        """Returns whether nothing is learned from a measured step because it saved less.

        Steps may alternate. After several in a row that saved less, the next one is learned from.
        """
        if self.settled or self.unexpected.smaller >= _MAX_SMALLER:
            return False
        return self.saves_less(before_nbytes)

    def waits_for_higher(self, held_nbytes: int, ran_again: "Counter[str]") -> bool:
        """Returns whether a measured step tells nothing: a settled one has held much more.

        Steps may alternate. After several in a row that held less, the next one is learned from.
        """
        higher = self.higher
        if higher.lower >= _MAX_SMALLER:
            return False
        least_nbytes = higher.held_nbytes - _LITTLE * self.options.budget_nbytes
        return held_nbytes < least_nbytes or not higher.others <= ran_again

    @property
    def added_gradient_nbytes(self) -> int:
        """Bytes by which more gradients stand than in the steps before; if fewer, negative."""
        nbytes = self.memory.gradient_nbytes - self.gradient_nbytes
        return 0 if abs(nbytes) <= _LITTLE * self.options.budget_nbytes else nbytes

    @property
    def gains_gradients(self) -> bool:
        """True if more gradients stand than in the steps before, and no plan was given.

        What those steps need is no ground to refuse the budget then, since a refusal would name
        less than is needed from now on.
        """
        return self.added_gradient_nbytes > 0 and not self.follows_given

    @property
    def begins_with_less(self) -> bool:
        """True if more gradients, or outputs of earlier forwards, stood in another step."""
        outputs_nbytes = self.outputs_nbytes - self.memory.outputs_nbytes
        fewer = outputs_nbytes > _LITTLE * self.options.budget_nbytes
        return fewer or self.added_gradient_nbytes < 0

    @property
    def waits_for_fuller_step(self) -> bool:
        """True if the step is not measured, since steps that begin with more bytes need more.

        Of micro-batches whose gradients accumulate, the first begins without gradients, and has
        the lowest peak.
        """
        if self.settled or self.phase is Phase.GUESSING or self.skipped_steps > _MAX_SKIPPED:
            return False
        return self.begins_with_less

    @property
    def is_large(self) -> bool:
        """True if the call tells by its peak what the largest one takes."""
        return self.now.numel >= _NEAR * self.largest.numel

    @property
    def is_unproven(self) -> bool:
        """True if the plan was measured to fit for smaller calls alone.

        Their peaks were scaled by numbers of elements. Attention takes more by the square of a
        length, and a graph by its edges.
        """
        if self.plan is None or not (self.settled and self.proven and self.is_large):
            return False
        return not any(one.covers(self.now) for one in self.proven)

    @property
    def wants_measuring(self) -> bool:
        """True if there is something to learn from the step that begins."""
        match self.phase:
            case Phase.SETTLED:
                return False
            case Phase.WATCHING:
                return True
            case _ if self.waits_for_fuller_step:
                return False
            case _ if self.only_largest:
                return self.now == self.largest or 0 < self.exceeded <= self.now.numel
            case Phase.IDLE:
                return self._outruns_profile
            case Phase.VERIFYING | Phase.SMALLEST:
                return self.is_large
        return True

    @property
    def wants_writing(self) -> bool:
        """True if the step that begins should be profiled, not just measured."""
        makes_states = self.memory.unallocated_state_nbytes > 0
        match self.phase:
            case Phase.LAST_RESORT | Phase.GIVEN | Phase.WATCHING:
                return False  # a profiled step needs more memory than its plan
            case Phase.GUESSING:  # the end of backward shows what it needs beside those states
                return makes_states
            case Phase.WRITING | Phase.IDLE:
                return True
        better = self.from_rehearsal or self._outruns_profile
        return makes_states or (better and self.may_be_profiled)

    @property
    def may_be_profiled(self) -> bool:
        """True if a step of the plan can be profiled, and is worth it.

        With modules that run again it cannot. Where a followed step fits by its estimate, which no
        step has refuted, and a profiled one would be far above the budget, it is only measured.
        """
        plan, budget_nbytes = self.plan, self.options.budget_nbytes
        if plan is None:
            return True
        fits = self.rounds == 0 and plan.peak <= budget_nbytes
        return not (plan.recompute or (fits and plan.profiled_peak > _PROFILED * budget_nbytes))
