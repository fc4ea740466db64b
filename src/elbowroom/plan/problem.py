"""The view that a solver has of a step: numbers only, no tensors, no modules.

A step is cut into moments. One begins wherever something is saved in forward, or asked for in
backward; what is held changes only there. A storage (an `Item`) held by an option a takes

                 born ... used          used ... freed          each need
    keep         nbytes                 nbytes                  nbytes
    else         nbytes + a.nbytes      a.nbytes                nbytes + a.nbytes + a.beside_nbytes
                                                                (a.nbytes + its own, a.direct)
    code away    nbytes + a.nbytes      a.nbytes                nbytes + a.nbytes + a.travels
    recomputed   nbytes                 0                       nbytes, from the start of its region

for `used` is the last moment of forward that reads it anyway. A recomputed region needs its inputs
when it starts again: one that is not kept is whole from then to its next need, and none is freed
before. Where an input is a code, the region runs again on what that decodes to, and adds a variance
of its own. On top of that lies `base`: weights, gradients, workspaces, all that no option changes.
So the level of every moment is a sum of spans (first moment, last moment, bytes), and one function
(`levels`) is the memory model of every solver and of the plan's promise.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int, int]  # first moment, last moment, bytes


@dataclass(frozen=True)
class Option:
    """One way to hold an item. The first option of every item is to keep it.

    name        of the setting: "keep", "exact", "dither, 16 levels", "offload to file"
    nbytes      held from birth to the last need
    forward_s   added to forward, and to backward, in seconds of the compute device
    variance    added to the gradient, as a share of what mini-batches vary by
    noise_s     the cost of that variance: seconds that avoiding it would be worth
    exact       no bit of any gradient changes
    link        the name of the link that the item travels, out and in; "" for none
    travels     bytes of a code that travel in its place; None: those of the item itself
    ahead       moments before a need at which it is back in memory already (prefetched)
    values      all its values come back, not only what backward asks of them (as from a bitmap)
    levels      of the dithered code that all its values come back from, or of one with the same
                error; 0 where they do not, or are exact
    restore_s   seconds of each time that it is made again or decoded as a whole; 0 if it is not
    beside_nbytes  that stand with it each time that it is restored: what it is made of, and what
                   decoding takes
    shared      numbers of `Problem.shared_s`: seconds besides, that several options add together
    direct      needs for which it is not restored, since backward reads what is held: the first
                moment of each, and the bytes that its op takes then beyond `base`: less than
                nothing where it needs less room for its work than torch's own
    """

    name: str
    nbytes: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    variance: float = 0.0
    exact: bool = True
    link: str = ""
    ahead: int = 0
    values: bool = True
    noise_s: float = 0.0
    direct: tuple[tuple[int, int], ...] = ()
    levels: float = 0.0
    shared: tuple[int, ...] = ()
    restore_s: float = 0.0
    beside_nbytes: int = 0
    travels: int | None = None

    @property
    def cost_s(self) -> float:
        """The seconds that a solver minimizes: its own, and those that its noise is worth."""
        return self.forward_s + self.backward_s + self.noise_s

    @property
    def reproduces(self) -> bool:
        """True if a region may start again from it, and make the same bits."""
        return self.exact and self.values


@dataclass(frozen=True)
class Item:
    """One saved storage.

    born   the moment of forward that saves it
    used   the last moment of forward that reads it, >= born
    needs  the moments of backward that read it, (first, last) each, ascending
    freed  the last moment at which it is held: that of its last need, or the end of the step
    spared by moment, bytes of `base` that its op does without, however it is held, unless it runs
           in a region
    """

    nbytes: int
    born: int
    used: int
    needs: tuple[tuple[int, int], ...]
    freed: int
    options: tuple[Option, ...]
    spared: tuple[tuple[int, int], ...] = ()

    def travels(self, option: Option) -> int:
        """Returns the bytes that travel the option's link, out and in."""
        return self.nbytes if option.travels is None else option.travels


@dataclass(frozen=True)
class Region:
    """A module whose forward can run again in backward, in place of holding what it saves.

    inside       items that are then not held
    inputs       items that its second forward starts from: held by options that it may start from
                 (`takes`), and inside no recomputed region (an earlier one is whole only later)
    seconds      of its forward, and of what is done to run it again
    workspace    bytes that its forward takes beyond what it saves
    extra        bytes of inputs that are no item, so held on top, from `born` to `start`
    born, start  the moments of its forward, and of its first need in backward
    within       the region that encloses it, by index; -1 for none
    levels       the fewest of a code that it may start from; inf: it starts from exact inputs only
    noise        variance that it adds where it starts from a code of two levels; from one of n
                 levels: over (n - 1)^2
    noise_s      seconds that a variance of one is worth
    """

    name: str
    inside: tuple[int, ...]
    inputs: tuple[int, ...]
    seconds: float
    workspace: int
    extra: int
    born: int
    start: int
    within: int = -1
    levels: float = inf
    noise: float = 0.0
    noise_s: float = 0.0

    def takes(self, option: Option) -> bool:
        """Returns whether it may start from an input that is held so."""
        return option.reproduces or option.levels >= self.levels

    def variance(self, option: Option) -> float:
        """Returns what it adds to the gradient where it starts from an input that is held so."""
        return 0.0 if option.reproduces else self.noise / (option.levels - 1) ** 2


@dataclass(frozen=True)
class Link:
    """A way out of the device's memory: host, or file.

    out_rate, in_rate  bytes a second
    room               bytes that fit at its end; None: no limit
    """

    out_rate: float
    in_rate: float
    room: int | None = None


@dataclass(frozen=True)
class Problem:
    """A step to be planned.

    base      bytes at each moment that no option changes
    starts_s  seconds from the start of the step to each moment, in plain autograd
    backward  the first moment of backward
    seconds   of the whole step in plain autograd
    shared_s  seconds that are added once where any of the options that name them is held: an
              attention runs again as soon as one of the tensors that it saves is a code
    is_rough  seconds and bytes of backward are estimates, so solvers do not search for small gains
    """

    base: tuple[int, ...]
    starts_s: tuple[float, ...]
    backward: int
    seconds: float
    items: tuple[Item, ...]
    regions: tuple[Region, ...] = ()
    links: Mapping[str, Link] = field(default_factory=dict)
    shared_s: tuple[float, ...] = ()
    is_rough: bool = False

    @cached_property
    def answers(self) -> dict[object, Any]:
        """Answers of solvers, by solver and limits: the same plan is often asked for again."""
        return {}

    @cached_property
    def _spans(self) -> dict[tuple[int, int], list[Span]]:
        return {}

    def spans(self, i: int, option: int) -> list[Span]:
        """Returns `option_spans` of an item that no recomputed region starts from; kept, as asked.

        Every search asks for those of all items, many times.
        """
        known = self._spans.get((i, option))
        if known is None:
            known = self._spans[i, option] = option_spans(self.items[i], option)
        return known


@dataclass(frozen=True)
class Choice:
    """An option for each item, and which regions are recomputed.

    options     index into each item's options; of no effect for an item inside a recomputed region
    recomputed  indices of regions; none lies within another
    """

    options: tuple[int, ...]
    recomputed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Solution:
    """The result of a solver.

    choice    the best it found; where not feasible, the one with the lowest peak that it knows
    feasible  whether the peak is within the budget, and the variance, room and exactness in theirs
    peak      bytes, by `levels`
    slowdown_s  added seconds, by `added_seconds`
    solve_s   seconds that solving took
    solver    its name
    """

    choice: Choice
    feasible: bool
    peak: int
    slowdown_s: float
    solve_s: float
    solver: str


def keep_all(problem: Problem) -> Choice:
    """Returns the choice of plain autograd, which keeps all."""
    return Choice((0,) * len(problem.items))


def option_spans(item: Item, option: int, starts: Collection[int] = ()) -> list[Span]:
    """Returns the bytes and moments that an item takes when one of its options holds it.

    starts  of the recomputed regions that it is an input of
    """
    chosen = item.options[option]
    freed = max(item.freed, *starts, item.freed)
    held = [(moment, moment, -nbytes) for moment, nbytes in item.spared]
    if option == 0:
        return [*held, (item.born, freed, item.nbytes)]
    held += [(item.born, freed, chosen.nbytes), (item.born, item.used, item.nbytes)]
    held += [(moment, moment, nbytes) for moment, nbytes in chosen.direct if nbytes]
    if chosen.travels is not None:
        held += [(first, last, chosen.travels) for first, last in _back(item, chosen, starts)]
    whole = _whole(item, chosen, starts)
    if chosen.beside_nbytes:
        held += [(first, first, chosen.beside_nbytes) for first, _ in whole]
    return held + [(first, last, item.nbytes) for first, last in whole]


def _whole(item: Item, option: Option, starts: Collection[int]) -> list[tuple[int, int]]:
    """Returns the moments after forward at which an item is back in memory, without overlaps."""
    direct = dict(option.direct)
    asked = [need for need in item.needs if need[0] not in direct]
    for start in starts:  # what a region makes again holds its input until that is read
        asked.append((start, next((last for _, last in item.needs if last >= start), start)))
    return _apart(asked, item.used, option.ahead if option.travels is None else 0)


def _back(item: Item, option: Option, starts: Collection[int]) -> list[tuple[int, int]]:
    """Returns the moments after forward at which a code is back to be read, without overlaps.

    That is at each need, those included for which the item is not restored.
    """
    asked = [*item.needs, *((start, start) for start in starts)]
    return _apart(asked, item.used, option.ahead)


def _apart(asked: list[tuple[int, int]], used: int, ahead: int) -> list[tuple[int, int]]:
    """Returns runs of moments after `used`, each begun so many moments ahead, without overlaps."""
    found: list[tuple[int, int]] = []
    done = used
    for first, last in sorted(asked):
        if last > done:
            found.append((max(first - ahead, done + 1), last))
            done = last
    return found


def region_spans(problem: Problem, region: Region) -> list[Span]:
    """Returns the bytes and moments that a recomputed region takes, its items included."""
    spans = [
        (region.born, region.start, region.extra),
        (region.start, region.start, region.workspace),
    ]
    for i in region.inside:
        item = problem.items[i]
        spans.append((item.born, item.used, item.nbytes))
        spans.append((max(region.start, item.used + 1), item.freed, item.nbytes))
    return spans


def summed(spans: Iterable[Span], moments: int) -> NDArray[np.int64]:
    """Bytes [moments] of all spans together."""
    steps = np.zeros(moments + 1, np.int64)
    for first, last, nbytes in spans:
        if first <= last:
            steps[first] += nbytes
            steps[last + 1] -= nbytes
    return np.cumsum(steps[:-1])


def levels(problem: Problem, choice: Choice) -> NDArray[np.int64]:
    """Bytes [moments] of the whole step."""
    gone = recomputed_items(problem, choice.recomputed)
    starts = region_starts(problem, choice.recomputed)
    spans = [s for r in choice.recomputed for s in region_spans(problem, problem.regions[r])]
    for i, (item, option) in enumerate(zip(problem.items, choice.options, strict=True)):
        if i in starts and i not in gone:
            spans += option_spans(item, option, starts[i])
        elif i not in gone:
            spans += problem.spans(i, option)
    return np.array(problem.base, np.int64) + summed(spans, len(problem.base))


def recomputed_items(problem: Problem, recomputed: Collection[int]) -> frozenset[int]:
    """The items inside recomputed regions."""
    return frozenset(i for r in recomputed for i in problem.regions[r].inside)


def region_starts(problem: Problem, recomputed: Collection[int]) -> dict[int, list[int]]:
    """Returns, for each item that recomputed regions start from, the moments when they do."""
    starts: dict[int, list[int]] = {}
    for r in sorted(recomputed):
        for i in problem.regions[r].inputs:
            starts.setdefault(i, []).append(problem.regions[r].start)
    return starts


def held_options(problem: Problem, choice: Choice) -> list[tuple[int, Option]]:
    """The items outside recomputed regions, with their options."""
    gone = recomputed_items(problem, choice.recomputed)
    options = enumerate(zip(problem.items, choice.options, strict=True))
    return [(i, item.options[option]) for i, (item, option) in options if i not in gone]


def added_seconds(problem: Problem, choice: Choice) -> float:
    """Returns the seconds that the choice adds: compute, and the part of the traffic not hidden."""
    held = held_options(problem, choice)
    compute = sum(option.forward_s + option.backward_s for _, option in held)
    compute += sum(problem.shared_s[n] for n in {n for _, option in held for n in option.shared})
    compute += sum(problem.regions[r].seconds for r in sorted(choice.recomputed))
    return compute + sum(sum(stalls(problem, choice, name)) for name in problem.links)


def cost(problem: Problem, choice: Choice) -> float:
    """Returns what solvers minimize, in seconds: those added, and those that the noise is worth."""
    noise_s = sum(option.noise_s for _, option in held_options(problem, choice))
    noise_s += sum(
        region.noise_s * variance for region, variance in regions_variances(problem, choice)
    )
    return added_seconds(problem, choice) + noise_s


def stalls(problem: Problem, choice: Choice, name: str) -> tuple[float, float]:
    """Returns the seconds by which one link is late.

    Out, that is at the end of forward; in, at the worst need.
    """
    starts = region_starts(problem, choice.recomputed)
    moved = [(i, option) for i, option in held_options(problem, choice) if option.link == name]
    return lateness(
        problem,
        name,
        [(problem.items[i], problem.items[i].travels(o), starts.get(i, ())) for i, o in moved],
    )


def lateness(
    problem: Problem, name: str, moved: Iterable[tuple[Item, int, Collection[int]]]
) -> tuple[float, float]:
    """Computes `stalls` for items that travel.

    moved: each with the bytes that do, and the starts of the regions that it is an input of

    Each copy starts when its item is last used, one after another; each must be back when it is
    first asked for. One number a direction is enough: a delay moves all later deadlines along.
    """
    link = problem.links[name]
    sizes = [(item.used, due(item, starts), nbytes) for item, nbytes, starts in moved]
    return (
        _late(
            [(-used, nbytes / link.out_rate) for used, _, nbytes in sizes],
            lambda moment: time_to_leave(problem, -moment),
        ),
        _late(
            [(asked, nbytes / link.in_rate) for _, asked, nbytes in sizes],
            lambda moment: time_to_return(problem, moment),
        ),
    )


def _late(copies: list[tuple[int, float]], allowed_s: Callable[[int], float]) -> float:
    late = busy = 0.0
    for moment, seconds in sorted(copies):
        busy += seconds
        late = max(late, busy - allowed_s(moment))
    return late


def due(item: Item, starts: Collection[int] = ()) -> int:
    """Returns the moment at which an item must be back."""
    first = item.needs[0][0] if item.needs else item.freed
    return min(first, *starts, first)


def time_to_leave(problem: Problem, used: int) -> float:
    """Seconds from the moment `used` to the end of forward."""
    return problem.starts_s[problem.backward] - problem.starts_s[used]


def time_to_return(problem: Problem, moment: int) -> float:
    """Seconds from the start of backward to a moment of it."""
    return problem.starts_s[moment] - problem.starts_s[problem.backward]


def added_variance(problem: Problem, choice: Choice) -> float:
    """Variance that the choice adds to the gradient, as a share of that of mini-batches."""
    held = sum(option.variance for _, option in held_options(problem, choice))
    return held + sum(variance for _, variance in regions_variances(problem, choice))


def regions_variances(problem: Problem, choice: Choice) -> Iterator[tuple[Region, float]]:
    """Yields each recomputed region, with the variance that it adds as its inputs are codes."""
    for r in sorted(choice.recomputed):
        region = problem.regions[r]
        yield region, region_variance(problem, region, choice.options)


def region_variance(
    problem: Problem, region: Region, options: Sequence[int] | Mapping[int, int]
) -> float:
    """Returns the variance that a region adds, where its inputs are held by these options."""
    if region.levels == inf:
        return 0.0
    return sum(region.variance(problem.items[i].options[options[i]]) for i in region.inputs)
