"""state="auto": the format of states is chosen by `er.fit`; without it they are fp32.

A param group that was given "auto" has, beside `state`, which is how its states are held now,

    auto    the mildest format that may be chosen: "fp32", or what was loaded

so that what a file holds in fewer bytes is not made larger again. Who chooses calls `hold`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from elbowroom.optim.base import EncodedOptimizer
from elbowroom.optim.formats import RANK, Group, offered, state_nbytes
from elbowroom.optim.transcode import transcode


def auto_groups(optimizer: EncodedOptimizer) -> list[Group]:
    """The groups whose format may be chosen."""
    return [group for group in optimizer.param_groups if "auto" in group]


def held_as(optimizer: EncodedOptimizer, group: Group, state: str) -> str:
    """The format of an auto group where `state` is chosen for all of them.

    That, or int8 for a rule that has no second moment and thus no int4; nothing milder than `auto`.
    """
    known, mildest = offered(second=len(optimizer.moments) > 1), str(group["auto"])
    return max(state if state in known else "int8", mildest, key=RANK.__getitem__)


def nbytes_as(optimizer: EncodedOptimizer, state: str) -> int:
    """Bytes of the states of all auto groups where `state` is chosen for them, made or not."""
    return sum(_nbytes(optimizer, group, state) for group in auto_groups(optimizer))


@torch.no_grad()
def hold(optimizer: EncodedOptimizer, state: str) -> int:
    """Holds the states of auto groups as `state` from now on; converts existing ones one by one.

    The smallest first, which makes room for the next. Each group is held so as a whole, or, after
    an error, as it was. How many parameters' states were converted.
    """
    optimizer.wait()
    return sum(
        _convert_group(optimizer, group, held_as(optimizer, group, state))
        for group in auto_groups(optimizer)
    )


def _convert_group(optimizer: EncodedOptimizer, group: Group, state: str) -> int:
    before, after = group | {}, group | {"state": state}
    done: list[Tensor] = []
    try:
        for p in _to_convert(optimizer, before, after):
            _convert(optimizer, p, before, after)
            done.append(p)
    except BaseException:  # an interrupt, too: half a group would have states of another format
        for p in reversed(done):
            _convert(optimizer, p, after, before)
        raise
    group["state"] = state
    return len(done)


def _to_convert(optimizer: EncodedOptimizer, before: Group, after: Group) -> Iterator[Tensor]:
    """Parameters that have states, and would have others."""
    for p in sorted(before["params"], key=Tensor.numel):
        formats = [optimizer.layout.format_of(p.shape, g["state"]) for g in (before, after)]
        if optimizer.state.get(p) and formats[0] != formats[1]:
            yield p


def _convert(optimizer: EncodedOptimizer, p: Tensor, before: Group, after: Group) -> None:
    saved = optimizer.state[p]
    layout = optimizer.layout
    fresh = layout.fresh(p, after | {"weights": "nearest"})  # a residual stays as it is
    fresh["step"] = saved["step"]
    transcode(layout, p, saved, before["state"], fresh, after)
    if "residual" in saved:
        fresh["residual"] = saved["residual"]
    optimizer.state[p] = fresh


def _nbytes(optimizer: EncodedOptimizer, group: Group, state: str) -> int:
    state, second = held_as(optimizer, group, state), len(optimizer.moments) > 1
    return sum(
        state_nbytes(p, state, second=second, weights=group["weights"])
        for p in group["params"]
        if p.requires_grad
    )
