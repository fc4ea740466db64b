"""Keeps the bits of sums over the maps of convolutions, whose order depends on layouts in memory.

Inductor puts what convolutions read and give into channels_last. The layout of a value that loops
compute follows from what its loop reads, so it depends on which values are stored. A sum over the
pixels of a map (of BatchNorm's backward, of a bias) runs in tiles, which are chosen by the layouts
of all that its kernel reads. On a CPU the last channels, where their number is no multiple of a
vector's, are added in another order then.

    plain backward  r = relu(norm(x)), in the kernel of the sum over g * (r > 0)
    a plan          r stored, since the next convolution is made again from it

Measured: a net of 24 channels had other bits in 20 of 22 gradients, by up to 3e-4 of one; nets of
16 and 32 had none. So in graphs of maps with such a rest of channels

    copies  the loops that plain backward computes for gradients are computed for these alone, from
            what plain saves; what is made again besides has its own (`twice.plain_loops`)
    kept    what plain saves of loops, and loops alone read, of such maps stays saved, since its
            layout is that of forward's kernel. Mostly these are masks, of a byte an element

Library calls may run again: what they read and give is stored, in their layout.

All this also depends on whether a graph has convolutions. Plain backward has only their gradients,
a plan's has those that run again. With these Inductor

    prefers  what they read and give in channels_last, with all that follows, gradients among it
    leaves   what gradients of convolutions read as it lies. Else it puts that into the order in
             which it was traced, which is another one for depthwise convolutions

So each node of a joint graph is marked with what plain `torch.compile` does, and that is done.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx

from elbowroom.compiled.collect import Kind, known_size, ops_named, packet_of
from elbowroom.compiled.exponents import source_of
from elbowroom.compiled.joint import Joint, Step
from elbowroom.compiled.rounding import is_read

_CONVOLUTION = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_RULE = "find_nodes_prefer_channels_last"  # of Inductor's lowering; private to torch
_LAYOUT = "elbowroom_layout"  # in a node's meta
_lock = threading.RLock()
_VECTOR = 16  # floats of the longest vectors of a CPU
_TRANSFORMS = ops_named("_fft_r2c _fft_c2r _fft_c2c")


class Layout(NamedTuple):
    """How plain torch.compile lays out a node.

    has_convolutions  whether its graph has convolutions
    prefers           whether it is preferred in channels_last
    """

    has_convolutions: bool = True
    prefers: bool = True


def has_rest(value: Any) -> bool:
    """Returns whether a map's channels are no multiple of a vector, on a CPU."""
    if not isinstance(value, torch.Tensor) or value.dim() not in (4, 5):
        return False
    return value.device.type == "cpu" and known_size(value.shape[1]) % _VECTOR != 0


def laid_out_by_readers(joint: Joint, plain: Step) -> frozenset[fx.Node]:
    """Returns what stays saved, as plain torch.compile has it, since its layout would change."""
    if not joint.is_channels_last:
        return frozenset()
    _, after = joint.parts(plain.saved)
    return frozenset(
        n
        for n in plain.saved
        if joint.facts[n].kind in (Kind.POINTWISE, Kind.REDUCTION)
        and has_rest(n.meta["val"])
        and not is_read(n, joint.facts, after, by_loops=False)
    )


def sums_up_groups(joint: Joint) -> bool:
    """Returns whether a sum is over groups of a map's channels, with a rest, as in GroupNorm."""
    if not joint.is_channels_last:
        return False
    return any(
        _is_of_groups(read)
        for node, fact in joint.facts.items()
        if fact.kind is Kind.REDUCTION
        for read in node.all_input_nodes
    )


def sums_up_transforms(joint: Joint) -> bool:
    """Returns whether a sum is over values that a Fourier transform has laid out across its order.

    They lie in memory as the transform gives them, the summed dimension within the others. Which
    loop adds them up decides in which order it does so.
    """
    if not any(packet_of(node) in _TRANSFORMS for node in joint.facts):
        return False
    return any(
        _is_across(node, node.args[0])
        for node, fact in joint.facts.items()
        if fact.kind is Kind.REDUCTION and packet_of(node) is torch.ops.aten.sum
    )


def _is_across(reduction: fx.Node, read: Any) -> bool:
    """Returns whether a summed dimension lies within one that is kept and comes later."""
    value = read.meta.get("val") if isinstance(read, fx.Node) else None
    if not isinstance(value, torch.Tensor) or len(reduction.args) < 2:
        return False
    dims: Any = reduction.args[1]
    if not dims or value.dim() == 0:  # all are summed
        return False
    summed = {int(dim) % value.dim() for dim in dims}
    strides = [known_size(stride) for stride in value.stride()]
    return any(
        strides[kept] > strides[dim] and known_size(value.shape[kept]) > 1
        for dim in summed
        for kept in range(dim + 1, value.dim())
        if kept not in summed
    )


def _is_of_groups(read: fx.Node) -> bool:
    """Returns whether a view has a map's channels in groups."""
    whole: Any = source_of(read).meta.get("val")
    view = read.meta.get("val")
    if not has_rest(whole) or not isinstance(view, torch.Tensor) or view.dim() < 2:
        return False
    return known_size(view.shape[1]) < known_size(whole.shape[1])


def mark_layouts(joint: Joint, plain: Step) -> None:
    """Notes in each node's meta how plain torch.compile lays it out."""
    find = getattr(_lowering(), _RULE, None)
    if find is None or not joint.is_channels_last:
        return
    in_forward = find(_lowered(joint.graph))
    _, after = joint.parts(plain.saved)
    has_convolutions = any(n.target is _CONVOLUTION for n in after)
    in_backward = _preferred_in_backward(after, joint) if has_convolutions else set()
    for node in joint.facts:
        if node in joint.required:
            node.meta[_LAYOUT] = Layout(True, node in in_forward)
        else:
            node.meta[_LAYOUT] = Layout(has_convolutions, node in in_backward)


def _preferred_in_backward(after: set[fx.Node], joint: Joint) -> set[fx.Node]:
    """Returns what plain backward prefers in channels_last, behind checkpoints of the user's."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in joint.place:
        if node in after:
            for read in node.all_input_nodes:
                if read not in copies:
                    copies[read] = graph.placeholder(read.name)
            copies[node] = graph.node_copy(node, copies.__getitem__)
    preferred = getattr(_lowering(), _RULE)(_lowered(graph))
    return {node for node, copy in copies.items() if copy in preferred}


def _layout_of(node: fx.Node) -> Layout:
    layout: Layout = node.meta.get(_LAYOUT, Layout())
    return layout


def _is_depthwise(node: fx.Node) -> bool:
    """Returns whether a node is the backward of a depthwise convolution."""
    if node.target is not _BACKWARD:
        return False
    weight: Any = node.args[2]
    return int(node.args[9]) > 1 and known_size(weight.meta["val"].shape[1]) == 1  # type: ignore[arg-type]


def _lowering() -> Any:
    from torch._inductor.graph import GraphLowering

    return GraphLowering


def _lowered(graph: fx.Graph) -> Any:
    """Returns what stands in for Inductor's lowering of a graph."""
    return SimpleNamespace(module=SimpleNamespace(graph=graph))


@contextmanager
def laid_out_as_plain() -> Iterator[None]:
    """Has gradients laid out as plain torch.compile does, beside convolutions that run again."""
    lowering = _lowering()
    find, run_node = getattr(lowering, _RULE, None), lowering.run_node
    if find is None:  # another version of torch
        yield
        return

    def prefer(self: Any) -> Any:
        found = find(self)
        others = [n for n in found if not _layout_of(n).prefers]
        return found.difference(others) if self.is_backward else found

    def run(self: Any, node: fx.Node) -> Any:
        if _layout_of(node).has_convolutions or not _is_depthwise(node):
            return run_node(self, node)
        had, self.layout_opt = self.layout_opt, False
        try:
            return run_node(self, node)
        finally:
            self.layout_opt = had

    with (
        _lock,
        mock.patch.object(lowering, _RULE, prefer),
        mock.patch.object(lowering, "run_node", run),
    ):
        yield


def has_no_layout(node: fx.Node) -> bool:
    """Returns whether a convolution reads a map that lies in memory as both layouts have it.

    So do maps of one channel or of one pixel. Inductor puts such a convolution into channels_last
    in forward and leaves it as it is in backward. There the library takes another algorithm, which
    gives other bits, so it does not run again.
    """
    if node.target is not _CONVOLUTION:
        return False
    return has_both_layouts(node.args[0].meta["val"])  # type: ignore[union-attr]


def has_both_layouts(value: torch.Tensor) -> bool:
    """Returns whether a map lies in memory as both layouts have it; other tensors have but one."""
    if value.dim() != 4:
        return False
    _, channels, *pixels = map(known_size, value.shape)
    return channels == 1 or all(n == 1 for n in pixels)
