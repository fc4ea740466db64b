"""The graph that autograd has built, as data: what its backward will run, before it runs.

Every node knows the shapes of the tensors that its op has made, which are those of the gradients
that it takes, and the nodes that it gives gradients to. Its number tells when it was made.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from torch import Tensor

from elbowroom.measure.layouts import copied_nbytes
from elbowroom.measure.recorder import StepRecorder
from elbowroom.plan.backward import BackwardOp, Graph

_SAVED = "_raw_saved_"
_RESULTS = ("result", "output", "out", "grad_input")  # fields of an op's own results
_INDICES = ("index", "indices", "mask", "condition", "target", "rng_state")  # small, or not made
_POSITIONS = {  # of inputs, in the order of an op's arguments; others come first
    **dict.fromkeys(("other", "mat2", "weight", "key", "batch1", "tensor1", "end", "exponent"), 1),
    **dict.fromkeys(("value", "batch2", "tensor2"), 2),
}


def graph_of(
    outputs: Iterable[Tensor],
    recorder: StepRecorder | None = None,
    since: int = 0,
    *,
    is_whole: bool = True,
) -> Graph:
    """Returns what backward from these will run; recorder: of a forward that was written down.

    since: autograd's number as that forward began; nodes from before are marked as older
    is_whole: False leaves out what backward runs once it has come to older nodes

    Where one of them is a single number, it is taken for the loss, and the gradient comes from it
    alone; else from all of them.
    """
    made = [(x, x.grad_fn) for x in outputs if x.grad_fn is not None]
    losses = [(x, fn) for x, fn in made if x.numel() == 1]
    starts = {(fn, x.output_nr) for x, fn in (losses or made)}
    found: dict[Any, int] = {}
    waiting = [fn for fn, _ in starts]
    while waiting:
        fn = waiting.pop()
        if fn not in found:
            found[fn] = len(found)
            if is_whole or fn._sequence_nr() >= since:
                waiting += [to for to, _ in fn.next_functions if to is not None]
    hidden = () if recorder is None else recorder.hidden()
    ranges = sorted(one for region in hidden for one in region if one[0] < one[1])
    nodes = tuple(_node(fn, found, ranges, since) for fn in found)
    roots = tuple(sorted((found[fn], which) for fn, which in starts))
    least = _not_led_to(nodes, roots)
    if recorder is None:
        return Graph(nodes, roots, least_roots=least)
    return Graph(nodes, roots, recorder.asks(), hidden, least)


def _not_led_to(
    nodes: tuple[BackwardOp, ...], roots: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Returns the roots, the one made last first, to which no other one leads."""
    found, reached = [], set[int]()
    for root in sorted(roots, key=lambda root: nodes[root[0]].nth, reverse=True):
        if root[0] in reached:
            continue
        found.append(root)
        waiting = [root[0]]
        while waiting:
            at = waiting.pop()
            if at not in reached:
                reached.add(at)
                waiting += [to for to, _ in nodes[at].gives if to >= 0]
    return tuple(found)


def _is_in(ranges: list[tuple[int, int]], nth: int) -> bool:
    """Returns whether a number lies in one of these ranges, which are in order and disjoint."""
    at = bisect_right(ranges, (nth, nth + 1)) - 1
    return any(first <= nth < end for first, end in ranges[max(at, 0) : at + 2])


def _node(fn: Any, found: dict[Any, int], hidden: list[tuple[int, int]], since: int) -> BackwardOp:
    """Returns the record of a node. hidden: ranges of numbers for which the user's hooks hold."""
    leaf, nth = getattr(fn, "variable", None), fn._sequence_nr()
    return BackwardOp(
        nth=nth,
        name=_name(fn),
        takes=tuple(map(_gradient_nbytes, fn._input_metadata)),
        gives=tuple((found.get(to, -1), nr) for to, nr in fn.next_functions),
        stays=leaf is not None and leaf.grad is None,
        workspace=getattr(fn, "workspace_nbytes", None) or copied_nbytes(fn),
        reads=tuple(_reads(fn, found)) if hidden and _is_in(hidden, nth) else (),
        is_older=nth < since,
    )


def _name(fn: Any) -> str:
    """Returns what autograd calls a node; a reduction over indices is followed by its kind."""
    name, kind = fn.name().removeprefix("torch::autograd::"), getattr(fn, "_saved_reduce", "")
    return f"{name} {kind}" if kind else str(name)


def _gradient_nbytes(made: Any) -> int:
    """Returns the bytes of a result's gradient; 0 if it is nested, and its size is not known."""
    if made.is_nested_tensor:
        return 0
    return int(prod(made.shape) * made.dtype.itemsize)


def _reads(fn: Any, found: dict[Any, int]) -> Iterator[tuple[int, int]]:
    """Yields what a node has saved, as (node that has made it, which of its tensors).

    Only that of which the graph tells who has made it: inputs that need a gradient, and results.
    """
    edges = fn.next_functions
    for name in dir(type(fn)):
        if not name.startswith(_SAVED):
            continue
        saved = getattr(fn, name)
        each = saved if isinstance(saved, list | tuple) else (saved,)
        there = [k for k, one in enumerate(each) if getattr(one, "data", None) is not None]
        field = name.removeprefix(_SAVED)
        if not there or field in _INDICES:
            continue
        if field.startswith(_RESULTS):
            which = int(field.removeprefix("result") or 0) if field.startswith("result") else 0
            if which < len(fn._input_metadata):
                yield found[fn], which
            continue
        at = there if len(each) > 1 or field == "tensors" else [_POSITIONS.get(field, 0)]
        for k in at:
            to, nr = edges[k] if k < len(edges) else (None, 0)
            if to is not None:
                yield found[to], nr
