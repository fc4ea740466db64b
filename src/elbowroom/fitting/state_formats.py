"""In which format the states of state="auto" optimizers are held: chosen together with the plan.

    1. fp32, if an exact plan fits beside it
    2. else, of fp32, int8 and int4, each with the plan that it leaves room for, the step that is
       predicted to be the fastest: its seconds, those of the update in that format, and noise in
       seconds, of codes and of states alike

exact=True stops after 1; exact=False begins with 2. int8 and int4 are candidates only where no
milder one needs nothing to be done. A format that other plans of the model were made for is not
made milder; nor is one that was loaded (`optim/auto.py`).

States that are still to be born are born in fp32 if they fit beside weights and gradients, with
room to be converted later; else in the first format that does. So the choice is made when a plan
is, of what was measured, and fp32 states that it has no room for are converted then, before the
forward. They may be made fp32 again, when a measured step shows that there is room.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import TypeGuard

import torch
from torch.optim import Optimizer

from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.fitting.attempts import Candidate, Chosen
from elbowroom.fitting.messages import say_states
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.fitting.planner_settings import PlannerSettings
from elbowroom.fitting.refusals import without_frames
from elbowroom.measure.timing import least_s
from elbowroom.optim import SGD, AdamW, Lion
from elbowroom.optim.auto import auto_groups, held_as, hold, nbytes_as
from elbowroom.optim.base import EncodedOptimizer
from elbowroom.optim.formats import Group
from elbowroom.optim.release import Complete
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.plan.resident_bytes import ResidentBytes

CHOICES = ("fp32", "int8", "int4")  # the mildest first; not coat, int4x2: see docs/optim/states.md
_CHOSEN = {
    True: "",  # the mildest is never lossier than what there was
    None: "lossy, because the exact plans do not fit",
    False: "lossy, and cheaper than what else fits",
}
Around = Callable[[], AbstractContextManager[object]]


class StateFormats:
    """Optimizer states of a fitted model whose format may be chosen.

    around  makes a context in which states are converted
    """

    def __init__(
        self,
        optimizers: Callable[[], list[Optimizer]],
        resident: Callable[[], ResidentBytes | None],
    ) -> None:
        """Both callables are evaluated each time they are needed."""
        self._optimizers, self._resident = optimizers, resident
        self._needs: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        self.around: Around = nullcontext

    def candidates(self, profile: Profile, owner: object) -> list[Candidate]:
        """Returns the state formats that the planner `owner` may choose from, the mildest first."""
        if profile.standing is None or not self.auto():
            return [Candidate("", profile)]
        resident = self._resident()  # counted over all parameters
        if resident is None:
            return [Candidate("", profile)]
        others = [CHOICES.index(state) for one, state in self._needs.items() if one is not owner]
        found: list[Candidate] = []
        least = None
        for state in CHOICES[max(others, default=0) :]:
            nbytes = self._nbytes_as(state)
            if least is None or nbytes < least:
                least = nbytes
                found.append(self._candidate(state, profile, resident))
        return found

    def choose(
        self, profile: Profile, owner: object, settings: PlannerSettings, *, estimated: bool = False
    ) -> Chosen:
        """Returns a plan and a state format by the rule above.

        Raises BudgetTooSmall, of the candidate that needs the least.

        estimated: the profile is; then states stay as they are, if any plan fits beside them
        """
        candidates, exact = self.candidates(profile, owner), settings.options.exact
        if exact is None and len(candidates) > 1:
            plan = settings.exact_plan(candidates[0].profile)
            if plan is not None:
                return Chosen(candidates[0], plan)
        if exact:
            candidates = candidates[:1]
        elif estimated and len(candidates) > 1:
            now = CHOICES.index(self._now())
            candidates = sorted(candidates, key=lambda one: CHOICES.index(one.state) < now)
        found: list[Chosen] = []
        refusals: list[BudgetTooSmall] = []
        for candidate in candidates:
            try:
                found.append(Chosen(candidate, settings.best_plan(candidate.profile)))
            except BudgetTooSmall as error:
                refusals.append(without_frames(error))
                continue
            if estimated or found[-1].plan.changes_nothing:
                break  # with fewer bytes there is nothing to win
        if not found:
            refusals.sort(key=lambda error: -error.least_nbytes)
            raise refusals.pop()  # of what the frame holds, none is the error that it raises
        return found[0] if len(found) == 1 else min(found, key=self._cost_s)

    def smallest(
        self, profile: Profile, owner: object, settings: PlannerSettings, *, recompute: bool = True
    ) -> Chosen:
        """Returns the plan of the least predicted peak, for the user's budget.

        recompute: modules may be recomputed
        """
        one, exact = self._least(profile, owner, settings), settings.options.exact
        # It is measured, so the search for the least peak is near enough.
        near = replace(settings, finest=settings.options.budget_nbytes)
        return Chosen(one, near.smallest_plan(one.profile, exact=exact, recompute=recompute))

    def bound(
        self, profile: Profile, owner: object, settings: PlannerSettings, *, recompute: bool
    ) -> float:
        """Returns a peak in bytes below which `smallest` hardly comes; 0: none is known."""
        one = self._least(profile, owner, settings)
        return settings.least_bound(one.profile, recompute=recompute)

    def _least(self, profile: Profile, owner: object, settings: PlannerSettings) -> Candidate:
        """Returns the candidate that needs the fewest bytes, of those that the options allow."""
        return self.candidates(profile, owner)[0 if settings.options.exact else -1]

    def take(self, chosen: Chosen, owner: object, options: FitOptions) -> Chosen:
        """Holds auto states in the format that the plan was made for, and returns the plan.

        From now on the planner `owner` needs that format. The plan gets the bytes that are resident
        then.
        """
        one = chosen.candidate
        if not one.state:
            return chosen
        self._needs[owner] = one.state
        self._hold(one.state, options, _CHOSEN[options.exact])
        resident = self._resident()
        profile = replace(one.profile, standing=resident)
        return Chosen(replace(one, profile=profile), replace(chosen.plan, standing=resident))

    def begin_with(self, given: Plan, owner: object, options: FitOptions) -> None:
        """Holds states as a given plan was made for, if that needs fewer bytes.

        owner: the planner that follows it.
        """
        state = "" if given.standing is None else given.standing.states
        if options.exact or state not in CHOICES or not self.auto():
            return
        if CHOICES.index(state) > CHOICES.index(self._now()):
            self._needs[owner] = state
            self._hold(state, options, "lossy, as the plan that was given has them")

    def make_room(self, options: FitOptions, memory: MemoryState) -> bool:
        """Gives states that will be created the mildest format that fits; True if that is another.

        memory: as they would be born now
        """
        if options.exact or not memory.unallocated_state_nbytes or not self.auto():
            return False
        free, now = (
            options.budget_nbytes - memory.static_nbytes - memory.unallocated_nbytes,
            self._now(),
        )
        for state in CHOICES[CHOICES.index(now) :]:
            saved = self._nbytes_as(now) - self._nbytes_as(state)
            if free + saved >= self._converting_nbytes(state):
                break
        why = "lossy, because those of fp32 do not fit beside weights and gradients"
        return self._hold(state, options, why)

    def lossy_helps(self) -> str:
        """Returns what to type if exact=True leaves no room, or ""."""
        could_shrink = self._nbytes_as(CHOICES[-1]) < self._nbytes_as(self._now())
        return "allow lossy codes and optimizer states with exact=None" if could_shrink else ""

    def auto(self) -> list[EncodedOptimizer]:
        """Returns the optimizers whose format is chosen here."""
        return [one for one in self._optimizers() if is_auto(one)]

    def _nbytes_as(self, state: str) -> int:
        return sum(nbytes_as(one, state) for one in self.auto())

    def _now(self) -> str:
        """Returns the format that auto states are held in."""
        held = [(one, group) for one in self.auto() for group in auto_groups(one)]
        for state in CHOICES:
            if all(held_as(one, group, state) == group["state"] for one, group in held):
                return state
        return CHOICES[-1]

    def _candidate(self, state: str, profile: Profile, now: ResidentBytes) -> Candidate:
        """Returns the profiled step as if states had been held so.

        now: what is resident at this moment.
        """
        assert profile.standing is not None
        nbytes = now.states_nbytes - self._nbytes_as(self._now()) + self._nbytes_as(state)
        shifted = replace(
            profile.shifted(nbytes - profile.standing.states_nbytes),
            standing=replace(now, states_nbytes=nbytes),
        )
        return Candidate(state, shifted, self._noise(state))

    def _cost_s(self, one: Chosen) -> float:
        """Returns the seconds of a step and its update, and those that its noise is worth.

        Costs are only compared, so of the update only the difference between formats matters.
        """
        noise = one.plan.noise + one.candidate.noise
        return (
            one.plan.seconds
            + noise * one.candidate.profile.seconds
            + self._update_s(one.candidate.state)
        )

    def _noise(self, state: str) -> float:
        """Returns the noise of the worst param group if states are held in this format.

        An update is mostly the noise of mini-batches, so it is priced as if codes had added as much
        to the gradient.
        """
        return max(
            update_noise(one.rule, group, held_as(one, group, state))
            for one in self.auto()
            for group in auto_groups(one)
        )

    def _update_s(self, state: str) -> float:
        """Returns the seconds of the update of all auto states in this format."""
        seconds = 0.0
        for one in self.auto():
            for group in auto_groups(one):
                held = held_as(one, group, state)
                trained = [p for p in group["params"] if p.requires_grad]
                seconds += sum(p.numel() * update_s(one.rule, held, p.device.type) for p in trained)
        return seconds

    def _converting_nbytes(self, state: str) -> int:
        """Returns the bytes that it may take to convert the largest parameter's states from fp32.

        It takes the new states, and less than the fp32 ones on the way (`optim/transcode.py`).
        """
        if state != CHOICES[0]:
            return 0  # rather in a milder format than with room for what may never be
        sizes = (
            one.state_nbytes(p, "fp32") + one.state_nbytes(p, held_as(one, group, CHOICES[-1]))
            for one in self.auto()
            for group in auto_groups(one)
            for p in group["params"]
        )
        return max(sizes, default=0)

    def _hold(self, state: str, options: FitOptions, why: str) -> bool:
        before = self._now()
        if state == before:
            return False
        with self.around():
            converted = sum(hold(one, state) for one in self.auto())
        milder = CHOICES.index(state) < CHOICES.index(before)
        say_states(
            options,
            state,
            "there is room for it" if milder else why,
            nbytes=self._nbytes_as(state),
            before_nbytes=self._nbytes_as(before),
            converted=converted,
            warns=not milder and before == CHOICES[0],
        )
        return True


def is_auto(optimizer: Optimizer) -> TypeGuard[EncodedOptimizer]:
    """Returns whether the format of its states is chosen by `fit`."""
    return isinstance(optimizer, EncodedOptimizer) and bool(auto_groups(optimizer))


def check_alone(optimizer: Optimizer | None, others: Iterable[StateFormats]) -> None:
    """Raises PlanError for an auto optimizer that belongs to another fitted model."""
    if any(known is optimizer for other in others for known in other.auto()):
        raise PlanError(
            "this optimizer has state='auto', and its format is chosen for another fitted model "
            "already; give it a format of its own, as in state='int8', or one optimizer to each "
            "model, or er.release the other model"
        )


_ADAMW = {"coat": 1.5e-3, "int8": 2.5e-4, "int4": 2.5e-2, "int4x2": 0.15}  # beta2 = 0.95
_ADAMW_SLOW = {"coat": 5e-3, "int8": 2.5e-3, "int4": 0.3, "int4x2": 0.6}  # 0.999
_LION = {"coat": 8e-2, "int8": 4e-2, "int4x2": 1.1}  # 0.99
_SGD = {"coat": 1e-3, "int8": 2e-4, "int4x2": 0.13}  # momentum 0.9
_SGD_SLOW = {"coat": 1.5e-2, "int8": 2.5e-3, "int4x2": 5.0}  # 0.99
_FAST_BETA2, _FAST_MOMENTUM = 0.95, 0.9


def update_noise(rule: str, group: Group, state: str) -> float:
    """Returns the noise of an update by this rule if a param group's states are held as `state`.

    Each step rounds the result of the step before, so errors accumulate for as long as a moment's
    decay remembers: to tens or hundreds of times the error of one encoding. Figures are the worst
    of a GPT and a ResNet-18 after 400 to 1200 steps, rounded up
    (benchmarks/results/running-states.json).
    """
    if state == "fp32":
        return 0.0
    if rule == "lion":
        return _LION[state]
    if rule == "sgd":
        return (_SGD if group["momentum"] <= _FAST_MOMENTUM else _SGD_SLOW)[state]
    return (_ADAMW if group["betas"][1] <= _FAST_BETA2 else _ADAMW_SLOW)[state]


_KINDS: dict[str, type[AdamW | Lion | SGD]] = {kind.rule: kind for kind in (AdamW, Lion, SGD)}
_ROWS, _ROW = 1 << 10, 1 << 10


@cache
def update_s(rule: str, state: str, device_type: str) -> float:
    """Seconds an element of one step of this rule ("adamw") with states in this format.

    On 2^20 elements, the best of a few runs: 16 MiB for a moment. What the formats differ by is
    0.50 ns an element so, and 0.42 on 2^23 (fp32 and int8 of AdamW, EPYC, two cores, best of nine).
    """
    device = torch.device(device_type)
    p = torch.nn.Parameter(torch.zeros(_ROWS, _ROW, device=device))
    grad = torch.ones_like(p)
    optimizer = _KINDS[rule]([p], state=state)
    (group,) = optimizer.param_groups
    return least_s(lambda: optimizer.apply([Complete(0, group, p, grad)]), device) / p.numel()
