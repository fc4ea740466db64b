"""Takes one setting for all: the mildest that fits. Every plan must beat it.

Two families: all items by the option of one name (kept where they have none), or all regions of one
depth recomputed, which is what checkpointing every block by hand amounts to.
"""

from collections.abc import Iterator

from elbowroom.plan.problem import Choice, Option, Problem, cost, keep_all
from elbowroom.plan.solve.limits import Limits, fits, obeys, outer, peak, regions_agree


def uniform(problem: Problem, limits: Limits) -> Choice:
    """The cheapest uniform choice that fits; if none does, the one with the least peak."""
    found = uniform_fitting(problem, limits)
    if found is not None:
        return found
    allowed = [choice for choice in uniform_choices(problem) if obeys(problem, choice, limits)]
    return min(allowed, key=lambda choice: peak(problem, choice))


def uniform_fitting(problem: Problem, limits: Limits) -> Choice | None:
    """The cheapest uniform choice that fits, the first of equals; None if none does."""
    fitting = [choice for choice in uniform_choices(problem) if fits(problem, choice, limits)]
    return min(fitting, key=lambda choice: cost(problem, choice), default=None)


def uniform_choices(problem: Problem) -> Iterator[Choice]:
    """Returns all uniform choices, plain autograd first."""
    yield keep_all(problem)
    names = dict.fromkeys(option.name for item in problem.items for option in item.options[1:])
    for name in names:
        yield Choice(tuple(_named(item.options, name) for item in problem.items))
    depths = [len(outer(problem, r)) for r in range(len(problem.regions))]
    for depth in sorted(set(depths)):
        yield _recomputed(problem, [r for r, d in enumerate(depths) if d == depth])


def _named(options: tuple[Option, ...], name: str) -> int:
    return next((a for a, option in enumerate(options) if option.name == name), 0)


def _recomputed(problem: Problem, regions: list[int]) -> Choice:
    """Returns all of the regions but those that exclude an earlier one."""
    choice = keep_all(problem)
    for r in regions:
        more = Choice(choice.options, choice.recomputed | {r})
        if regions_agree(problem, more):
            choice = more
    return choice
