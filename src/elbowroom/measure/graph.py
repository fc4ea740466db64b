"""The graph that autograd has built, as data: what its backward will run, before it runs.

Every node knows the shapes of the tensors that its op has made, which are those of the gradients
that it takes, and the nodes that it gives gradients to. Its number tells when it was made.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

from torch import Tensor

from elbowroom.measure.recorder import StepRecorder
from elbowroom.plan.backward import Graph, Node
from elbowroom.runtime.slot import Deferred, View


def graph_of(outputs: Iterable[Tensor], recorder: StepRecorder | None = None) -> Graph:
    """Returns what backward from these will run; recorder: of a forward that was written down.

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
            waiting += [to for to, _ in fn.next_functions if to is not None]
    nodes = tuple(_node(fn, found) for fn in found)
    roots = tuple(sorted((found[fn], which) for fn, which in starts))
    last = tuple(sorted(roots, key=lambda root: nodes[root[0]].nth)[-1:])
    if recorder is None:
        return Graph(nodes, roots, last_roots=last)
    return Graph(nodes, roots, recorder.asks(), recorder.hidden(), last)


def _node(fn: Any, found: dict[Any, int]) -> Node:
    leaf = getattr(fn, "variable", None)
    return Node(
        nth=fn._sequence_nr(),
        name=fn.name().removeprefix("torch::autograd::"),
        takes=tuple(prod(one.shape) * one.dtype.itemsize for one in fn._input_metadata),
        gives=tuple((-1 if to is None else found[to], nr) for to, nr in fn.next_functions),
        stays=leaf is not None and leaf.grad is None,
        workspace=getattr(fn, "workspace_nbytes", None) or _layout_nbytes(fn),
        saves=any(name.startswith("_raw_saved") for name in dir(type(fn))),
    )


def _layout_nbytes(fn: Any) -> int:
    """Returns what a convolution takes for another layout of an input that needs no gradient.

    Of one that needs one, the graph tells the size. The first layer's is an image.
    """
    if not fn.name().startswith("ConvolutionBackward") or fn.next_functions[0][0] is not None:
        return 0
    packed = getattr(fn._raw_saved_input, "data", None)
    view = packed.held if isinstance(packed, Deferred) else packed
    if not isinstance(view, View):
        return 0
    return 2 * prod(view.geometry.shape) * view.slot.dtype.itemsize
