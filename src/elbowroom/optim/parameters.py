"""Tells which parameters can be updated, and how, and whether their states belong to them.

Asked when a parameter is given, and again before each step: `model.to(...)` and `p.data = ...`
change it under its states. So the answer is remembered by what it depends on, and not by parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elbowroom.errors import UnsupportedParameter
from elbowroom.kernels.states import CODES, MOST, bound_shape, code_shape
from elbowroom.optim.formats import StateNames, format_of, names, row_of
from elbowroom.optim.order import Order, order_of
from elbowroom.optim.sharded import in_whole_rows, is_sharded, local

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ParameterFacts(NamedTuple):
    """All of a parameter that its update depends on, but for values and device."""

    shape: torch.Size
    dtype: torch.dtype
    layout: torch.layout
    local_shape: torch.Size  # of the part that this rank has
    strides: tuple[int, ...]
    whole_rows: bool


@dataclass(frozen=True)
class Update:
    """The way in which a parameter is updated.

    first, second  the names of its states, of which `second` may be missing
    m_kind, v_kind  how they are held (`kernels/states.py`)
    held           name, shape and dtype of each tensor of them
    row            elements of a row
    order          in which its dimensions lie in memory, where that stands beside its codes
    residual       whether it is held in 24 bits
    limit          the largest size of an element of a gradient
    """

    first: StateNames
    second: StateNames | None
    m_kind: str
    v_kind: str
    held: tuple[tuple[str, torch.Size, torch.dtype], ...]
    row: int
    order: Order
    residual: bool
    limit: float


# A named tuple's own way to make one is a function of Python's.
_new: Callable[[type[ParameterFacts], Any], ParameterFacts] = tuple.__new__


def facts_of(p: Tensor) -> ParameterFacts:
    """Returns what `update_of` wants to know."""
    shape, layout = p.shape, p.layout
    if layout is not torch.strided:
        return ParameterFacts(shape, p.dtype, layout, shape, (), whole_rows=True)
    if is_sharded(p):
        part = local(p)
        return ParameterFacts(shape, p.dtype, layout, part.shape, part.stride(), in_whole_rows(p))
    return _new(ParameterFacts, (shape, p.dtype, layout, shape, p.stride(), True))


@lru_cache(maxsize=1 << 14)
def update_of(facts: ParameterFacts, state: str, weights: str, moments: tuple[str, ...]) -> Update:
    """Returns how a parameter of a group with these settings is updated.

    Raises UnsupportedParameter for what is not dense, in whole rows, and of a dtype of ours.
    """
    _check(facts, weights)
    found = format_of(facts.shape, state, second=len(moments) > 1)
    kinds, row, n = (found.first.kind, found.second.kind), row_of(facts.shape), facts.local_shape
    held = [names(name, kind) for name, kind in zip(moments, kinds, strict=False)]
    tensors: list[tuple[str, torch.Size, torch.dtype]] = []
    for name, kind in zip(held, kinds, strict=False):
        if kind == "fp32":
            tensors.append((name.codes, n, torch.float32))
        else:
            codes, bounds = (of(kind, n.numel(), row) for of in (code_shape, bound_shape))
            tensors.append((name.codes, torch.Size(codes), CODES[kind]))
            tensors.append((name.bounds, torch.Size(bounds), torch.int16))
    encoded = kinds[0] != "fp32"
    return Update(
        first=held[0],
        second=held[1] if len(held) > 1 else None,
        m_kind=kinds[0],
        v_kind=kinds[1],
        held=tuple(tensors),
        row=row,
        order=order_of(_stand_in(facts)) if encoded else (),
        residual=weights == "residual" and facts.dtype is torch.bfloat16,
        limit=torch.finfo(torch.float32).max if kinds[1] in ("none", "fp32") else sqrt(MOST),
    )


def _check(facts: ParameterFacts, weights: str) -> None:
    named = f"a parameter of shape {tuple(facts.shape)} is {_name(facts.dtype)}"
    if facts.dtype not in DTYPES:
        raise UnsupportedParameter(
            f"{named}; states are encoded for float32, bfloat16 and float16. Give it to an "
            "optimizer of torch.optim"
        )
    if facts.dtype is torch.float16 and weights != "nearest":
        raise UnsupportedParameter(
            f"{named}, for which there is no weights={weights!r}. Use bfloat16, or say "
            "weights='nearest' and lose updates below half a step of float16"
        )
    if not facts.whole_rows:
        raise UnsupportedParameter(
            f"{named} and a DTensor that is not sharded by rows; states are encoded by rows. "
            "Replicate it, or shard it by Shard(0), as fully_shard does"
        )
    if facts.layout is not torch.strided or not _dense(_stand_in(facts)):
        raise UnsupportedParameter(f"{named} with gaps or overlaps in memory; use .contiguous()")


def check_held(p: Tensor, state: dict[str, Tensor], update: Update, held_as: str) -> None:
    """Raises UnsupportedParameter where p has no values, or its states are another parameter's.

    Kernels read states by address, and cannot notice.
    """
    if p.is_meta:
        raise UnsupportedParameter(
            f"a parameter of shape {tuple(p.shape)} is {_name(p.dtype)} on device 'meta', where it "
            "has no values to update. Create its values with model.to_empty(device=...) and "
            "load_state_dict, and then pass it to the optimizer"
        )
    if not state:
        return
    device = p.device
    for name, shape, dtype in update.held:
        x = state.get(name)
        if x is not None and x.dtype is dtype and x.device == device and local(x).shape == shape:
            continue
        raise UnsupportedParameter(
            f"a parameter of shape {tuple(p.shape)} is {_name(p.dtype)} on {device}, and its "
            f"states are not those of such a parameter, held as {held_as!r}: it was exchanged "
            "after the last step. Another device: "
            "optimizer.load_state_dict(optimizer.state_dict()) moves them there. Another shape: "
            "optimizer.state.pop(p) lets them begin anew"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stand_in(facts: ParameterFacts) -> Tensor:
    """A tensor without memory that lies as the parameter does."""
    return torch.empty_strided(facts.local_shape, facts.strides, device="meta")


def _dense(x: Tensor) -> bool:
    if x.is_contiguous():
        return True
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    return x.numel() == 0 or x.permute(order).is_contiguous()
