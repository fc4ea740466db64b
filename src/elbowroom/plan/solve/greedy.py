"""The cheapest move first, until the peak fits: seconds per byte freed where there are too many.

    excess = sum over moments of max(0, level - budget)
    score of a move = (seconds it adds + price * variance it adds) / excess it removes

Moves are: another option for one item, or the recompute of a region (its inputs are then kept). No
move breaks another limit. Scores only get worse while the excess shrinks, so a queue holds old ones
and the best is scored anew before it is made. Then repair: the moves that were passed over are
tried again until none helps, and what is no longer needed is taken back. The price of variance
(its Lagrange multiplier) is 0 at first; where that walk ends over the budget, since error was spent
early on cheap moves, it rises.
"""

import heapq
from math import inf

from elbowroom.plan.problem import Choice, Problem, cost, keep_all
from elbowroom.plan.solve.boundaries import best_start, searched
from elbowroom.plan.solve.limits import Limits, fits
from elbowroom.plan.solve.partial import Effect, Key, Move, PartialSolution
from elbowroom.plan.solve.uniform import uniform_fitting

_PRICES = (0.0, 0.01, 0.1, 1.0, 10.0)  # steps that all the allowed variance is worth


def greedy(problem: Problem, limits: Limits) -> Choice | None:
    """The cheapest of the walks and of `uniform`; None if none fits."""
    walks = [walked(problem, limits), from_boundaries(problem, limits)]
    return cheapest_of(problem, [*walks, uniform_fitting(problem, limits)])


def from_boundaries(problem: Problem, limits: Limits) -> Choice | None:
    """The choice in which modules start from codes, and what is not needed is taken back."""
    if limits.exact or searched(problem) is problem:
        return None
    start = best_start(problem, limits)
    return None if start is None else finished(PartialSolution(problem, limits, start))


def walked(problem: Problem, limits: Limits) -> Choice | None:
    """The walk from plain autograd, at the lowest price of variance that fits; None if none."""
    bounded = 0 < limits.variance < inf
    for price in _PRICES if bounded else (0.0,):
        solution = PartialSolution(problem, limits, keep_all(problem))
        price_s = price * problem.seconds / limits.variance if price else 0.0
        if (choice := finished(solution, price_s)) is not None:
            return choice
    return None


def cheapest_of(problem: Problem, found: list[Choice | None]) -> Choice | None:
    """The first of those that add the fewest seconds."""
    choices = [choice for choice in found if choice is not None]
    return min(choices, key=lambda choice: cost(problem, choice), default=None)


def finished(solution: PartialSolution, price: float = 0.0) -> Choice | None:
    """Goes on from a solution until it fits, and takes back what is not needed, or returns None."""
    walk(solution, price)
    if solution.excess > 0:
        return None
    take_back(solution)
    return solution.choice if fits(solution.problem, solution.choice, solution.limits) else None


def take_back(solution: PartialSolution) -> None:
    """Undoes or weakens, the dearest first, what the budget does not need."""
    for r in sorted(solution.recomputed, key=lambda r: (-solution.problem.regions[r].seconds, r)):
        _make_if_it_saves(solution, solution.run_once(r))
    changed = [i for i, option in enumerate(solution.options) if option and not solution.gone(i)]
    for i in sorted(changed, key=lambda i: (-_seconds(solution, i, solution.options[i]), i)):
        for option in sorted(
            range(len(solution.problem.items[i].options)), key=lambda a: (a > 0, a)
        ):
            if option != solution.options[i]:
                _make_if_it_saves(solution, solution.hold(i, option))


def _make_if_it_saves(solution: PartialSolution, move: Move) -> None:
    effect = solution.effect(move)
    if effect and solution.freed(effect) >= 0:
        kept = not any(move.options.values())
        if effect.seconds < 0 or (effect.seconds == 0 and kept):
            solution.make(move, effect)


def walk(solution: PartialSolution, price: float = 0.0) -> None:
    """Makes moves, the best score first, until the budget is kept or none helps."""
    while (before := solution.excess) > 0:
        _walk(solution, price)
        if solution.excess == before:
            return


def _walk(solution: PartialSolution, price: float) -> None:
    """Makes moves as far as those that are known at the start go."""
    regions = [("region", r, 0) for r in range(len(solution.problem.regions))]
    if not solution.limits.exact:
        coded = (r for r, region in enumerate(solution.problem.regions) if region.levels < inf)
        regions += [("coded region", r, 0) for r in coded]
    matters = solution.in_excess()
    options = [
        ("option", i, a)
        for i, item in enumerate(solution.problem.items)
        if matters(i)
        for a, option in enumerate(item.options)
        if solution.limits.allow(option)
    ]
    queue = [
        (score, key) for key in options + regions if (score := _score(solution, key, price)) < inf
    ]
    heapq.heapify(queue)
    excess = solution.excess
    while queue and excess > 0:
        _, key = heapq.heappop(queue)
        score = _score(solution, key, price)
        if score == inf:
            continue
        if queue and score > queue[0][0]:
            heapq.heappush(queue, (score, key))
            continue
        effect = _effect(solution, key)
        assert effect is not None
        solution.make(_move(solution, key), effect)
        excess = solution.excess


def _effect(solution: PartialSolution, key: Key) -> Effect | None:
    return solution.effect_of(key, lambda: _move(solution, key))


def _move(solution: PartialSolution, key: Key) -> Move:
    kind, index, option = key
    if kind == "coded region":
        return solution.recompute_from_codes(index)
    return solution.recompute(index) if kind == "region" else solution.hold(index, option)


def _score(solution: PartialSolution, key: Key, price: float) -> float:
    """Returns the score of a move; inf: it may not be made, changes nothing, or frees nothing."""
    kind, index, option = key
    if kind != "option":
        if index in solution.recomputed:
            return inf
    elif solution.options[index] == option or solution.gone(index):
        return inf
    effect = _effect(solution, key)
    if effect is None or (freed := solution.freed(effect)) <= 0:
        return inf
    return (effect.seconds + price * effect.variance) / freed


def _seconds(solution: PartialSolution, i: int, option: int) -> float:
    chosen = solution.problem.items[i].options[option]
    return chosen.cost_s
