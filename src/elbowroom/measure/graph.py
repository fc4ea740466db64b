"""The graph that autograd has built, as data: what its backward will run, before it runs.

Every node knows the shapes of the tensors that its op has made, which are those of the gradients
that it takes, and the nodes that it gives gradients to. Its number tells when it was made.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from elbowroom.measure.recorder import StepRecorder
from elbowroom.plan.backward import Graph, Node
from elbowroom.runtime.kept import Deferred
from elbowroom.runtime.slot import View

_SAVED = "_raw_saved_"
_RESULTS = ("result", "output", "out", "grad_input")  # fields of an op's own results
_INDICES = ("index", "indices", "mask", "condition", "target", "rng_state")  # small, or not made
_POSITIONS = {  # of inputs, in the order of an op's arguments; others come first
    **dict.fromkeys(("other", "mat2", "weight", "key", "batch1", "tensor1", "end", "exponent"), 1),
    **dict.fromkeys(("value", "batch2", "tensor2"), 2),
}
_BLOCK = 16  # channels of a layout of oneDNN's
_SMALL_KERNEL = 3  # pixels a side
_LIBRARY_SAMPLES = 16  # of which convolutions of one pixel are oneDNN's, on one thread


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
    ranges = sorted(one for region in hidden for one in region)
    nodes = tuple(
        replace(
            _node(fn, found, is_hidden=_is_in(ranges, fn._sequence_nr())),
            is_older=fn._sequence_nr() < since,
        )
        for fn in found
    )
    roots = tuple(sorted((found[fn], which) for fn, which in starts))
    last = tuple(sorted(roots, key=lambda root: nodes[root[0]].nth)[-1:])
    if recorder is None:
        return Graph(nodes, roots, last_roots=last)
    return Graph(nodes, roots, recorder.asks(), hidden, last)


def _is_in(ranges: list[tuple[int, int]], nth: int) -> bool:
    """Returns whether a number lies in one of these ranges, which are in order and disjoint."""
    at = bisect_right(ranges, (nth, nth + 1)) - 1
    return any(first <= nth < end for first, end in ranges[max(at, 0) : at + 2])


def _node(fn: Any, found: dict[Any, int], *, is_hidden: bool) -> Node:
    leaf = getattr(fn, "variable", None)
    return Node(
        nth=fn._sequence_nr(),
        name=fn.name().removeprefix("torch::autograd::"),
        takes=tuple(map(_gradient_nbytes, fn._input_metadata)),
        gives=tuple((found.get(to, -1), nr) for to, nr in fn.next_functions),
        stays=leaf is not None and leaf.grad is None,
        workspace=getattr(fn, "workspace_nbytes", None) or _convolution_nbytes(fn),
        copies_maps=fn.name().startswith("ConvolutionBackward") and _copies_maps(fn),
        reads=tuple(_reads(fn, found)) if is_hidden else (),
    )


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


def _convolution_nbytes(fn: Any) -> int:
    """Returns what a convolution is known to take beside gradients; 0: it is none.

    An input that needs no gradient, as an image of the first layer, is copied into another layout.
    Of one that needs one, the graph tells the size.
    """
    view = _saved_input(fn) if fn.name().startswith("ConvolutionBackward") else None
    if view is None:
        return 0
    nbytes = _blocks_nbytes(fn) if _has_channels_last(view) else 0
    if fn.next_functions[0][0] is None:
        nbytes = max(nbytes, 2 * prod(view.geometry.shape) * view.slot.dtype.itemsize)
    return nbytes


def _blocks_nbytes(fn: Any) -> int:
    """Returns what oneDNN takes for the weight's gradient where channels come last in memory.

    It copies the weight, unless its channels come last, too, and computes the gradient in blocks of
    16 by 16 channels. A group of fewer is filled up, so that a depthwise kernel takes 256 times its
    bytes. Depthwise kernels of up to three pixels a side, and all of one pixel, have code of their
    own. Measured on one thread.
    """
    (weight, which), groups = fn.next_functions[1], fn._saved_groups
    if weight is None or fn._input_metadata[0].device.type != "cpu":
        return 0
    made = weight._input_metadata[which]
    outs, ins, *pixels = made.shape
    nbytes = _gradient_nbytes(made)
    if max(pixels) == 1:
        return 0
    if groups == outs and ins == 1 and max(pixels) <= _SMALL_KERNEL:
        return 2 * nbytes
    if groups > 1 and (ins % _BLOCK or outs // groups % _BLOCK):
        each: int = nbytes // ins // (outs // groups)
        return nbytes + each * _filled(ins) * _filled(outs // groups)
    leaf = getattr(weight, "variable", None)
    lies = leaf is not None and leaf.is_contiguous(memory_format=torch.channels_last)
    return 2 * nbytes if lies else 3 * nbytes


def _filled(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _copies_maps(fn: Any) -> bool:
    """Returns whether a convolution's library copies its maps into layouts of its own.

    On a CPU, oneDNN copies none whose channels come last in memory. Where each pixel is multiplied
    by a matrix alone, in one or two dimensions of fp32, PyTorch calls it for at least 16 samples or
    on several threads (`ConvParams::use_mkldnn` in ATen/native/Convolution.cpp); otherwise it
    multiplies matrices as the maps lie. Where it is not known, maps are taken to be copied.
    """
    made, view = fn._input_metadata[0], _saved_input(fn)
    if made.device.type != "cpu":
        return True
    if view is not None and _has_channels_last(view):
        return False
    weight, which = fn.next_functions[1]
    if weight is None or made.dtype is not torch.float32 or fn._saved_groups != 1:
        return True
    pixels = weight._input_metadata[which].shape[2:]
    is_product = {*pixels, *fn._saved_stride} == {1} and len(pixels) < 3
    uses_library = made.shape[0] >= _LIBRARY_SAMPLES or torch.get_num_threads() > 1
    return uses_library or not is_product or prod(made.shape[2:]) == 1


def _has_channels_last(view: View) -> bool:
    """Returns whether the channels of images come last in memory."""
    shape, stride = view.geometry.shape, view.geometry.stride
    return len(shape) == 4 and shape[1] > 1 and stride[1] == 1 and stride[3] == shape[1]


def _saved_input(fn: Any) -> View | None:
    """Returns how a convolution's input is held; None: not by us."""
    packed = getattr(fn._raw_saved_input, "data", None)
    view = packed.held if isinstance(packed, Deferred) else packed
    return view if isinstance(view, View) else None
