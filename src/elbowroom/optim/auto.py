"""state="auto": `er.fit` chooses the format of states; without it they are fp32.

A param group that was given "auto" has two entries:

    state   the present format of its states
    auto    the most precise format that may be chosen: "fp32", or that of a loaded file, whose
            states would gain nothing from a more precise one

To choose a format is to call `hold`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from elbowroom.optim.base import EncodedOptimizer
from elbowroom.optim.formats import RANK, Group, offered, state_nbytes
from elbowroom.optim.transcode import transcode


def auto_groups(optimizer: EncodedOptimizer) -> list[Group]:
    """Returns the groups whose format may be chosen."""
    return [group for group in optimizer.param_groups if "auto" in group]


def held_as(optimizer: EncodedOptimizer, group: Group, state: str) -> str:
    """Returns the format that an auto group gets if `state` is chosen for all groups.

    It is `state`, or int8 for a rule without a second moment, which has no int4; and it is never
    more precise than `auto`.
    """
    known, mildest = offered(second=len(optimizer.moments) > 1), str(group["auto"])
    return max(state if state in known else "int8", mildest, key=RANK.__getitem__)


def nbytes_as(optimizer: EncodedOptimizer, state: str) -> int:
    """Returns the bytes of the states of all auto groups if `state` is chosen for them.

    States that do not exist yet count, too.
    """
    return sum(_nbytes(optimizer, group, state) for group in auto_groups(optimizer))


@torch.no_grad()
def hold(optimizer: EncodedOptimizer, state: str) -> int:
    """Sets the format of the states of auto groups; returns how many states were converted.

    Existing states are converted one by one, the smallest first, so that the memory that is freed
    serves the next ones. After an error, a group has its former format as a whole.
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
    """Yields the parameters whose states have another format in the two settings of a group."""
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
