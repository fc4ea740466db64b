"""Checks that several codecs share: of field values, and of what was encoded."""

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from elbowroom.errors import UnknownField
from elbowroom.kernels.fakes import has_values

_FEW = 32  # elements


def one_of(codec_id: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed or type(value) is not type(allowed[0]):  # 64.0 == 64, and True == 1
        shown = ", ".join(repr(item) for item in allowed)
        raise UnknownField(
            f"codec '{codec_id}': {name}={value!r} is not possible; {name} is one of {shown}"
        )


def within(codec_id: str, name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UnknownField(
            f"codec '{codec_id}': {name}={value!r} is not possible; "
            f"{name} is an int from {least} to {most}"
        )


def finite(values: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Returns whether all values [n], n > 0, are finite, also after a cast to `dtype`.

    On a GPU the host waits for the answer. A fake or meta tensor counts as finite.
    """
    if not has_values(values):
        return True
    if dtype is None and values.numel() <= _FEW and values.device.type == "cpu":
        return all(map(isfinite, values.reshape(-1).tolist()))  # 1 us, where aminmax takes 3
    # aminmax keeps NaN, and is 35x faster than isfinite on bf16 (16 M elements, 2 CPU threads,
    # torch 2.13). Its two results are read as Python floats, because each further op on a tensor
    # takes 15 us between large ones.
    least, most = torch.aminmax(values)
    if dtype is not None:
        least, most = least.to(dtype), most.to(dtype)
    return isfinite(least.item()) and isfinite(most.item())
