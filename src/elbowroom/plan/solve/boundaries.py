"""Choices in which modules are recomputed from codes of their inputs.

Whether a module may start from a code depends on how its input is held. A linear program says
little about that (half a module from half a code adds no noise), and a search over many modules
does not end in time. So if more than FEW modules could start from codes, the programs of `milp.py`
let modules start from exact inputs only, and their answer is compared with the choices made here:
all modules of one depth are recomputed from codes of one setting, and all other items are held by
that setting, too. `greedy` improves the best of these.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from elbowroom.plan.problem import Choice, Problem, cost
from elbowroom.plan.solve.limits import Limits, obeys, outer, peak

FEW = 6


def searched(problem: Problem) -> Problem:
    """Returns the problem as the programs of `milp.py` search it."""
    coded = [region for region in problem.regions if region.levels < inf]
    if len(coded) <= FEW:
        return problem
    plain = (replace(region, levels=inf, noise=0.0) for region in problem.regions)
    return replace(problem, regions=tuple(plain))


def best_start(problem: Problem, limits: Limits, *, least: bool = False) -> Choice | None:
    """Returns the cheapest uniform choice that fits; if none fits, the one of the least peak.

    least  returns the one of the least peak in any case
    """
    found = _with_peaks(problem, limits)
    fitting = [choice for choice, held in found if held <= limits.budget]
    if fitting and not least:
        return min(fitting, key=lambda choice: cost(problem, choice))
    lowest = min(found, key=lambda one: one[1], default=None)
    return None if lowest is None else lowest[0]


def _with_peaks(problem: Problem, limits: Limits) -> list[tuple[Choice, int]]:
    """Returns the uniform choices that obey all limits but the budget, each with its peak."""
    asked = "uniform from codes", replace(limits, budget=0)
    if asked not in problem.answers:
        every = (choice for choice in uniform_from_codes(problem) if obeys(problem, choice, limits))
        problem.answers[asked] = [(choice, peak(problem, choice)) for choice in every]
    found: list[tuple[Choice, int]] = problem.answers[asked]
    return found


def uniform_from_codes(problem: Problem) -> Iterator[Choice]:
    """Yields all uniform choices in which the modules of one depth start from codes."""
    coded = [r for r, region in enumerate(problem.regions) if region.levels < inf]
    depths = {r: len(outer(problem, r)) for r in coded}
    lossy = (option.name for item in problem.items for option in item.options if not option.exact)
    for name in dict.fromkeys(lossy):
        named = [
            next((a for a, option in enumerate(item.options) if option.name == name), 0)
            for item in problem.items
        ]
        for depth in sorted({*depths.values()}):
            choice = _recomputed(problem, named, [r for r in coded if depths[r] == depth])
            if choice.recomputed:
                yield choice


def _recomputed(problem: Problem, named: list[int], coded: list[int]) -> Choice:
    """Returns the choice that recomputes these modules, except those that an earlier one excludes.

    Of one depth, none lies within another; they may still hold an item together, start from what
    another holds, or take another code of what both start from.
    """
    options, chosen = list(named), set[int]()
    gone, starts = set[int](), dict[int, list[int]]()  # the items inside; by input, the modules
    for r in coded:
        region = problem.regions[r]
        if not gone.isdisjoint((*region.inside, *region.inputs)):
            continue
        if not starts.keys().isdisjoint(region.inside) or {*region.inside} & {*region.inputs}:
            continue
        taken = {i: _start(problem, r, i, options[i]) for i in region.inputs}
        if all(
            problem.regions[other].takes(problem.items[i].options[a])
            for i, a in taken.items()
            for other in (r, *starts.get(i, ()))
        ):
            chosen.add(r)
            gone.update(region.inside)
            for i, a in taken.items():
                options[i] = a
                starts.setdefault(i, []).append(r)
    return Choice(tuple(options), frozenset(chosen))


def _start(problem: Problem, r: int, i: int, option: int) -> int:
    """The option of an input: this one, or the smallest that the region takes."""
    options, region = problem.items[i].options, problem.regions[r]
    if region.takes(options[option]):
        return option
    taken = (a for a, one in enumerate(options) if region.takes(one))
    return min(taken, key=lambda a: options[a].nbytes)
