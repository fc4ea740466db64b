"""The mean and rstd that a norm has used, read off its call when it has ended.

Elements are counted in memory order.

    op                       statistics                     element i has those of
    batch_norm               mean, rstd [C]                 (i // neighbours) % C
      in eval mode           running mean, 1 / sqrt(running var + eps)
    instance_norm            [N * C]                        i // (elements of one map)
    layer_norm               [rows]                         i // (elements of one row)
    group_norm               [N * groups]                   i // (elements of one group)
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.normal import Statistics


def statistics_of(call: Call) -> Statistics | None:
    """Those of a norm that has just ended, or None for layouts and ops that have none here."""
    find = _FINDERS.get(call.name)
    x = call.arg(0, "input")
    if find is None or not isinstance(x, Tensor) or not x.numel():
        return None
    found = find(call, x)
    if found is None or found.mean.numel() != found.rstd.numel():
        return None
    return None if x.numel() % (found.mean.numel() * found.inner) else found


def _batch_norm(call: Call, x: Tensor) -> Statistics | None:
    inner = _channel_run(x) if x.dim() > 1 else None
    if inner is None or call.func is not F.batch_norm:  # torch's own has other positions
        return None
    if call.arg(5, "training", False):
        saved = _saved(call, x.shape[1])
        return None if saved is None else Statistics(*saved, inner)
    mean, var = call.arg(1, "running_mean"), call.arg(2, "running_var")
    if mean is None or var is None:
        return None
    eps = call.arg(7, "eps", 1e-5)
    return Statistics(mean.detach().clone(), (var.detach() + eps).rsqrt(), inner)


def _instance_norm(call: Call, x: Tensor) -> Statistics | None:
    if x.dim() < 3 or not x.is_contiguous() or not call.arg(5, "use_input_stats", True):
        return None
    saved = _saved(call, x.shape[0] * x.shape[1])
    return None if saved is None else Statistics(*saved, x[0, 0].numel())


def _layer_norm(call: Call, x: Tensor) -> Statistics | None:
    row = prod(call.arg(1, "normalized_shape"))
    saved = _saved(call, x.numel() // row) if x.is_contiguous() else None
    return None if saved is None else Statistics(*saved, row)


def _group_norm(call: Call, x: Tensor) -> Statistics | None:
    rows = x.shape[0] * call.arg(1, "num_groups")
    saved = _saved(call, rows) if x.is_contiguous() else None
    return None if saved is None else Statistics(*saved, x.numel() // rows)


def _saved(call: Call, size: int) -> tuple[Tensor, Tensor] | None:
    """The last two float tensors without a gradient that the op saved, if they are of this size."""
    if len(call.small) < 2:
        return None
    mean, rstd = call.small[-2:]
    return (mean, rstd) if mean.numel() == rstd.numel() == size else None


_FINDERS: dict[str, Callable[[Call, Tensor], Statistics | None]] = {
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
}


def _channel_run(x: Tensor) -> int | None:
    """How many elements of one channel are neighbours in memory order; None for other layouts."""
    if x.is_contiguous():
        return prod(x.shape[2:])
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]):
        return 1
    return None
