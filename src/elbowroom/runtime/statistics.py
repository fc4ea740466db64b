"""The mean and rstd that a norm has used, read off its call when it has ended.

    op               statistics     the same for
    batch_norm       [C]            all elements of a channel; in eval mode from the running ones
    instance_norm    [N * C]        those of a map
    layer_norm       [rows]         those of a row
    group_norm       [N * groups]   those of a group

Codecs work in memory order, in which the input may lie in any way: (batch, channels, time) that was
transposed for a layer norm, a convolution's channels_last. Of dimensions in that order, those over
which a statistic varies (V) and those over which it is the same (S) alternate: S V S is batch norm,
V S a layer norm, V S V one of transposed rows, V S V S a group norm in channels_last. The last V is
the channels, what is behind it `inner`, a V before that the rows.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.normal import Statistics, layout_of

_Found = tuple[Tensor, Tensor, Tensor]  # x, and mean and rstd that broadcast with it


def statistics_of(call: Call, saved: Tensor) -> Statistics | None:
    """Returns the statistics of a norm that has just ended.

    Returns None for layouts and ops that have none here.

    saved: the input, as the norm has saved it; some save a contiguous copy.
    """
    x = call.first
    if not isinstance(x, Tensor) or not x.numel() or saved.numel() != x.numel():
        return None
    if saved.shape != x.shape:
        if not saved.is_contiguous():
            return None
        saved = torch.empty(x.shape, device="meta")
    found = logical_statistics(call, saved)
    if found is None:
        return None
    x, mean, rstd = found
    layout = layout_of(x.shape, x.stride(), mean.shape)
    if layout is None:
        return None
    order, inner, rows = layout
    return Statistics(mean.permute(order), rstd.permute(order), inner, rows)


def logical_statistics(call: Call, x: Tensor) -> _Found | None:
    """Returns a view of x, the input of a norm, with the mean and rstd that broadcast over it."""
    find = _FINDERS.get(call.name)
    return None if find is None or not x.numel() else find(call, x)


def _batch_norm(call: Call, x: Tensor) -> _Found | None:
    if x.dim() < 2 or call.func is not F.batch_norm:  # torch's own has other positions
        return None
    shape = 1, x.shape[1], *(1 for _ in x.shape[2:])
    if call.arg(5, "training", False):
        return _saved(call, x, shape)
    mean, var = call.arg(1, "running_mean"), call.arg(2, "running_var")
    if mean is None or var is None:
        return None
    rstd = (var.detach() + call.arg(7, "eps", 1e-5)).rsqrt()
    return x, mean.detach().clone().view(shape), rstd.view(shape)


def _instance_norm(call: Call, x: Tensor) -> _Found | None:
    if x.dim() < 3 or not call.arg(5, "use_input_stats", True):
        return None
    return _saved(call, x, (*x.shape[:2], *(1 for _ in x.shape[2:])))


def _layer_norm(call: Call, x: Tensor) -> _Found | None:
    last = len(call.arg(1, "normalized_shape"))
    return _saved(call, x, (*x.shape[: x.dim() - last], *(1 for _ in range(last))))


def _group_norm(call: Call, x: Tensor) -> _Found | None:
    groups = call.arg(1, "num_groups")
    each = x.shape[1] // groups, x.stride()[1]
    shape = x.shape[0], groups, each[0], *x.shape[2:]
    stride = x.stride()[0], each[0] * each[1], each[1], *x.stride()[2:]
    x = x.detach().as_strided(shape, stride)
    return _saved(call, x, (x.shape[0], groups, *(1 for _ in x.shape[2:])))


def _saved(call: Call, x: Tensor, shape: tuple[int, ...]) -> _Found | None:
    """The last two float tensors without a gradient that the op saved, if they are of this size."""
    if len(call.small) < 2:
        return None
    mean, rstd = call.small[-2:]
    if not mean.numel() == rstd.numel() == prod(shape):
        return None
    return x, mean.view(shape), rstd.view(shape)


_FINDERS: dict[str, Callable[[Call, Tensor], _Found | None]] = {
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
}
