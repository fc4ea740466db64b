"""Which parameters can be updated, and whether the states that there are belong to them.

Asked when a parameter is given, and again before each step: `model.to(...)` and `p.data = ...`
change it under its states.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elbowroom.errors import UnsupportedParameter
from elbowroom.kernels.states import code_shape
from elbowroom.optim.formats import Group, names, row_of
from elbowroom.optim.sharded import in_whole_rows, local

if TYPE_CHECKING:
    from elbowroom.optim.base import EncodedOptimizer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_parameter(p: Tensor, weights: str) -> None:
    """Raises UnsupportedParameter for what is not dense, in whole rows, and of a dtype of ours."""
    if p.dtype not in DTYPES:
        raise UnsupportedParameter(
            f"{_named(p)}; states are encoded for float32, bfloat16 and float16. Give it to an "
            "optimizer of torch.optim"
        )
    if p.dtype is torch.float16 and weights != "nearest":
        raise UnsupportedParameter(
            f"{_named(p)}, for which there is no weights={weights!r}. Use bfloat16, or say "
            "weights='nearest' and lose updates below half a step of float16"
        )
    if not in_whole_rows(p):
        raise UnsupportedParameter(
            f"{_named(p)} and a DTensor that is cut otherwise than in rows; states are encoded by "
            "rows. Replicate it, or cut it by Shard(0), as fully_shard does"
        )
    if p.layout is not torch.strided or not _dense(local(p)):
        raise UnsupportedParameter(
            f"{_named(p)} with gaps or overlaps in memory; use .contiguous()"
        )


def check_now(optimizer: "EncodedOptimizer", p: Tensor, group: Group) -> None:
    """Raises UnsupportedParameter where p cannot be updated, or its states are not its own."""
    check_parameter(p, group["weights"])
    if p.device.type == "meta":
        raise UnsupportedParameter(
            f"{_named(p)} on device 'meta', where it has no values to update. Give it some by "
            "model.to_empty(device=...) and load_state_dict, and to the optimizer after that"
        )
    if state := optimizer.state.get(p):
        _check_held(optimizer, p, state, group)


def _check_held(
    optimizer: "EncodedOptimizer", p: Tensor, state: dict[str, Tensor], group: Group
) -> None:
    """Raises UnsupportedParameter if the first moment is of another shape, device or format."""
    part, kind = local(p), optimizer.format_of(p, group["state"]).first.kind
    found = state.get(names(optimizer.moments[0], kind).codes)
    shape = part.shape if kind == "fp32" else code_shape(kind, part.numel(), row_of(p.shape))
    if found is None or local(found).shape != shape or found.device != part.device:
        raise UnsupportedParameter(
            f"{_named(p)} on {part.device}, and its states are not those of such a parameter, held "
            f"as {group['state']!r}: it was exchanged after the last step. Another device: "
            "optimizer.load_state_dict(optimizer.state_dict()) moves them there. Another shape: "
            "optimizer.state.pop(p) lets them begin anew"
        )


def _named(p: Tensor) -> str:
    return f"a parameter of shape {tuple(p.shape)} is {str(p.dtype).removeprefix('torch.')}"


def _dense(x: Tensor) -> bool:
    if x.is_contiguous():
        return True
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    return x.numel() == 0 or x.permute(order).is_contiguous()
