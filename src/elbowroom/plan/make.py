"""Makes a plan from a profile: builds the problem, solves it, and names an action for each site."""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import inf

from elbowroom.codecs import Codec
from elbowroom.errors import BudgetTooSmall
from elbowroom.plan.build_problem import BuiltProblem, as_planned, build_problem
from elbowroom.plan.coarse import checked
from elbowroom.plan.menu import KEEP, action_name, preset_named
from elbowroom.plan.places import with_codes
from elbowroom.plan.plan import ExplainedLine, Plan, PlanEntry
from elbowroom.plan.problem import (
    Choice,
    Item,
    Solution,
    added_variance,
    cost,
    keep_all,
    levels,
    recomputed_items,
    region_variance,
)
from elbowroom.plan.profile import Profile, Storage
from elbowroom.plan.reasons import Reasons
from elbowroom.plan.registered import still_used
from elbowroom.plan.remedies import codes_help
from elbowroom.plan.restored import spared
from elbowroom.plan.shared import share
from elbowroom.plan.site import RECOMPUTE, Site, SiteName
from elbowroom.plan.solve import BASELINES, WITHOUT_CODES, Limits, lowered, peak, solve
from elbowroom.units import budget_argument, show_nbytes

LOSSY_HELPS = "allow lossy codes with exact=None"
_SEARCHES = 16  # for a lower least peak
MORE_NOISE = "allow more noise"
AT_LEAST = "that this step needs{within} at the least (estimated)"


def make_plan(
    profile: Profile,
    budget: int,
    *,
    margin: int = 0,
    exact: bool | None = None,
    recompute: bool = True,
    offload: str | None = None,
    noise: float | None = None,
    solver: str = "auto",
    codecs: tuple[Codec, ...] | None = None,
    lossy_helps: str = LOSSY_HELPS,
    helps_anyway: bool = False,
    least_is: str = AT_LEAST,
    finest: float = 1,
    takes_least: bool = False,
) -> Plan:
    """The plan that adds the fewest seconds within `budget` bytes.

    margin     bytes of the budget that are left free
    exact      True: exact actions only; None: lossy codes only if exact actions do not suffice;
               False: whatever is cheapest
    recompute  modules may run a second time
    offload    "file" or "host": where tensors may be moved to; None: nowhere
    noise      variance that codes may add to the gradient, as a share of that of mini-batches;
               None: as much as the budget asks for
    codecs     the settings of codes that are allowed; None: all that are registered
    finest     precision, in bytes, of the search for the smallest sufficient budget where no plan
               fits; inf: no search is made, and the error names no budget and no remedy
    takes_least  where no plan fits, the one of the smallest sufficient budget is returned

    Raises BudgetTooSmall, which names the smallest sufficient budget, described by `least_is`. With
    exact=True it adds `lossy_helps`, which says what to allow, if codes could help; and
    `helps_anyway`, whether or not they could.
    """
    most = 0 if offload is None else max((s.nbytes for s in profile.storages), default=0)
    in_flight = most
    variance, codecs = inf if noise is None else noise, still_used(codecs)
    built = build_problem(profile, exact=True, recompute=recompute, offload=offload)
    asks = finest < inf
    least = bool(exact) if asks else None  # how little would do with exact actions alone
    found = solve(
        built.problem, budget - margin - in_flight, exact=True, solver=solver, least=least
    )
    if offload is not None and not found.feasible:  # where all stays, nothing is on its way
        staying = build_problem(profile, exact=True, recompute=recompute, offload=None)
        other = solve(staying.problem, budget - margin, exact=True, solver=solver, least=least)
        if other.feasible or (exact and other.peak < found.peak + in_flight):
            built, found, in_flight = staying, other, 0
    if exact is False or not (exact or found.feasible):
        freely, other, flies = with_codes(
            profile,
            budget - margin,
            most,
            recompute=recompute,
            offload=offload,
            codecs=codecs,
            variance=variance,
            solver=solver,
            least=asks or None,
        )
        if not found.feasible or (
            other.feasible
            and cost(freely.problem, other.choice) < cost(built.problem, found.choice)
        ):
            built, found, in_flight = freely, other, flies
    margin += in_flight  # of what is moved, one tensor or code is on its way at any time
    if found.feasible:
        return _plan(profile, built, found, budget - margin + in_flight, in_flight, variance)
    if not asks:  # nobody reads what it says
        raise unplanned(budget, found.peak + margin)
    refusal = _Refusal(profile, built, bool(exact), noise, solver, helps_anyway)
    least_nbytes, found = refusal.least(found, variance, max(int(finest), 1))
    if takes_least:
        return _plan(profile, built, found, found.peak + in_flight, in_flight, variance)
    codes_do = exact and (helps_anyway or codes_help(profile, built, found.choice, codecs=codecs))
    ways = (lossy_helps,) if codes_do else ()
    raise refusal.error(found, budget, least_nbytes + margin, least_is, ways)


def unplanned(budget: int, peak: int) -> BudgetTooSmall:
    """Returns the error for who asks for a plan and for nothing else: it names no least budget."""
    said = f"no plan was found with which this step fits into {show_nbytes(budget)}"
    return BudgetTooSmall(said, least_nbytes=peak)


def _least(found: Solution, search: Callable[[int], Solution], finest: int) -> tuple[int, Solution]:
    """Returns the least budget and its solution: the same search finds none `finest` bytes below.

    found  where the search has ended, without one that fits
    """
    least, step = found.peak, finest
    for _ in range(_SEARCHES):
        other = search(least - step)
        if other.feasible:  # by luck, as no search proves the least peak of many codes
            least, found = least - step, other
            if (tighter := search(other.peak)).feasible:
                least, found = other.peak, tighter
            step = max(least >> 5, finest)
        elif step == finest:
            break
        else:
            step = max(step >> 3, finest)
    return least, found


def plain_peak(profile: Profile) -> int:
    """The peak of plain autograd, in bytes: measured if the profiled step was that."""
    problem = build_problem(profile, exact=True, recompute=False).problem
    level = levels(problem, keep_all(problem))
    for moment, nbytes in profile.spared.items():
        level[moment] += nbytes
    return int(level.max(initial=0))


@dataclass(frozen=True)
class _Refusal:
    """What a refusal of a budget depends on, besides the budget: see `make_plan`."""

    profile: Profile
    built: BuiltProblem
    exact: bool
    noise: float | None
    solver: str
    helps_anyway: bool

    def least(self, found: Solution, variance: float, finest: int) -> tuple[int, Solution]:
        """Returns the least budget, in bytes, and its solution.

        found: where the search has ended, without one that fits
        """
        if self.solver in BASELINES:
            return found.peak, found
        problem, lowest = self.built.problem, found.choice

        def search(budget: int) -> Solution:
            other = solve(
                problem,
                budget,
                variance=variance,
                exact=self.exact,
                solver=self.solver,
                lowest=lowest,
            )
            return checked(self.profile, self.built, other)

        return _least(found, search, finest)

    def error(
        self, found: Solution, budget: int, least: int, least_is: str, ways: tuple[str, ...]
    ) -> BudgetTooSmall:
        """Returns the error that says what takes the room, and what to type next.

        ways: out, for exact plans
        """
        problem = self.built.problem
        if self.solver in BASELINES:
            others = () if self.solver in WITHOUT_CODES else ways
            ways = (f"leave out solver='{self.solver}', with which more is needed", *others)
        level = levels(problem, found.choice)
        moment = int(level.argmax())
        static = min(self.profile.static, found.peak)
        saved = int(level[moment]) - problem.base[moment]
        parts = {
            "weights and what else is held before the step": static,
            "gradients and workspaces": max(least - static - saved, 0),
            "saved for backward": saved,
        }
        within, all_ways = "", [*ways, "halve the batch"]
        if static >= budget:  # not even a step of no samples, that saves nothing, would fit
            all_ways = [*ways] if self.helps_anyway else []
        allows_codes = self.noise is not None and not self.exact
        freely = lowered(problem, Limits(0), found.choice) if allows_codes else found.choice
        if peak(problem, freely) < found.peak:
            within = f" with noise={self.noise:g}"
            more = solve(problem, budget - least + found.peak)
            enough = ceiled(added_variance(problem, more.choice)) if more.feasible else ""
            all_ways.insert(0, f"allow noise={enough}" if enough else MORE_NOISE)
        return too_small(budget, least, parts, least_is.format(within=within), *all_ways)


def ceiled(noise: float) -> str:
    """Returns a limit of noise of two digits that is not smaller."""
    rounded = f"{noise:.2g}"
    return rounded if float(rounded) >= noise else f"{1.05 * noise:.2g}"


def too_small(
    budget: int, least: int, parts: Mapping[str, int], least_is: str, *ways: str
) -> BudgetTooSmall:
    """Returns the error for a budget that is too small.

    least_is: what the least is, in words; ways: out, beside a larger budget.
    """
    what = ", ".join(f"{name} {show_nbytes(size)}" for name, size in parts.items() if size > 0)
    advice = ", or ".join((*ways, f"give {budget_argument(least)}"))
    return BudgetTooSmall(
        f"budget {show_nbytes(budget)} is below the {show_nbytes(least)} {least_is}: "
        f"{what}. {advice[0].upper()}{advice[1:]}.",
        least_nbytes=least,
        parts=parts,
    )


def _plan(
    profile: Profile,
    built: BuiltProblem,
    found: Solution,
    budget: int,
    in_flight: int,
    variance: float,
) -> Plan:
    problem, choice = built.problem, found.choice
    shared = share(profile, built, choice, max(budget - in_flight, found.peak))
    sites = dict(_sites(profile, built, choice, shared.saved_s))
    reasons = Reasons(problem, choice, max(budget - in_flight, found.peak), variance)
    lines = (
        *_lines(
            as_planned(profile, built.apart, exact=built.exact),
            built,
            choice,
            shared.saved_s,
            reasons,
        ),
        *_recomputed(profile, built, choice, reasons),
    )
    return Plan(
        budget=budget,
        peak=max(found.peak, shared.peak) + in_flight,
        plain_peak=plain_peak(profile),
        seconds=problem.seconds + found.slowdown_s - sum(shared.saved_s.values()),
        plain_seconds=problem.seconds,
        exact=built.exact or (all(line.error == 0 for line in lines) and not _takes_turns(profile)),
        solver=found.solver,
        sites=sites,
        recompute=frozenset(problem.regions[r].name for r in choice.recomputed),
        lines=lines,
        watched=0 if profile.noise is None else profile.noise.steps,
        standing=profile.standing,
        parted_nbytes=_parted_nbytes(profile, built, choice),
        unlisted_nbytes=profile.unlisted_nbytes,
        composes_attention=profile.composes_attention,
        profiled_peak=_profiled_peak(built, choice) + in_flight,
    )


def _profiled_peak(built: BuiltProblem, choice: Choice) -> int:
    """Returns the peak of a step in which no op reads what is held of a tensor."""
    restoring = tuple(map(_restoring, built.problem.items, choice.options))
    return int(levels(replace(built.problem, items=restoring), choice).max(initial=0))


def _restoring(item: Item, chosen: int) -> Item:
    before, one, after = item.options[:chosen], item.options[chosen], item.options[chosen + 1 :]
    if not (item.spared or one.direct):
        return item
    return replace(item, spared=(), options=(*before, replace(one, direct=()), *after))


def _parted_nbytes(profile: Profile, built: BuiltProblem, choice: Choice) -> int:
    """Returns the bytes that are held, but not at the moment at which most are (`parts.py`)."""
    if all(one.born <= profile.backward for one in profile.storages):
        return 0
    held = [one.nbytes for one in profile.storages]
    gone = recomputed_items(built.problem, choice.recomputed)
    for at, (index, item) in enumerate(zip(built.storages, built.problem.items, strict=True)):
        held[index] = 0 if at in gone else item.options[choice.options[at]].nbytes
    steps = [
        change
        for one, nbytes in zip(profile.storages, held, strict=True)
        for change in ((one.born, nbytes), (one.freed + 1, -nbytes))
    ]
    return sum(held) - max(accumulate(nbytes for _, nbytes in sorted(steps)))


def _takes_turns(profile: Profile) -> bool:
    """Returns whether some op rounds otherwise in a plan that was not built as an exact one."""
    return any(map(partial(spared, profile), profile.storages))


def _sites(
    profile: Profile, built: BuiltProblem, choice: Choice, shared: Container[int]
) -> Iterator[tuple[SiteName, PlanEntry]]:
    problem = built.problem
    gone = recomputed_items(problem, choice.recomputed)
    presets = {}
    for i, (index, item, option) in enumerate(
        zip(built.storages, problem.items, choice.options, strict=True)
    ):
        if i not in gone:
            presets[index] = item.options[option].name
            storage = profile.storages[index]
            for save in storage.saves:
                known = _known(presets[index], storage, save.site)
                apart = index in built.apart
                yield save.site.name, replace(known, shared=index in shared, apart=apart)
    for r in choice.recomputed:
        call = profile.modules[built.modules[r]]
        for nth, index in enumerate(call.inputs):
            if index in presets:
                storage = profile.storages[index]
                yield (
                    SiteName(call.name, RECOMPUTE, nth),
                    _known(presets[index], storage, storage.saves[0].site),
                )


def _known(preset: str, storage: Storage, site: Site) -> PlanEntry:
    dtype = str(site.dtype).removeprefix("torch.")
    return PlanEntry(preset, dtype, storage.nbytes, bool(site.curved))


def _lines(
    profile: Profile,
    built: BuiltProblem,
    choice: Choice,
    shared: Mapping[int, float],
    reasons: Reasons,
) -> Iterator[ExplainedLine]:
    """A line for each storage that is not recomputed."""
    problem = built.problem
    gone = recomputed_items(problem, choice.recomputed)
    at = {index: i for i, index in enumerate(built.storages)}
    for index, storage in enumerate(profile.storages):
        first = storage.saves[0]
        if index not in at:
            yield _line(storage, storage.nbytes, "keep", first.left)
        elif at[index] not in gone:
            options = problem.items[at[index]].options
            option = options[choice.options[at[index]]]
            if option.name != KEEP.name:
                why = reasons.of_item(at[index])
            else:  # why it has no code is not why it is kept, if it could be made smaller without
                why = "there is room" if len(options) > 1 else _why(storage)
            seconds = option.forward_s + option.backward_s - shared.get(index, 0.0)
            action = action_name(preset_named(option.name), storage)
            yield _line(storage, option.nbytes, action, why, seconds, option.variance)


def _line(
    storage: Storage, held: int, action: str, why: str, seconds: float = 0.0, error: float = 0.0
) -> ExplainedLine:
    site = storage.saves[0].site
    return ExplainedLine(
        site.module, site.consumer, site.shape, storage.nbytes, held, action, seconds, error, why
    )


def _why(storage: Storage) -> str:
    """Returns why a storage that something could be done with is kept."""
    asked = [save.site.why for save in storage.saves if save.site.why]
    return asked[0] if asked else "there is room"


def _recomputed(
    profile: Profile, built: BuiltProblem, choice: Choice, reasons: Reasons
) -> Iterator[ExplainedLine]:
    """A line for each module that runs again."""
    for r in sorted(choice.recomputed):
        region, call = built.problem.regions[r], profile.modules[built.modules[r]]
        nbytes = sum(built.problem.items[i].nbytes for i in region.inside)
        dropped = len(region.inside)
        why = "1 tensor is not held" if dropped == 1 else f"{dropped} tensors are not held"
        error = region_variance(built.problem, region, choice.options)
        why += "; it runs again from a code" if error else ""
        above = reasons.of_region(r)
        why += f"; {above}" if above else ""
        yield ExplainedLine(
            region.name, call.kind, (), nbytes, region.extra, RECOMPUTE, region.seconds, error, why
        )
