"""Bytes that an optimizer's step takes beside weights, gradients and states, until it is measured.

PyTorch's optimizers make tensors for one parameter after the other (foreach=False), for all at once
(foreach=True, the default on a GPU), or none (fused=True). These stand together with all gradients,
when nothing that was saved for backward is left: no plan makes that moment smaller. Where weights
are a large part of the room, it is the peak of the step.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, optim
from torch.optim import Optimizer

# Tensors of a parameter's size that its step makes, of one parameter after the other; measured
# (`tests/unit/test_update_room.py`). Of other optimizers nothing is known.
_MAKES = {optim.Adam: 2, optim.AdamW: 2, optim.Adamax: 1, optim.NAdam: 2, optim.RAdam: 2}


def update_nbytes(optimizers: Iterable[Optimizer]) -> int:
    """Returns the most bytes that one of these takes in its step beside what is held."""
    return max(
        (_group_nbytes(one, group) for one in optimizers for group in one.param_groups), default=0
    )


def _group_nbytes(optimizer: Optimizer, group: dict[str, Any]) -> int:
    sizes: list[int] = [p.nbytes for p in group["params"] if p.requires_grad]
    makes = _makes(optimizer, group)
    if not (sizes and makes) or group.get("fused"):
        return 0
    if _runs_together(group):
        return sum(sizes)  # one tensor of each
    return makes * max(sizes)


def _makes(optimizer: Optimizer, group: dict[str, Any]) -> int:
    decays = bool(group.get("weight_decay"))
    if type(optimizer) is optim.SGD:
        return int(decays)
    apart = decays and not (type(optimizer) is optim.AdamW or group.get("decoupled_weight_decay"))
    made = _MAKES.get(type(optimizer), 0)
    return made + (apart if made else 0)


def _runs_together(group: dict[str, Any]) -> bool:
    params: list[Tensor] = group["params"]
    if group.get("foreach") is None:
        return all(p.is_cuda for p in params)
    return bool(group["foreach"])
