"""Chooses what a compiled step saves, so that its peak stays inside a budget.

PyTorch's min-cut says which values to save so that their bytes, or backward's reads, are fewest. It
ignores their lifetimes: a residual stream that is recomputed at the beginning of backward is alive
until its blocks are reached, and a smaller `activation_memory_budget` can then have a higher peak.
Here the peak of the simulated schedule (`liveness.py`) is the constraint, and estimated seconds are
the objective:

1.  what plain torch.compile would save, if it fits: then nothing is changed
2.  else the min-cut at several budgets, alone and with the ends of blocks saved (`narrow_places`):
    the fastest that fits, or the lowest if none does
3.  from there, changes: at the place of the peak, save values that were recomputed early, or
    recompute values that were saved, as long as that lowers the peak, and the like in other blocks;
    then save more, one by one, where that is faster and still fits
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from elbowroom.compiled.collect import Kind, NodeFacts
from elbowroom.compiled.joint import Joint, Step, is_random
from elbowroom.compiled.layouts import has_no_layout, laid_out_by_readers
from elbowroom.compiled.rounding import is_tied, rounded_values, rounds_alike

MinCut = Callable[[float], list[fx.Node]]  # activation_memory_budget -> saved values
_BUDGETS = (0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.02)
_STRIDES = (1, 2)  # which ends of blocks are saved: each, each second...
_CHANGES = 60  # largest number of single changes in one direction
_STARTS = 2  # of the fastest steps that fit, besides the lowest, are improved
_MAX = 16  # candidates that are examined for one change
_ROUNDS = 2  # of changes from one step
_LARGE = 1 / 256  # of the peak: smaller tensors are not worth a change


@dataclass
class Search:
    """All choices that were judged, by their saved values.

    min_cut   PyTorch's own choice at an activation memory budget
    plain     what torch.compile alone would save
    same_bits whether choices that round 16-bit floats in other places are left out
    is_moved  whether the graph is no longer as torch.compile has it; `plain` is then its choice of
              saved values in this other order
    kept      what every choice saves, as plain torch.compile does (`laid_out_by_readers`)
    """

    joint: Joint
    min_cut: MinCut
    budget: float = 1.0  # the activation memory budget that torch.compile alone would have
    same_bits: bool = True
    is_moved: bool = False
    kept: frozenset[fx.Node] = frozenset()
    known: dict[frozenset[fx.Node], Step | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        joint, cut = self.joint, self.min_cut
        fixed = [node for node in joint.required if is_random(node)]
        with must_save(fixed):
            plain = joint.step(cut(self.budget), is_plain=not self.is_moved)
        assert plain is not None, "the min-cut has left out what backward needs"
        self.plain = plain
        if self.same_bits and not self.is_moved:
            self.kept = laid_out_by_readers(joint, plain)
        fixed += self.kept
        fixed += [node for node in joint.required if has_no_layout(node)]
        # What is computed from an input that forward changes cannot be computed a second time.
        fixed += [n for one in joint.changed for n in one.users if n in joint.required]
        self.rounded = rounded_values(joint) if self.same_bits else frozenset()
        if self.rounded:
            _, after = joint.parts(plain.saved)
            fixed += [n for n in plain.saved if n in self.rounded and is_tied(joint, n, after)]

        def steady_cut(budget: float) -> list[fx.Node]:
            with must_save(fixed):
                return cut(budget)

        self.min_cut = steady_cut
        self.known[frozenset(plain.saved)] = plain

    def judge(self, saved: Iterable[fx.Node], *, below_nbytes: float = inf) -> Step | None:
        """Returns the step that follows from saving these; it is simulated only once.

        below_nbytes: None where its peak is certain not to be below that
        """
        key = frozenset(saved)
        if key not in self.known:
            step = self.joint.step(key, below_nbytes=below_nbytes)
            if step is None and below_nbytes < inf:
                return None
            if step is not None and self.joint.saves_changed(step.saved):
                step = None
            if step is not None and not self.kept.issubset(step.saved):
                step = None
            if step is not None and self.rounded:
                alike = rounds_alike(self.joint, self.plain, step, self.rounded)
                step = step if alike else None
            self.known[key] = step
        return self.known[key]

    @property
    def steps(self) -> list[Step]:
        """The choices that are possible."""
        return [step for step in self.known.values() if step is not None]


def choose(search: Search, room_nbytes: int | None, *, lowers: bool = True) -> Step:
    """Returns the fastest step found whose peak is at most `room_nbytes`, else the lowest one.

    lowers: whether a lower one is searched where no minimum cut fits, which takes the longest
    """
    if room_nbytes is None or search.plain.peak_nbytes <= room_nbytes:
        return search.plain
    _judge_cuts(search, room_nbytes)
    return _refined(search, room_nbytes, lowers=lowers)


def _refined(search: Search, room_nbytes: int, *, lowers: bool) -> Step:
    fitting = [step for step in search.steps if step.peak_nbytes <= room_nbytes]
    if not fitting:
        lowest = min(search.steps, key=lambda step: (step.peak_nbytes, step.seconds))
        fitting = [_lower(search, lowest, room_nbytes) if lowers else lowest]
    fitting.sort(key=lambda step: step.seconds)
    if fitting[0].peak_nbytes > room_nbytes:
        return fitting[0]
    lowest = min(fitting, key=lambda step: (step.peak_nbytes, step.seconds))
    starts = {one.saved: one for one in (*fitting[:_STARTS], lowest)}
    improved = [_improved(search, start, room_nbytes) for start in starts.values()]
    return min(improved, key=lambda step: step.seconds)


def _judge_cuts(search: Search, room_nbytes: int) -> None:
    """Judge min-cuts, without and with saved ends of blocks.

    Of each kind the largest budget that fits is looked for by bisection: peaks fall with it but for
    exceptions, and a minimum cut takes a good part of a second.
    """
    for ends in _ends_of_blocks(search.joint):
        with must_save(ends):
            first, last = 0, len(_BUDGETS)
            while first < last:
                middle = (first + last) // 2
                step = search.judge(search.min_cut(_BUDGETS[middle]))
                if step is not None and step.peak_nbytes <= room_nbytes:
                    last = middle
                else:
                    first = middle + 1


def judge_all_cuts(search: Search) -> None:
    """Judge the min-cuts at all budgets, whatever the room."""
    for ends in _ends_of_blocks(search.joint):
        with must_save(ends):
            for budget in _BUDGETS:
                search.judge(search.min_cut(budget))


def _ends_of_blocks(joint: Joint) -> list[list[fx.Node]]:
    """Returns choices of ends of blocks that are to be saved: none, all, each second."""
    forward = [n for n in joint.place if n in joint.required and n.op == "call_function"]
    places = narrow_places(forward, joint.facts, set(joint.inputs))
    kept = [places[::stride] for stride in _STRIDES if len(places) >= stride]
    return [[], *([node for end in ends for node in end] for ends in kept)]


@contextmanager
def must_save(nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Makes min-cuts save these nodes if backward needs them; a user's own marks come first."""
    marked = [n for n in nodes if "recompute" not in n.meta and is_tensor(n)]
    for node in marked:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        for node in marked:
            node.meta.pop("recompute", None)


def is_tensor(node: fx.Node) -> bool:
    """Returns whether the node is one tensor, which can be saved, and not several or a number."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def _lower(search: Search, step: Step, room_nbytes: int) -> Step:
    """Makes changes at the place of the peak, as long as they lower it.

    Of those found there the best one is made, then each other one that lowers the peak further, and
    then the same changes in all blocks of a net: these have peaks of about the same height, and one
    after another would be looked at as a whole again.
    """
    for _ in range(_CHANGES):
        if step.peak_nbytes <= room_nbytes:
            return step
        found = [
            changed
            for saved in _changes_at_peak(search.joint, step)
            if (changed := search.judge(saved, below_nbytes=step.peak_nbytes)) is not None
        ]
        found.sort(key=lambda one: (one.peak_nbytes, one.seconds))
        if not found or found[0].peak_nbytes >= step.peak_nbytes:
            return step
        step = _made_everywhere(search, step, _together(search, step, found))
    return step


def _together(search: Search, step: Step, found: Sequence[Step]) -> Step:
    """Makes the first of these changes of a step, and each other one that lowers the peak more."""
    before, best = set(step.saved), found[0]
    for one in found[1:]:
        after = set(one.saved)
        saved = set(best.saved) - (before - after) | (after - before)
        lower = search.judge(saved, below_nbytes=best.peak_nbytes)
        if lower is not None and lower.peak_nbytes < best.peak_nbytes:
            best = lower
    return best


def _made_everywhere(search: Search, before: Step, after: Step) -> Step:
    """Makes a change in all blocks: of the like of its values, all are saved, or none.

    Returns the changed step if its peak is no higher, else `after`.
    """
    joint, saved = search.joint, set(after.saved)

    def alike(nodes: Iterable[fx.Node], others: Iterable[fx.Node]) -> set[fx.Node]:
        kinds = {_kind_of(n, joint) for n in others}
        return {n for n in nodes if is_tensor(n) and _kind_of(n, joint) in kinds}

    more = saved | alike(after.again, saved - set(before.saved))
    dropped = {n for n in alike(after.saved, set(before.saved) - saved) if may_run_again(n)}
    ways = [more] if more != saved else []
    if dropped:
        ways = [
            fewer
            for runs_calls in (False, True)
            if (fewer := without(joint, more, dropped, runs_calls=runs_calls)) is not None
        ]
    made = (search.judge(one) for one in ways)
    lower = (one for one in made if one is not None and one.peak_nbytes <= after.peak_nbytes)
    return next(lower, after)


def _kind_of(node: fx.Node, joint: Joint) -> tuple[object, ...]:
    """Returns what a value has in common with those at the same place of other blocks."""
    sources = tuple(str(n.target) for n in node.all_input_nodes if n.op == "call_function")
    readers = tuple(sorted(str(n.target) for n in node.users))
    return str(node.target), joint.facts[node].nbytes, sources, readers


def _changes_at_peak(joint: Joint, step: Step) -> Iterator[set[fx.Node]]:
    """Yields choices that save or recompute one more of the values that the peak holds."""
    curve = max(step.curves, key=lambda one: one.peak_nbytes)
    alive = curve.alive_at(curve.peak_at)
    large = [s for s in alive if joint.facts[s].nbytes > _LARGE * step.peak_nbytes]
    large.sort(key=lambda s: (-joint.facts[s].nbytes, joint.place[s]))
    again, saved = set(step.again), set(step.saved)
    for storage in large[:_CHANGES]:
        if storage in again and is_tensor(storage):
            yield saved | {storage}
            continue
        views = {n for n in saved if joint.facts[n].storage is storage}
        if views and storage.op == "call_function" and may_run_again(storage):
            freed = without(joint, saved, views)
            if freed is not None:
                yield freed
            deep = without(joint, saved, views, runs_calls=True)
            if deep is not None and deep != freed:
                yield deep


def without(
    joint: Joint, saved: set[fx.Node], dropped: set[fx.Node], *, runs_calls: bool = False
) -> set[fx.Node] | None:
    """Returns the saved values without some, and with the sources of these.

    runs_calls: whether library calls run again for them; else what these return is saved
    """
    result = saved - dropped
    pending = list(dropped)
    seen = set[fx.Node]()  # the ways from one value to another are many, as of residual sums
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            result.add(node)
            continue
        if not may_run_again(node):
            return None
        for read in node.all_input_nodes:
            if read in seen or read in result or joint.facts.get(read) is None:
                continue
            runs = may_run_again(read) and (runs_calls or joint.facts[read].kind is not Kind.EXTERN)
            if read.op == "placeholder" or (is_tensor(read) and not runs):
                result.add(read)
            else:
                seen.add(read)
                pending.append(read)
    return None if result & dropped else result


def may_run_again(node: fx.Node) -> bool:
    """Returns whether a second run of the op gives the same value, without side effects."""
    if node.op != "call_function" or node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", "") == "getitem" and all(
            may_run_again(n) for n in node.all_input_nodes
        )
    if target.namespace not in ("aten", "prims") or target._schema.is_mutable:
        return False
    return not is_random(node) and not has_no_layout(node)


def _improved(search: Search, step: Step, room_nbytes: int) -> Step:
    """Fills the room, then replaces saved values that are quick to recompute by slower ones."""
    step = _filled(search, step, room_nbytes)
    for _ in range(_ROUNDS):
        changed = _filled(search, _trimmed(search, step), room_nbytes)
        if changed.peak_nbytes > room_nbytes or changed.seconds >= step.seconds:
            break
        step = changed
    return step


def _trimmed(search: Search, step: Step) -> Step:
    """Recomputes values that take fewer seconds a byte than those recomputed already."""
    joint = search.joint
    rates = [
        rate for rate, group in run_again(joint, step) if _is_large(joint, group, step.peak_nbytes)
    ]
    worst = max(rates, default=0.0)
    for rate, views in _soon_made(joint, step):
        if rate >= worst:
            break
        freed = without(joint, set(step.saved), views & set(step.saved))
        lower = None if freed is None else search.judge(freed)
        if lower is None or lower.peak_nbytes > step.peak_nbytes:
            continue
        if lower.seconds - step.seconds < worst * (step.saved_nbytes - lower.saved_nbytes):
            step = lower
    return step


def _is_large(joint: Joint, nodes: Iterable[fx.Node], peak_nbytes: int) -> bool:
    return sum(joint.facts[n].nbytes for n in nodes) > _LARGE * peak_nbytes


def _filled(search: Search, step: Step, room_nbytes: int) -> Step:
    """Saves more of the recomputed values, the most seconds a byte first, while they fit."""
    groups = [group for _, group in run_again(search.joint, step)]
    first, last = 0, len(groups)
    while first < last:  # as many as fit, by bisection
        middle = (first + last + 1) // 2
        changed = search.judge({*step.saved}.union(*groups[:middle]))
        if changed is not None and changed.peak_nbytes <= room_nbytes:
            first = middle
        else:
            last = middle - 1
    many = search.judge({*step.saved}.union(*groups[:first]))
    if first and many is not None and many.seconds < step.seconds:
        step = many
    for group in groups[first:][:_MAX]:
        changed = search.judge({*step.saved} | group)
        if (
            changed is not None
            and changed.peak_nbytes <= room_nbytes
            and changed.seconds < step.seconds
        ):
            step = changed
    return step


def _soon_made(joint: Joint, step: Step) -> list[tuple[float, set[fx.Node]]]:
    """Saved values with their views, and the seconds a byte to recompute each; fewest first."""
    views: dict[fx.Node, set[fx.Node]] = {}
    for node in step.saved:
        views.setdefault(joint.facts[node].storage, set()).add(node)
    found = [
        (joint.clock.of_node(storage) / joint.facts[storage].nbytes, joint.place[storage])
        for storage in views
        if joint.facts[storage].nbytes > _LARGE * step.peak_nbytes and may_run_again(storage)
    ]
    nodes = list(joint.place)
    return [(rate, views[nodes[place]]) for rate, place in sorted(found)]


def run_again(joint: Joint, step: Step) -> list[tuple[float, set[fx.Node]]]:
    """Groups of values whose saving spares an op's second run, and the seconds a byte; most first.

    All results of one call that are read form a group: attention runs again for its logsumexp as
    for its output.
    """
    backward = joint.parts(step.saved)[1]
    groups: list[tuple[float, set[fx.Node]]] = []
    for node in step.again:
        if joint.facts[node].kind is Kind.VIEW or node.target is operator.getitem:
            continue
        parts = [n for n in node.users if n.target is operator.getitem and n in backward]
        group = {node} if is_tensor(node) else set(parts)
        nbytes = sum(joint.facts[n].nbytes for n in group)
        if nbytes and all(map(is_tensor, group)):
            groups.append((joint.clock.of_node(node) / nbytes, group))
    return sorted(groups, key=lambda one: -one[0])


def narrow_places(
    forward: Sequence[fx.Node], facts: dict[fx.Node, NodeFacts], outside: set[fx.Node]
) -> list[tuple[fx.Node, ...]]:
    """Returns what is carried at each narrow place of a forward, in its order.

    At each place of the forward, the values that are still to be read are carried across that
    place. Where these are few bytes, the model is narrow: between two blocks of a transformer only
    the residual stream is carried, between two stages of a U-Net also the skip connections. Saving
    the values that are carried at narrow places splits the recomputation in backward into pieces,
    only one of which is alive at a time.

    outside: inputs, which are resident all the time
    """
    carried = _carried(forward, facts, outside)
    sizes = [sum(facts[s].nbytes for s in storages) for storages in carried]
    largest = max(sizes, default=0)
    places: list[tuple[fx.Node, ...]] = []
    for at, size in enumerate(sizes):
        if not 0 < size <= largest / 2 or facts[forward[at]].kind is Kind.VIEW:
            continue
        before = sizes[at - 1] if at else 0
        after = sizes[at + 1] if at + 1 < len(sizes) else 0
        found = tuple(s for s in carried[at] if facts[s].nbytes * 64 >= size)
        if size <= before and size <= after and found and (not places or places[-1] != found):
            places.append(found)
    return places


def _carried(
    forward: Sequence[fx.Node], facts: dict[fx.Node, NodeFacts], outside: set[fx.Node]
) -> list[list[fx.Node]]:
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(forward):
        for read in node.all_input_nodes:
            if read in facts:
                last[facts[read].storage] = at
    alive: dict[fx.Node, None] = {}
    found = []
    for at, node in enumerate(forward):
        storage = facts[node].storage
        if last.get(storage, -1) > at and storage not in outside and facts[storage].nbytes:
            alive[storage] = None
        alive = {s: None for s in alive if last[s] > at}
        found.append(list(alive))
    return found
