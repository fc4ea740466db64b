"""What a solver sees of a step: numbers only, no tensors, no modules.

A step is cut into moments. One begins wherever something is saved in forward, or asked for in
backward; what is held changes only there. A storage (an `Item`) held by an option a takes

                 born ... used          used ... freed          each need
    keep         nbytes                 nbytes                  nbytes
    else         nbytes + a.nbytes      a.nbytes                nbytes + a.nbytes
    recomputed   nbytes                 0                       nbytes, from the start of its region

for `used` is the last moment of forward that reads it anyway. On top of that lies `base`: weights,
gradients, workspaces, all that no option changes. So the level of every moment is linear in the
choice, and one function (`levels`) is the memory model of every solver and of the plan's promise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Option:
    """One way to hold an item. The first option of every item is to keep it.

    name        of the setting: "keep", "exact", "dither, 16 levels", "offload to file"
    nbytes      held from birth to the last need
    forward_s   added to forward, and to backward, in seconds of the compute device
    variance    added to the gradient, as a share of what mini-batches vary by
    exact       no bit of any gradient changes
    link        the name of the link that `nbytes` of the item travel, out and in; "" for none
    ahead       so many moments before a need it is back in memory already (prefetched)
    """

    name: str
    nbytes: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    variance: float = 0.0
    exact: bool = True
    link: str = ""
    ahead: int = 0


@dataclass(frozen=True)
class Item:
    """One saved storage.

    born   the moment of forward that saves it
    used   the last moment of forward that reads it, >= born
    needs  the moments of backward that read it, (first, last) each, ascending
    freed  the last moment at which it is held: that of its last need, or the end of the step
    """

    nbytes: int
    born: int
    used: int
    needs: tuple[tuple[int, int], ...]
    freed: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Region:
    """A module whose forward can run again in backward, in place of holding what it saves.

    inside       items that are then not held
    inputs       items that its second forward starts from: they must be held exactly
    seconds      of its forward
    workspace    bytes that its forward takes beyond what it saves
    extra        bytes of inputs that are no item, so held on top, from `born` to `start`
    born, start  the moments of its forward, and of its first need in backward
    within       the region that encloses it, by index; -1 for none
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
    """

    base: tuple[int, ...]
    starts_s: tuple[float, ...]
    backward: int
    seconds: float
    items: tuple[Item, ...]
    regions: tuple[Region, ...] = ()
    links: Mapping[str, Link] = field(default_factory=dict)


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
    """What a solver found.

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
    """Plain autograd."""
    return Choice((0,) * len(problem.items))


def option_levels(
    item: Item, option: int, moments: int
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Bytes [moments] that an item takes when it is held by one of its options."""
    level = np.zeros(moments, np.int64)
    chosen = item.options[option]
    if option == 0:
        level[item.born : item.freed + 1] = item.nbytes
        return level
    level[item.born : item.freed + 1] = chosen.nbytes
    level[item.born : item.used + 1] += item.nbytes
    restored = np.zeros(moments, bool)
    for first, last in item.needs:
        restored[max(first - chosen.ahead, item.used + 1) : last + 1] = True
    level[restored] += item.nbytes
    return level


def region_levels(problem: Problem, region: Region) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Bytes [moments] that a recomputed region takes, its items included."""
    level = np.zeros(len(problem.base), np.int64)
    level[region.born : region.start + 1] += region.extra
    level[region.start] += region.workspace
    for i in region.inside:
        item = problem.items[i]
        level[item.born : item.used + 1] += item.nbytes
        level[max(region.start, item.used + 1) : item.freed + 1] += item.nbytes
    return level


def levels(problem: Problem, choice: Choice) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Bytes [moments] of the whole step."""
    level = np.array(problem.base, np.int64)
    gone = recomputed_items(problem, choice.recomputed)
    for r in choice.recomputed:
        level += region_levels(problem, problem.regions[r])
    for i, (item, option) in enumerate(zip(problem.items, choice.options, strict=True)):
        if i not in gone:
            level += option_levels(item, option, len(level))
    return level


def recomputed_items(problem: Problem, recomputed: frozenset[int]) -> frozenset[int]:
    """The items inside recomputed regions."""
    return frozenset(i for r in recomputed for i in problem.regions[r].inside)


def added_seconds(problem: Problem, choice: Choice) -> float:
    """What the choice adds to the step: compute, and the part of the traffic that is not hidden."""
    gone = recomputed_items(problem, choice.recomputed)
    held = [
        (item, item.options[option])
        for i, (item, option) in enumerate(zip(problem.items, choice.options, strict=True))
        if i not in gone
    ]
    compute = sum(option.forward_s + option.backward_s for _, option in held)
    compute += sum(problem.regions[r].seconds for r in choice.recomputed)
    return compute + sum(sum(stalls(problem, held, name)) for name in problem.links)


def stalls(problem: Problem, held: Sequence[tuple[Item, Option]], name: str) -> tuple[float, float]:
    """Seconds by which one link is late: out, at the end of forward; in, at the worst need.

    Each copy starts when its item is last used, one after another; each must be back by its first
    need. One number a direction is enough: a delay moves all later deadlines along.
    """
    link = problem.links[name]
    moved = [item for item, option in held if option.link == name]
    starts = (*problem.starts_s, problem.seconds)
    forward_end = starts[problem.backward]
    late_out = late_in = 0.0
    busy = 0.0
    for item in sorted(moved, key=lambda item: -item.used):
        busy += item.nbytes / link.out_rate
        late_out = max(late_out, busy - (forward_end - starts[item.used]))
    busy = 0.0
    for item in sorted(moved, key=lambda item: item.needs[0][0] if item.needs else item.freed):
        busy += item.nbytes / link.in_rate
        due = starts[item.needs[0][0] if item.needs else item.freed] - forward_end
        late_in = max(late_in, busy - due)
    return late_out, late_in


def added_variance(problem: Problem, choice: Choice) -> float:
    """Variance that the choice adds to the gradient, as a share of that of mini-batches."""
    gone = recomputed_items(problem, choice.recomputed)
    return sum(
        item.options[option].variance
        for i, (item, option) in enumerate(zip(problem.items, choice.options, strict=True))
        if i not in gone
    )
