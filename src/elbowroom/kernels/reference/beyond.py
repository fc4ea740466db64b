"""Tells whether an element of many tensors is NaN, or larger in size than a limit."""

from math import inf

import torch
from torch import Tensor


def beyond(xs: list[Tensor], limit: float) -> Tensor:
    """int32 []: 1 if there is one, else 0, on the device of the tensors. Nothing waits for it.

    xs are float32, bfloat16 or float16, of any shapes, dense, on one device; `limit` is below
    infinity, and taken as a float32.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in xs:
        if x.numel():
            by_dtype.setdefault(x.dtype, []).append(x.detach())
    if not by_dtype:
        return torch.zeros((), dtype=torch.int32, device=xs[0].device if xs else None)
    norms = [torch.stack(torch._foreach_norm(some, inf)).float() for some in by_dtype.values()]
    largest = torch.cat(norms).amax()  # NaN, if there is one
    return (~(largest <= limit)).to(torch.int32)
