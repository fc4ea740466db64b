"""Version counters apart from memory: what sees a change in place, and keeps nothing alive."""

import torch
from torch import Tensor

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")  # which most share


def witness_of(x: Tensor) -> Tensor:
    """A tensor without memory that shares x's version counter.

    It sees in-place changes, and keeps nothing alive.
    """
    if x.dtype is torch.float32 and x.is_cpu and not torch._C._len_torch_dispatch_stack():
        return counted(x, _NOTHING)
    return counted(x, torch.empty(0, dtype=x.dtype, device=x.device))


def counted(counter: Tensor, x: Tensor) -> Tensor:
    """x with the version counter of another tensor.

    So a backward in Python that overwrites x is seen.
    """
    given = counter.detach()
    given.data = x
    return given
