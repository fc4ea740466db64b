"""Version counters apart from memory: what sees a change in place, and keeps nothing alive."""

import torch
from torch import Tensor


def witness_of(x: Tensor) -> Tensor:
    """A tensor without memory that shares x's version counter.

    It sees in-place changes, and keeps nothing alive.
    """
    return counted(x, torch.empty(0, dtype=x.dtype, device=x.device))


def counted(counter: Tensor, x: Tensor) -> Tensor:
    """x with the version counter of another tensor.

    So a backward in Python that overwrites x is seen.
    """
    given = counter.detach()
    given.data = x
    return given
