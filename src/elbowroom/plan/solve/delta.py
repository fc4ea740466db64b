"""Offload, recompute or encode, tensor by tensor, as DELTA, DTR and Capuchin do.

The rule goes one way down from plain autograd, the same for all budgets: at the highest moment of
the step, one item that lies idle there is evicted, which lowers that moment and raises none to its
height. Where no such move is left, moments that are a little lower count, too, and then lower ones:
what they sum to above that level has to fall. A budget ends the way at the first choice that fits.
So what fits a budget fits every larger one, and the last choice on the way is the least.

    delta     which: most bytes * staleness.    how: fewest seconds per byte freed, where an offload
              costs the time that its copies are not hidden, queue included, a recompute that of the
              region, and a code, which the paper has not, that of encoding and decoding, and what
              its noise is worth. What holds a code may still be offloaded or recomputed. In the end
              what is offloaded comes back as early as there is room.
    dtr       which: least seconds / (bytes * staleness).    how: recompute
    capuchin  first offloads whose copies are hidden, most idle time first; then recomputes, fewest
              seconds per byte; then the offloads that must wait

Staleness: seconds since an item was last read. `delta` is the idea of DELTA (Tang et al., arXiv
2203.15980), with times compared to times: the released code compares microseconds with nanoseconds
and offloads everything. DTR: Kirisame et al., ICLR 2021, arXiv 2006.09616. Capuchin: Peng et al.,
ASPLOS 2020. All three decide while a step runs, at the moment that exceeds the budget; this is the
same decision over a known step, and a baseline.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf, isnan, nan
from typing import Literal

from elbowroom.plan.problem import Choice, Problem, due, keep_all
from elbowroom.plan.solve.limits import Limits
from elbowroom.plan.solve.partial import Effect, Move, PartialSolution

Rule = Literal["delta", "dtr", "capuchin"]
_Evict = Callable[[PartialSolution, int], bool]

_NEAR = (64, 8, 5, 3)  # halvings of the peak: how far below it moments count, too


def delta(problem: Problem, limits: Limits, *, rule: Rule = "delta") -> Choice:
    """Returns the first choice on the rule's way that fits, or the one with its least peak."""
    evict: _Evict = {"delta": _delta, "dtr": _dtr, "capuchin": _capuchin}[rule]
    solution = PartialSolution(problem, limits, keep_all(problem))
    while _peak(solution) > limits.budget:
        lowest = solution.choice
        lower = _lower(solution, evict)
        if lower is None:
            return lowest
        solution = lower
    if rule == "delta":
        solution.keep_within(limits)
        _prefetch(solution)
    return solution.choice


dtr = partial(delta, rule="dtr")
capuchin = partial(delta, rule="capuchin")


def _lower(solution: PartialSolution, evict: _Evict) -> PartialSolution | None:
    """Returns a solution with a lower peak, some moves after this one; None if there is none."""
    problem, limits, choice = solution.problem, solution.limits, solution.choice
    top = _peak(solution)
    for halvings in _NEAR:
        solution.keep_within(replace(limits, budget=top - max(top >> halvings, 1)))
        while _evicted(solution, evict):
            if _peak(solution) < top:
                return solution
        solution = PartialSolution(problem, limits, choice)
    return None


def _evicted(solution: PartialSolution, evict: _Evict) -> bool:
    """Makes a move at one of the moments above the budget, the highest first, if there is one."""
    level = solution.level
    over = (level > solution.limits.budget).nonzero()[0].tolist()
    return any(evict(solution, moment) for moment in sorted(over, key=lambda t: (-level[t], t)))


def _peak(solution: PartialSolution) -> int:
    return int(solution.level.max(initial=0))


def _delta(solution: PartialSolution, moment: int) -> bool:
    """Makes a move by DELTA's filter and director; returns whether there was one."""
    stale = {i: _stale_s(solution.problem, i, moment) for i in _idle(solution, moment)}
    held = {i: _held_nbytes(solution, i, moment) for i in stale}
    for i in sorted(stale, key=lambda i: (-held[i] * stale[i], -held[i], i)):
        ways = [*_offloads(solution, i), *_rebuilds(solution, i), *_codes(solution, i)]
        if _make_best(solution, moment, [*ways, *_smallest_recompute(solution, i, moment)]):
            return True
    return False


def _dtr(solution: PartialSolution, moment: int) -> bool:
    """Makes a move by DTR's score; returns whether there was one.

    A region is as stale as the item in it that was read last.
    """
    stale = {i: _stale_s(solution.problem, i, moment) for i in _idle(solution, moment)}
    moves = [(stale[i], move) for i in stale for move in _rebuilds(solution, i)]
    for r in sorted({r for i in stale for r in solution.regions_with.get(i, ())}):
        inside = [stale[i] for i in solution.problem.regions[r].inside if i in stale]
        moves.append((min(inside), solution.recompute(r)))
    scores = []
    for stale_s, move in moves:
        _, effect, freed = _best(solution, moment, [move])
        if effect is not None:
            scores.append(effect.seconds / (freed * stale_s) if stale_s else inf)
        else:
            scores.append(nan)
    allowed = [k for k, score in enumerate(scores) if not isnan(score)]
    if not allowed:
        return False
    return _make_best(solution, moment, [moves[min(allowed, key=lambda k: scores[k])][1]])


def _capuchin(solution: PartialSolution, moment: int) -> bool:
    idle = sorted(_idle(solution, moment), key=lambda i: (-_idle_s(solution.problem, i), i))
    for i in idle:
        hidden = [move for move in _offloads(solution, i) if _is_hidden(solution, move)]
        if _make_best(solution, moment, hidden):
            return True
    regions = sorted({r for i in idle for r in solution.regions_with.get(i, ())})
    recomputes = [m for i in idle for m in _rebuilds(solution, i)]
    if _make_best(solution, moment, recomputes + [solution.recompute(r) for r in regions]):
        return True
    return _make_best(solution, moment, [m for i in idle for m in _offloads(solution, i)])


def _make_best(solution: PartialSolution, moment: int, moves: list[Move]) -> bool:
    move, effect, _ = _best(solution, moment, moves)
    if move is None or effect is None:
        return False
    solution.make(move, effect)
    return True


def _best(
    solution: PartialSolution, moment: int, moves: list[Move]
) -> tuple[Move | None, Effect | None, int]:
    """The move with the fewest seconds per byte freed at a moment; none if none frees any.

    What it adds at other moments above the budget must be less than what it frees.
    """
    best: tuple[Move | None, Effect | None, int] = None, None, 0
    least = inf
    for move in moves:
        effect = solution.effect(move)
        if effect is None or not 0 <= moment - effect.first < len(effect.nbytes):
            continue
        freed = -int(effect.nbytes[moment - effect.first])
        if freed <= 0 or solution.freed(effect) <= 0:
            continue
        if effect.seconds / freed < least:
            best, least = (move, effect, freed), effect.seconds / freed
    return best


def _idle(solution: PartialSolution, moment: int) -> list[int]:
    """Items of which bytes are held at a moment at which they are not read."""
    return [
        i
        for i, item in enumerate(solution.problem.items)
        if item.used < moment <= item.freed
        and _held_nbytes(solution, i, moment) > 0
        and not any(first <= moment <= last for first, last in item.needs)
    ]


def _held_nbytes(solution: PartialSolution, i: int, moment: int) -> int:
    """Bytes that an item holds at a moment at which it is idle: its own, or those of its code.

    What a region has rebuilt is held again, and may go if a smaller one runs in its place.
    """
    item, option = solution.problem.items[i], solution.options[i]
    for r in solution.regions_with.get(i, ()):
        if r in solution.recomputed:
            return item.nbytes if solution.problem.regions[r].start <= moment else 0
    return item.options[option].nbytes if option else item.nbytes


def _offloads(solution: PartialSolution, i: int) -> Iterator[Move]:
    """Yields the first offload over each link: the others differ in how early they are back."""
    links = set()
    for a, option in enumerate(solution.problem.items[i].options):
        if a and option.exact and option.link and option.link not in links:
            links.add(option.link)
            yield solution.hold(i, a)


def _smallest_recompute(solution: PartialSolution, i: int, moment: int) -> Iterator[Move]:
    """Yields the recompute of the fastest region with an item that frees bytes at a moment.

    A larger one frees more for a second, but its items are all back at once.
    """
    regions = solution.problem.regions
    for r in sorted(solution.regions_with.get(i, ()), key=lambda r: (regions[r].seconds, r)):
        move = solution.recompute(r)
        if _best(solution, moment, [move])[0] is not None:
            yield move
            return


def _rebuilds(solution: PartialSolution, i: int) -> Iterator[Move]:
    for a, option in enumerate(solution.problem.items[i].options):
        if a and option.exact and not option.link:
            yield solution.hold(i, a)


def _codes(solution: PartialSolution, i: int) -> Iterator[Move]:
    """Yields the codes; those that the limits forbid have no effect."""
    for a, option in enumerate(solution.problem.items[i].options):
        if not option.exact and a != solution.options[i]:
            yield solution.hold(i, a)


def _stale_s(problem: Problem, i: int, moment: int) -> float:
    """Seconds since an item was last read."""
    item = problem.items[i]
    read = max([item.used, *(last for _, last in item.needs if last < moment)])
    return problem.starts_s[moment] - problem.starts_s[read]


def _idle_s(problem: Problem, i: int) -> float:
    """Seconds from its last use in forward to its first need."""
    item = problem.items[i]
    return problem.starts_s[due(item)] - problem.starts_s[item.used]


def _is_hidden(solution: PartialSolution, move: Move) -> bool:
    """Returns whether an offload costs no more than its own handling: no link gets later."""
    effect = solution.effect(move)
    ((i, a),) = move.options.items()
    option = solution.problem.items[i].options[a]
    handling = option.cost_s
    return effect is not None and effect.seconds <= handling * (1 + 1e-9) + 1e-12


def _prefetch(solution: PartialSolution) -> None:
    """Brings items back as early as there is room: the first needed first."""
    items = solution.problem.items
    offloaded = [i for i, a in enumerate(solution.options) if items[i].options[a].link]
    for i in sorted(offloaded, key=lambda i: (due(items[i]), i)):
        chosen = items[i].options[solution.options[i]]
        same = [a for a, o in enumerate(items[i].options) if o.link == chosen.link and o.exact]
        for a in sorted(same, key=lambda a: -items[i].options[a].ahead):
            effect = solution.effect(solution.hold(i, a))
            if effect and solution.freed(effect) >= 0:
                solution.make(solution.hold(i, a), effect)
                break
