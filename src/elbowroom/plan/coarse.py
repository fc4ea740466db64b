"""Tensors that a solver would have rebuilt from codes that are too coarse for their readers.

A solver chooses for each tensor by itself. A product that is rebuilt from a factor holds nothing;
but if the factor's code has 4 levels, and a reader of the product needs 16, the runtime gives the
product a code of its own (`runtime/sites.py`), and the step takes more than was promised. Likewise
for `lean`'s code of a norm's input, which needs the mask of a ReLU that keeps its output as it is.
So what a solver has chosen is checked by the same rules; tensors that would not be held as it says
are set apart, with codes of their own, and it solves again. The plan says which these are, as the
runtime would rebuild them once their sources have finer codes in the end.

In a chain of such tensors each round finds the next one. So after a few rounds all that is left is
decided at once: it is set apart, or nothing that it is made of has a code too coarse for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from elbowroom.plan.build_problem import BuiltProblem, as_planned
from elbowroom.plan.composed import gated, is_lean
from elbowroom.plan.menu import KEEP, Chosen, is_made_of, preset_named
from elbowroom.plan.problem import Choice, Option, Problem, Solution, cost, held_options
from elbowroom.plan.profile import Profile

_MAX_ROUNDS = 4


def solve_apart(
    profile: Profile, build: Callable[..., BuiltProblem], solve: Callable[[Problem], Solution]
) -> tuple[BuiltProblem, Solution]:
    """Returns a problem and its solution, in which nothing is made of codes that are too coarse.

    build: makes the problem in which the storages `apart`, by index, are not rebuilt
    """
    apart: frozenset[int] = frozenset()
    for _ in range(_MAX_ROUNDS):
        built = build(apart=apart)
        found = solve(built.problem)
        wrong = made_of_coarse(profile, built, found.choice)
        if not wrong:
            return built, found
        apart |= wrong
    made = (i for i, storage in enumerate(profile.storages) if storage.made_of)
    ways = build(apart=apart.union(made)), with_fine_sources(profile, build(apart=apart))
    last = [(built, solve(built.problem)) for built in ways]
    right = (one for one in last if not made_of_coarse(profile, one[0], one[1].choice))
    return min(right, key=_rank, default=last[0])


def _rank(one: tuple[BuiltProblem, Solution]) -> tuple[bool, float]:
    """Sorts solutions: those that fit by their cost, and before others, by their peak."""
    built, found = one
    return not found.feasible, cost(built.problem, found.choice) if found.feasible else found.peak


def with_fine_sources(profile: Profile, built: BuiltProblem) -> BuiltProblem:
    """Returns the problem without codes that are too coarse for what is rebuilt from them."""
    profile, norms = as_planned(profile, built.apart, exact=False), gated(profile)
    norms = {i: made for i, made in norms.items() if i not in built.apart}
    items = dict(zip(built.storages, built.problem.items, strict=True))

    def ways(index: int) -> Iterator[tuple[Option, Chosen]]:
        storage, is_gated = profile.storages[index], index in norms
        for option in items[index].options[1:]:
            yield option, (storage, preset_named(option.name), is_gated)

    for index in built.storages:
        makes = [chosen for _, chosen in ways(index)]
        for source in items.keys() & set(profile.storages[index].made_of):
            fine = [
                option
                for option, held in ways(source)
                if all(is_made_of(profile, chosen, [held]) for chosen in makes)
            ]
            kept = items[source].options[0]
            items[source] = replace(items[source], options=(kept, *fine))
    problem = replace(built.problem, items=tuple(items[index] for index in built.storages))
    return replace(built, problem=problem)


def checked(profile: Profile, built: BuiltProblem, found: Solution) -> Solution:
    """Returns a solution; it is not feasible if something is made of codes that are too coarse."""
    if found.feasible and made_of_coarse(profile, built, found.choice):
        return replace(found, feasible=False)
    return found


def made_of_coarse(profile: Profile, built: BuiltProblem, choice: Choice) -> frozenset[int]:
    """Returns the storages that are rebuilt from codes which are too coarse, by index.

    And those whose code needs a mask that is not held.
    """
    if built.exact:
        return frozenset()
    profile, norms = as_planned(profile, built.apart, exact=False), gated(profile)
    norms = {i: made for i, made in norms.items() if i not in built.apart}
    presets = {
        built.storages[item]: preset_named(option.name)
        for item, option in held_options(built.problem, choice)
        if option.name != KEEP.name
    }

    def chosen(index: int) -> Chosen:
        return profile.storages[index], presets[index], index in norms

    found = {i for i in norms if i in presets and is_lean(presets[i]) and norms[i] not in presets}
    for index in presets:
        sources = [i for i in profile.storages[index].made_of if i in presets]
        if sources and not is_made_of(profile, chosen(index), [chosen(i) for i in sources]):
            found.add(index)
    return frozenset(found)
