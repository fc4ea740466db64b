"""Keeping a model's training under a budget of bytes: start safe, measure, plan, verify, watch.

    held before a step   weights, buffers, persistent gradients, optimizer states   counted
  + saved for backward   what the ledger holds                                      counted, chosen
  + transients           workspaces, restored tensors, fresh gradients              measured:
  <= budget                                                                         peak - the rest

1. The first forward starts at the safest exact rung of the ladder (`plan/ladder.py`). Transients
   are not known yet; one tensor of the largest size is set aside for them. If what is held comes
   closer to the budget than that, nothing is held any more, and forward runs twice again: once to
   be written down (RNG and buffers are put back), then by a plan whose backward is an estimate
   (`plan/rehearsal.py`). Where that cannot be measured (not on the main thread, or under somebody's
   profiler), forward climbs to a stricter rung on the spot instead.
2. That step is measured by the allocator. With its transients known, the mildest rung that fits is
   taken, and the next step is written down moment by moment.
3. From that profile a plan is made (`plan/make.py`), each tensor with an action of its own, and
   followed. The first step under it is measured: if it needs more than was predicted, the plan is
   made again with that much less, up to three times; then the uniform rung comes back for good.
4. From then on every forward is watched: a larger batch than before climbs for that step.

A budget that nothing meets raises BudgetTooSmall with the least that would do: in forward, as soon
as it is certain, or at the beginning of the step after the one that was measured. A forward that is
refused counts to its end without holding anything.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from elbowroom.control.fitted import FittedSaving
from elbowroom.control.owned import Owned
from elbowroom.errors import BudgetTooSmall
from elbowroom.measure.interval import Interval, may_measure
from elbowroom.measure.recording import Recording
from elbowroom.plan.ladder import EXACT_RUNGS, LOSSY_RUNGS, Rung, choose, held_nbytes
from elbowroom.plan.make import make_plan
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.plan.rehearsal import with_backward
from elbowroom.runtime.context import Context
from elbowroom.runtime.rewind import Rewind
from elbowroom.units import show_nbytes

_log = logging.getLogger("elbowroom")
_GENEROUS = 12  # so many largest tensors cover the transients of a step that is refused unmeasured
_SAFEST_EXACT = 1  # index of "exact" in every ladder
_CAREFUL = 0.03  # of what is not static is left free by a plan that was not measured, if it can be
_SAFE = 6
# What a rehearsal tries: exact or lossy, and how many largest tensors backward takes beside what is
# held (rehearsal.py).
_TRIES: dict[bool, tuple[tuple[bool | None, int], ...]] = {
    True: ((True, _SAFE), (True, 4), (True, 2), (True, 1)),
    False: ((True, _SAFE), (True, 3), (None, _SAFE), (None, 3), (None, 1)),
}
_SLACK = 0.1  # of what is not static: unused by a plan of a rehearsal, it is worth another plan
_MOST_ROUNDS = 3  # plans that are made again because a measurement broke the budget
_MOST_TRIES = 5  # forwards without a backward of their own, before a plan is given up


class Fitting:
    """The controller of one fitted model. It is called at every forward.

    peak_nbytes     of the last measured step, everything included
    peak_setting    what that step ran at: "plan", or the name of a rung
    highest_nbytes  the highest of all measured peaks
    profile         of the step that was written down
    rehearsed       its backward is an estimate
    plan            that is followed; None: all tensors are at `rungs[rung]`
    was_exact       no forward so far has held a lossy code
    """

    def __init__(
        self,
        model: nn.Module,
        budget_nbytes: int,
        optimizer: Optimizer | None,
        *,
        exact: bool | None,
        min_nbytes: int,
        offload: str | None = None,
    ) -> None:
        self._interval: Interval | None = None
        self._recording: Recording | None = None
        self.owned = Owned(model, optimizer)
        self.budget_nbytes = budget_nbytes
        self.exact = exact
        self.offload = offload
        self.min_nbytes = min_nbytes
        self.rungs: tuple[Rung, ...] = EXACT_RUNGS if exact else EXACT_RUNGS + LOSSY_RUNGS
        self.rung = _SAFEST_EXACT
        self.static_nbytes = 0  # held before this step
        self._unborn_nbytes = 0  # gradients and optimizer states that it will create
        self.context = Context()
        self.peak_nbytes: int | None = None
        self.peak_setting = ""
        self.highest_nbytes: int | None = None
        self.was_exact = True
        self.profile: Profile | None = None
        self.plan: Plan | None = None
        self._transient_nbytes: int | None = None
        self._measured_from = 0  # static bytes when the interval began
        self._unborn_states = True  # then the optimizer had no states yet
        self._margin_nbytes = 0  # by which plans have been too hopeful
        self._rounds = self._tries = 0
        self.rehearsed = False  # the plan is made of a rehearsal, not of a whole step
        self._outgrown = False  # the least rung has been measured, and is too much
        self._settled = False
        self._said = ""
        self._last: FittedSaving | None = None

    def __call__(self) -> FittedSaving:
        """A context for the forward that begins now."""
        self._begin()
        return self._context()

    def run(self, model: nn.Module, forward: Callable[[], Any]) -> Any:
        """One forward of the model."""
        self._begin()
        measured = self._interval is not None or self._recording is not None
        if self.plan is not None or self._settled or not measured:
            with self._context():
                return forward()
        rewind = Rewind(model)
        if not self._outgrown:
            with self._context(may_climb=False) as saving:
                out = forward()
            if not saving.too_much:
                return out
            del out
            rewind.back()
        self._stop()
        try:
            self._rehearse(forward)
        finally:
            rewind.back()
        self._measure()
        with self._context():
            return forward()

    def _begin(self) -> None:
        self.context.begin_step()
        self.static_nbytes = self.owned.nbytes
        self._unborn_nbytes = self.owned.unborn_gradient_nbytes() + self.owned.unborn_state_nbytes()
        self._learn()
        self._measure()

    def _context(self, *, may_climb: bool = True) -> FittedSaving:
        recorder = None if self._recording is None else self._recording.recorder
        return FittedSaving(self, recorder, may_climb=may_climb)

    def _rehearse(self, forward: Callable[[], Any]) -> None:
        """Write down a forward that holds nothing; plan the step by it."""
        recording = Recording.start(self.owned.tensors(), self.owned.device)
        if recording is None:
            return
        with FittedSaving(self, recording.recorder, counts=True):
            forward()
        seen = recording.finish_forward()
        if seen is None:
            return
        born = self.owned.unborn_gradient_nbytes(), self.owned.unborn_state_nbytes()
        for exact, transients in _TRIES[bool(self.exact)]:
            self.profile = with_backward(seen, *born, transients)
            plan = self._plan_for(self.profile, 0, exact=exact)
            if plan is not None:
                self._follow(plan, self.profile)
                self.rehearsed, self._outgrown = True, False
                return
        self._make_plan(with_backward(seen, *born, _SAFE), 0, exact=self.exact)

    @property
    def setting(self) -> str:
        """What forwards run at: "plan", or the name of a rung."""
        return (self.planned or self.rungs[self.rung]).name

    @property
    def planned(self) -> Rung | None:
        """The plan, as a setting for all sites."""
        return None if self.plan is None else Rung("plan", self.plan, self.plan.exact)

    @property
    def recompute(self) -> frozenset[str]:
        """Modules whose forward runs again in backward."""
        return frozenset() if self.plan is None else self.plan.recompute

    def allowed_nbytes(self, largest_nbytes: int) -> int:
        """What may be held for backward; as long as nothing is measured, a guess for the rest."""
        free = self.budget_nbytes - self.static_nbytes
        if self._transient_nbytes is None:
            return free - largest_nbytes
        return free - self._transient_nbytes + self._passing_nbytes

    @property
    def _passing_nbytes(self) -> int:
        """Forward may hold so much more for a moment: a norm's input until its ReLU has run.

        The plan knows; the ledger, which is asked here, does not.
        """
        return 0 if self.plan is None else max(line.nbytes for line in self.plan.lines)

    def surely_allowed_nbytes(self) -> int:
        """The same without guesses.

        More than this cannot be held, or the optimizer's states would not fit.
        """
        free = self.budget_nbytes - self.static_nbytes
        transient = (self._transient_nbytes or 0) - self._passing_nbytes
        return -1 if self._unborn_nbytes > free else free - transient

    def forward_ended(self, saving: FittedSaving) -> None:
        """Note what this forward saved; say what was chosen; refuse a budget that cannot be met."""
        if saving.too_much:
            return
        if saving.impossible:
            self._refuse(saving)
        self._last = saving
        self.was_exact = self.was_exact and saving.setting.exact
        self.rung = saving.rung if self._transient_nbytes is None else self.rung
        self._say(saving.setting)

    def finish(self) -> None:
        """The training is over: its last step counts as measured, if none with its setting was."""
        last, self._last = self._last, None
        if self._interval is not None and last is not None and self.peak_setting != self.setting:
            peak, self._interval = self._interval.stop(), None
            if peak is not None:
                self._note_peak(peak, last)
        self.close()

    def close(self) -> None:
        """End a measurement that runs. The model is not fitted any more."""
        self._stop()
        self._settled = True

    def _stop(self) -> None:
        for running in (self._interval, self._recording):
            if running is not None:
                running.close()
        self._interval = self._recording = None

    def __del__(self) -> None:
        self.close()  # the model died while a step was measured: the profiler must not run on

    def _measure(self) -> None:
        """Start to measure the step that begins, if there is something to learn from it."""
        if self._settled or self._interval is not None or self._recording is not None:
            return
        self._measured_from = self.static_nbytes
        self._unborn_states = self.owned.unborn_state_nbytes() > 0
        device = self.owned.device
        unknown = self.plan is None or (self.rehearsed and not self.plan.recompute)
        first_planned = self._unborn_states and self.plan is not None
        if first_planned or (
            unknown and self._transient_nbytes is not None and not self._unborn_states
        ):
            self._recording = Recording.start(self.owned.tensors(), device)
        else:
            self._interval = Interval.start(self.static_nbytes, device)

    def _learn(self) -> None:
        """At the beginning of a step: what did the last one need?"""
        last, self._last = self._last, None
        if last is None or self._settled:
            return
        if self._recording is not None:
            profile, self._recording = self._recording.finish(), None
            if self._unborn_states and self.plan is not None:
                if profile is not None:
                    born = max(0, self.static_nbytes - self._measured_from)
                    self._verify(last, profile.peak_with(born))
                return
            if profile is not None:
                self._note_peak(profile.peak, last)
            self._take_profile(profile, last)
        elif self._interval is not None:
            peak, self._interval = self._interval.stop(), None
            if peak is None:
                return
            self._note_peak(peak, last)
            if self.plan is None:
                self._relax(last, peak)
            else:
                self._verify(last, peak)

    def _note_peak(self, peak_nbytes: int, last: FittedSaving) -> None:
        self.peak_nbytes, self.peak_setting = peak_nbytes, last.setting.name
        self.highest_nbytes = max(peak_nbytes, self.highest_nbytes or 0)

    def _relax(self, last: FittedSaving, peak_nbytes: int) -> None:
        """After the first step: its transients are known now."""
        born_nbytes = max(0, self.static_nbytes - self._measured_from)  # the optimizer's states
        self._learn_transient(last, peak_nbytes)
        found = choose(self.rungs, last.storages, self.allowed_nbytes(0))
        fits = peak_nbytes + born_nbytes <= self.budget_nbytes
        if fits and (found is None or found > last.rung):
            found = last.rung
        if found is None and (peak_nbytes > self.budget_nbytes or not born_nbytes):
            if not may_measure(self.owned.device):
                self._refuse(last)
            self._outgrown = True  # no rung fits, but a plan may
        lossy = found is not None and not self.rungs[found].exact
        self.rung = last.rung if found is None or lossy else found  # a plan may do with exact ones

    def _take_profile(self, profile: Profile | None, last: FittedSaving) -> None:
        """The step was written down: plan, or stay at the rung that it ran at."""
        self._tries += 1
        if profile is None or last.climbed:
            self._settled = self._tries >= _MOST_TRIES
            return
        self.profile = profile
        self.rehearsed, self._margin_nbytes = False, 0
        self._learn_transient(last, profile.peak)
        self._plan(profile)

    def _plan(self, profile: Profile) -> None:
        margin = self._margin_nbytes
        careful = margin + int(_CAREFUL * (self.budget_nbytes - profile.static))
        try:
            plan = (
                self._plan_for(profile, careful, exact=True)
                or self._plan_for(profile, margin, exact=True)
                or self._plan_for(profile, careful, exact=self.exact)
                or self._make_plan(profile, margin, exact=self.exact)
            )
        except BudgetTooSmall as error:
            if self.rehearsed:
                self._replace_rehearsal(profile, error)
                return
            self.plan = None
            if profile.peak > self.budget_nbytes:
                raise
            self._settled = True  # the uniform rung has been seen to fit
            return
        if plan.changes_nothing:
            self.plan, self.rung, self._settled = None, 0, True
            return
        self._follow(plan, profile)

    def _replace_rehearsal(self, profile: Profile, error: BudgetTooSmall) -> None:
        """The plan of a rehearsal needs more than the budget, and no other plan of it needs less.

        Its next step is written down, so that what is said is true. That cannot be done while
        modules run again; then the estimate is all there is, and what it was wrong by.
        """
        assert self.plan is not None
        if not self.plan.recompute:
            self._margin_nbytes = 0
            self._follow(self.plan, profile)
            return
        least = error.least_nbytes
        raise BudgetTooSmall(
            f"budget {show_nbytes(self.budget_nbytes)} is below the {show_nbytes(least)} that this "
            "step needs at the least (estimated, and corrected by a measured step). Halve the "
            f"batch, or give budget={least}.",
            least_nbytes=least,
        ) from error

    def _follow(self, plan: Plan, profile: Profile) -> None:
        self.plan = plan
        other = plan.peak + self._margin_nbytes - profile.static - plan.held_nbytes
        self._transient_nbytes = max(0, other)

    def _plan_for(self, profile: Profile, margin: int, *, exact: bool | None) -> Plan | None:
        try:
            return self._make_plan(profile, margin, exact=exact)
        except BudgetTooSmall:
            return None

    def _make_plan(self, profile: Profile, margin: int, *, exact: bool | None) -> Plan:
        return make_plan(
            profile, self.budget_nbytes, margin=margin, exact=exact, offload=self.offload
        )

    def _verify(self, last: FittedSaving, peak_nbytes: int) -> None:
        """A step under the plan was measured."""
        assert self.plan is not None
        assert self.profile is not None
        _log.info(
            "budget %s: peak predicted %s, measured %s",
            *map(show_nbytes, (self.budget_nbytes, self.plan.peak, peak_nbytes)),
        )
        self._tries += 1
        if last.climbed or (self._unborn_states and peak_nbytes <= self.budget_nbytes):
            # A step that makes the optimizer's states has a peak of its own: the next one tells.
            self._settled = self._tries >= _MOST_TRIES
            return
        self._learn_transient(last, peak_nbytes)
        too_hopeful = peak_nbytes - self.plan.peak
        slack = self.budget_nbytes - peak_nbytes
        useful = self.rehearsed and slack > _SLACK * (self.budget_nbytes - self.profile.static)
        if slack >= 0 and not (useful and self._rounds < _MOST_ROUNDS):
            self._settled = True
            return
        if self._rounds < _MOST_ROUNDS:
            self._rounds += 1
            self._margin_nbytes = too_hopeful
            self._plan(self.profile)
            return
        self.plan, self._settled = None, True
        _log.warning(
            "budget %s: the plan needs %s after %d corrections, so all tensors are at rung '%s'",
            show_nbytes(self.budget_nbytes),
            show_nbytes(peak_nbytes),
            _MOST_ROUNDS,
            self.rungs[self.rung].name,
        )

    def _learn_transient(self, last: FittedSaving, peak_nbytes: int) -> None:
        rest = peak_nbytes - self._measured_from - last.ledger.after_nbytes
        self._transient_nbytes = max(0, rest)

    def _refuse(self, saving: FittedSaving) -> None:
        step = saving.storages
        least_rung = min(self.rungs, key=lambda rung: held_nbytes(rung, step))
        saved = held_nbytes(least_rung, step)
        other, kind = self._transient_nbytes, "measured"
        if other is None:  # a guess must be named generously
            other, kind = self._unborn_nbytes + _GENEROUS * saving.largest_nbytes, "estimated"
        least = self.static_nbytes + saved + other
        parts = ", ".join(
            f"{name} {show_nbytes(size)}" for name, size in self._parts(saved, other) if size
        )
        lossy_helps = held_nbytes(LOSSY_RUNGS[-1], step) < saved
        more = "Allow lossy codes with exact=None, or h" if lossy_helps else "H"
        raise BudgetTooSmall(
            f"budget {show_nbytes(self.budget_nbytes)} is below the {show_nbytes(least)} that this "
            f"step needs at rung '{least_rung.name}' ({kind}): {parts}. "
            f"{more}alve the batch, or give budget={least}.",
            least_nbytes=least,
        )

    def _parts(self, saved_nbytes: int, other_nbytes: int) -> list[tuple[str, int]]:
        weight_nbytes = self.owned.weight_nbytes
        return [
            ("weights", weight_nbytes),
            ("gradients and optimizer states", self.static_nbytes - weight_nbytes),
            ("saved for backward", saved_nbytes),
            ("transients and what the first step will create", other_nbytes),
        ]

    def _say(self, chosen: Rung) -> None:
        """One line when the setting changes.

        At WARNING, which Python shows by default, when it becomes lossy.
        """
        if chosen.name == self._said:
            return
        was_lossy = self._said not in ("", *(rung.name for rung in EXACT_RUNGS))
        self._said = chosen.name
        kind = "exact" if chosen.exact else "lossy, because the exact rungs do not fit"
        _log.log(
            logging.INFO if chosen.exact or was_lossy else logging.WARNING,
            "budget %s: saved tensors at rung '%s' (%s)",
            show_nbytes(self.budget_nbytes),
            chosen.name,
            kind,
        )
