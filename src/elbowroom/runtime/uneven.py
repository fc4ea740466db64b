"""Norms whose channels differ too much for a code that shares a step among neighbours.

A group's step follows its largest values, and the backward of BatchNorm multiplies by rstd, which
follows each channel's own. With channels of very different scale or mean in one group, the variance
of the error grows by

    share * mean over channels of (extent of the neighbours / extent of the channel)^2

where `share` of the groups holds more than one channel, and an extent is mean +- 2 / rstd.
Measured without this check, with 8 of 64 channels scaled by 0.01: gErr2 from 0.0098 to 49 (NCHW,
10 x 10), to 1,173 (channels_last) and to 15,255 (BatchNorm1d); docs/log.md.

The saved statistics tell it, so it is known only when the op has ended. On a GPU reading them would
be a sync, and is not done: there, encode (x - mean) * rstd, once that exists.
"""

from torch import Tensor
from torch.nn import functional as F

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.producers import channel_run, statistics_of

_GROUP = 64  # the group size of most settings
_WORST_GROWTH = 12.0  # ResNet-18, width 16, steps 0 to 40: at most 5.9


def is_uneven(call: Call) -> bool:
    """Whether a lossy code of this BatchNorm's input would drown some channels."""
    x, statistics = call.arg(0, "input"), statistics_of(call, 2)
    if call.name != "batch_norm" or statistics is None or x.device.type != "cpu" or x.dim() < 2:
        return False
    mean, rstd = (part.detach().double().flatten() for part in statistics)
    if mean.numel() != x.shape[1] or not bool((rstd > 0).all()):
        return False
    run = channel_run(x) or 1
    deviation = 1 / rstd
    high, low = mean + 2 * deviation, mean - 2 * deviation
    if run >= _GROUP:  # only next neighbours share a group
        extent = _neighbours(high) + _neighbours(-low)
        share = _GROUP / run
    else:
        extent = (high.max() - low.min()).expand_as(high)
        share = 1.0
    return bool(share * (extent / (high - low)).square().mean() > _WORST_GROWTH)


def _neighbours(values: Tensor) -> Tensor:
    """The largest of each value and those next to it."""
    padded = F.pad(values[None, None], (1, 1), value=float("-inf"))
    return F.max_pool1d(padded, 3, stride=1)[0, 0]
