"""The largest batch whose plan fits a budget: predicted from two small ones, confirmed by a run.

    1. forward and backward at two small batches, profiled                      (`TwoBatches`)
    2. the largest batch that has a plan, by bisection; if that is far from the two, once more with
       larger ones
    3. one measured run at that batch under its plan, and a timed one; if it takes more than the
       budget, or leaves a tenth of it, 2 and 3 again for that much less, or more, up to _MAX_RUNS
       times; what was seen to fit stays

No parameter and no optimizer state is touched: the states count as their class will make them, an
update's own workspace does not count. RNG, buffers and gradients are put back.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elbowroom._checks import check_scalar
from elbowroom.errors import BudgetTooSmall, PlanError
from elbowroom.fitting.measurement import Measurement
from elbowroom.fitting.model_state import ModelState
from elbowroom.fitting.options import FitOptions, MemoryState
from elbowroom.plan.make import AT_LEAST, LOSSY_HELPS, make_plan, too_small
from elbowroom.plan.plan import Plan
from elbowroom.plan.profile import Profile
from elbowroom.plan.site import SiteName
from elbowroom.runtime.attach import Around, Given, attach, detach
from elbowroom.runtime.context import Context
from elbowroom.runtime.exhaustion import is_out_of_memory
from elbowroom.runtime.saving import Saving
from elbowroom.tools.profiling import Profiling
from elbowroom.tools.untouched import check_keeps_gradients, untouched
from elbowroom.units import show_nbytes, show_seconds
from elbowroom.waiting import Tell, waiting


@dataclass(frozen=True)
class TwoBatches:
    """Profiles of one step at batches `one` < `two`. Raises PlanError if they are not alike.

        level(t, n) = fixed(t) + n slope(t)         fixed, slope from the profiles at n1 < n2

    A batch of n2 r in B bytes is a batch of n2 in B / r bytes, beside fixed / r that is held
    anyway: so the profile at n2 is only made to shrink what does not grow with the batch, and every
    storage keeps its shape. A storage that does not grow with the batch counts as if it did. Error:
    what is not linear, such as a workspace, or a loss over all pairs of a batch.
    """

    one: int
    two: int
    at_one: Profile
    at_two: Profile

    def __post_init__(self) -> None:
        if _outline(self.at_one) != _outline(self.at_two):
            raise PlanError(
                f"a step with batch {self.one} saves other tensors than one with batch {self.two}, "
                "so a larger batch cannot be predicted; use a loss and a make_batch that run the "
                "same ops for every batch size"
            )

    def profile(self, batch: int) -> Profile:
        """Returns the profile at `batch`, in units of batch / two.

        All bytes are to be multiplied by that.
        """
        ratio = batch / self.two

        def level(one: int, two: int) -> int:
            slope = (two - one) / (self.two - self.one)
            fixed = two - slope * self.two
            return int(fixed / ratio + slope * self.two)

        def levels(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(map(level, one, two))

        return replace(
            self.at_two,
            static=int(self.at_two.static / ratio),
            level=levels(self.at_one.level, self.at_two.level),
            floor=levels(self.at_one.floor, self.at_two.floor),
        )

    def plan(self, batch: int, budget: int, *, exact: bool | None) -> Plan:
        """Returns a plan for `batch` within `budget` bytes. Raises BudgetTooSmall."""
        ratio = batch / self.two
        try:
            plan = make_plan(self.profile(batch), int(budget / ratio), exact=exact)
        except BudgetTooSmall as error:
            parts = {name: ceil(nbytes * ratio) for name, nbytes in error.parts.items()}
            ways = (LOSSY_HELPS,) if exact else ()
            least, within = ceil(error.least_nbytes * ratio), f" with a batch of {batch}"
            raise too_small(budget, least, parts, AT_LEAST.format(within=within), *ways) from None
        return plan.grown(ratio, 0, budget)


def _outline(profile: Profile) -> tuple[int, int, list[list[SiteName]]]:
    """Returns what is saved, in order, and the moments, without sizes."""
    saves = [[save.site.name for save in storage.saves] for storage in profile.storages]
    return len(profile.level), profile.backward, saves


MakeBatch = Callable[[int], Any]
Loss = Callable[[nn.Module, Any], Tensor]
_SMALL = 2  # and twice as much: the first two batches
_FAR = 8  # a line is not trusted further than so many times the larger of the two
_MAX_RUNS = 4
_SLACK = 0.1  # of the budget: unused, it is worth another run
# Of what a plan was allowed: a step that ran out of memory does not tell by how much.
_CUT = 0.75
_RAN_OUT = 1 << 62
_MAX = 1 << 20


@dataclass(frozen=True)
class LargestBatch:
    """A batch that fits.

    predicted_nbytes    peak of its step, optimizer states counted: estimated
    measured_nbytes     likewise, measured; None where this thread cannot measure
    seconds_per_sample  of forward and backward under the plan: measured
    exact               its plan changes no bit of any gradient
    plan                that plan: `er.fit(..., plan=)` begins with it
    """

    batch: int
    budget_nbytes: int
    predicted_nbytes: int
    measured_nbytes: int | None
    seconds_per_sample: float
    exact: bool
    plan: Plan = field(repr=False)

    def __str__(self) -> str:
        measured = self.measured_nbytes
        return (
            f"batch {self.batch} fits {show_nbytes(self.budget_nbytes)}: peak predicted "
            f"{show_nbytes(self.predicted_nbytes)}, "
            f"measured {'-' if measured is None else show_nbytes(measured)}; "
            f"{show_seconds(self.seconds_per_sample)} a sample, "
            f"{'exact' if self.exact else 'lossy'}"
        )


def find_largest(
    model: nn.Module,
    make_batch: MakeBatch,
    loss: Loss,
    options: FitOptions,
    optimizer: Optimizer | None,
) -> LargestBatch:
    """Finds the largest batch that fits.

    Raises BudgetTooSmall where a batch of 1 has no plan; PlanError if backward would train.
    """
    check_keeps_gradients(model, "largest_batch")
    trial, budget = _BatchTrial(model, make_batch, loss, options, optimizer), options.budget_nbytes
    optimizers = trial.model_state.optimizers()
    with untouched(model, optimizers, "largest_batch"), waiting("the largest batch") as tell:
        tell(f"a step with batch {_SMALL} is written down")
        pair = trial.pair(_SMALL)
        batch = _largest(pair, budget, options.exact)
        if batch > _FAR * pair.two:
            tell(f"a step with batch {batch // _FAR} is written down")
            pair = trial.pair(batch // _FAR)
            batch = _largest(pair, budget, options.exact)
        return _confirmed(trial, pair, batch, options, tell)


def _confirmed(
    trial: "_BatchTrial", pair: TwoBatches, batch: int, options: FitOptions, tell: Tell
) -> LargestBatch:
    """Returns the largest batch that was seen to fit.

    error  by which the last run took more than its plan had said
    """
    budget, found = options.budget_nbytes, None
    allowed, error, was_over = budget, 0, False
    for _ in range(_MAX_RUNS):
        tell(f"batch {batch} is measured")
        plan = pair.plan(batch, allowed, exact=options.exact)
        peak = trial.peak(batch, plan)
        if peak is None or peak <= budget:
            seconds = trial.seconds(batch, plan) / batch
            predicted = plan.peak + error
            plan = replace(plan, budget=budget, peak=predicted)
            found = LargestBatch(batch, budget, predicted, peak, seconds, plan.exact, plan)
            if peak is None or was_over or budget - peak <= _SLACK * budget:
                return found
            error = peak - plan.peak
            allowed = budget - error
            larger = _largest(pair, allowed, options.exact)
            if larger <= batch:
                return found
            batch = larger
            continue
        if found is not None:
            return found
        was_over = True
        if peak < _RAN_OUT:
            error = max(error, peak - plan.peak)
            allowed = min(allowed, budget - error)
        else:
            allowed = int(_CUT * allowed)
        batch = min(batch, _corrected(pair, budget, allowed, options.exact))
    if found is not None:
        return found
    raise PlanError(
        f"{_MAX_RUNS} predictions were too optimistic for "
        f"{show_nbytes(options.budget_nbytes)}, the last for batch {batch}: the memory of this "
        "step does not grow evenly with the batch. Give a larger budget, or try batches with "
        "er.fit"
    )


class _BatchTrial:
    """Forward and backward of one model, at any batch."""

    def __init__(
        self,
        model: nn.Module,
        make_batch: MakeBatch,
        loss: Loss,
        options: FitOptions,
        optimizer: Optimizer | None,
    ) -> None:
        self.model_state = ModelState(model, optimizer)
        self._model, self._make_batch, self._loss, self._options = model, make_batch, loss, options

    def pair(self, batch: int) -> TwoBatches:
        """Profiles at `batch` and at twice that."""
        self._run(self._make_batch(batch))  # caches fill
        return TwoBatches(batch, 2 * batch, self._profile(batch), self._profile(2 * batch))

    def peak(self, batch: int, plan: Plan) -> int | None:
        """Measures the peak of one step under a plan; None if that cannot be measured.

        The optimizer has its states by then. Returns _RAN_OUT if there was no memory for the step.
        """
        data = self._make_batch(batch)  # is no part of a budget
        measurement = Measurement.start(self.model_state, self._memory(), writes=False)
        try:
            with _attached(self._model, _PlanRunner(plan, self._options.min_nbytes)):
                self._run(data)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return _RAN_OUT
        finally:
            if measurement is not None:
                measurement.end()
        return None if measurement is None else measurement.peak

    def seconds(self, batch: int, plan: Plan) -> float:
        """Measures the seconds of forward and backward under a plan."""
        data = self._make_batch(batch)
        with _attached(self._model, _PlanRunner(plan, self._options.min_nbytes)):
            start = time.perf_counter()
            self._run(data)
            return time.perf_counter() - start

    def _profile(self, batch: int) -> Profile:
        profiling = Profiling(
            self._model,
            self.model_state.optimizers(),
            lambda: None,
            min_nbytes=0,  # what is small now need not be in a large batch
            warm_up=0,
        )
        data = self._make_batch(batch)
        with _attached(self._model, profiling):
            self._run(data)
            profiling.finish()
        profile = profiling.profile
        if profile is None:
            raise PlanError(
                f"a step with batch {batch} cannot be profiled: it must run the model's forward "
                "once and return a loss that depends on it, on the main thread, without a profiler"
            )
        born = self.model_state.unallocated_state_nbytes()
        return replace(
            profile,
            static=profile.static + born,
            level=tuple(level + born for level in profile.level),
            floor=tuple(level + born for level in profile.floor),
        )

    def _memory(self) -> MemoryState:
        """Returns the memory as a step begins whose optimizer has its states."""
        memory = self.model_state.memory()
        return MemoryState(memory.static_nbytes + memory.unallocated_state_nbytes)

    def _run(self, data: Any) -> None:
        check_scalar(self._loss(self._model, data)).backward()  # type: ignore[no-untyped-call]
        self._model.zero_grad(set_to_none=True)


class _PlanRunner:
    """Runner of the forwards of a model that follows a given plan."""

    def __init__(self, plan: Plan, min_nbytes: int) -> None:
        self._plan, self._min_nbytes = plan, min_nbytes

    def passes(self, forward: Callable[[], Any]) -> Any:
        """Runs a forward without gradients as it is."""
        return forward()

    def run(self, model: nn.Module, forward: Callable[[], Any], given: Given) -> Any:
        with Saving(
            self._plan,
            min_nbytes=self._min_nbytes,
            context=Context(learns=False),
            recompute=self._plan.recompute,
        ):
            return forward()


def _largest(pair: TwoBatches, budget: int, exact: bool | None) -> int:
    """Returns the largest batch that has a plan; monotone, so bisection finds it."""

    def fits(batch: int) -> bool:
        try:
            pair.plan(batch, budget, exact=exact)
        except BudgetTooSmall:
            return False
        return True

    low, high = 0, pair.two
    while high < _MAX and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        pair.plan(1, budget, exact=exact)  # raises with the least that would do
    return max(low, 1)


def _corrected(pair: TwoBatches, budget: int, allowed: int, exact: bool | None) -> int:
    """Returns the largest batch within a part of the budget, as predictions were too optimistic."""
    try:
        return _largest(pair, allowed, exact)
    except BudgetTooSmall as error:
        least, ways = error.least_nbytes + budget - allowed, (LOSSY_HELPS,) if exact else ()
        least_is = AT_LEAST.format(within=" with a batch of 1")
        raise too_small(budget, least, error.parts, least_is, *ways) from None


@contextmanager
def _attached(model: nn.Module, around: Around) -> Iterator[None]:
    attach(model, around)
    try:
        yield
    finally:
        detach(model)
