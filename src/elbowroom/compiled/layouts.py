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

That does not suffice for norms over groups of such channels: of one net the gradient in front of a
GroupNorm had another layout, though its kernel reads the same. There a warning says so
(`sums_up_groups`).
"""

from typing import Any

import torch
from torch import fx

from elbowroom.compiled.collect import Kind, known_size
from elbowroom.compiled.exponents import source_of
from elbowroom.compiled.joint import Joint, Step
from elbowroom.compiled.rounding import is_read

_VECTOR = 16  # floats of the longest vectors of a CPU


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


def _is_of_groups(read: fx.Node) -> bool:
    """Returns whether a view has a map's channels in groups."""
    whole: Any = source_of(read).meta.get("val")
    view = read.meta.get("val")
    if not has_rest(whole) or not isinstance(view, torch.Tensor) or view.dim() < 2:
        return False
    return known_size(view.shape[1]) < known_size(whole.shape[1])


def has_no_layout(node: fx.Node) -> bool:
    """Returns whether a convolution reads a map that lies in memory as both layouts have it.

    So do maps of one channel or of one pixel. Inductor puts such a convolution into channels_last
    in forward and leaves it as it is in backward. There the library takes another algorithm, which
    gives other bits, so it does not run again.
    """
    if node.target is not torch.ops.aten.convolution.default:
        return False
    return has_both_layouts(node.args[0].meta["val"])  # type: ignore[union-attr]


def has_both_layouts(value: torch.Tensor) -> bool:
    """Returns whether a map lies in memory as both layouts have it; other tensors have but one."""
    if value.dim() != 4:
        return False
    _, channels, *pixels = map(known_size, value.shape)
    return channels == 1 or all(n == 1 for n in pixels)
