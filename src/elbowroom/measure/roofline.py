"""Estimates how long an op should take, from its shapes alone, by the roofline.

    seconds = overhead + max(operations / operations a second, bytes / bytes a second)

with the bytes that it reads and writes if every tensor passes memory once. An op of which no count
of operations is known is taken to wait for memory only; one that gives a view takes nothing.
Source: Williams et al., "Roofline", CACM 2009. Errors of a factor of 2 are normal; ratios between
the ops of one step are better than that, and it is ratios that a plan is made from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from elbowroom.measure.timing import least_s

_SIDE = 512  # of the matrices that are multiplied
_ELEMENTS = 1 << 23  # of the vector that is read and written: beyond any cache


@dataclass(frozen=True)
class Speed:
    """The speed of a device: what it does in a second.

    flops       additions and multiplications of a matrix product
    nbytes      bytes read or written
    overhead_s  seconds that the smallest op takes
    """

    flops: float
    nbytes: float
    overhead_s: float = 0.0

    def seconds(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> float:
        """Returns an op's seconds. tensors: read and written; kwargs: with its output `out_val`."""
        if func.is_view or func.namespace == "prim":  # the latter ask for metadata
            return 0.0
        count = _counts().get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs)
        nbytes = sum(x.numel() * x.element_size() for x in tensors)
        return self.overhead_s + max(flops / self.flops, nbytes / self.nbytes)


@cache
def speed_of(device_type: str) -> Speed:
    """Returns this machine's speed in fp32: measured once a process, the best of a few runs."""
    device = torch.device(device_type)
    a = torch.ones(_SIDE, _SIDE, device=device)
    x, one = torch.ones(_ELEMENTS, device=device), torch.ones(1, device=device)
    return Speed(
        flops=2 * _SIDE**3 / least_s(lambda: a @ a, device),
        nbytes=2 * x.nbytes / least_s(x.neg_, device),
        overhead_s=least_s(one.neg_, device),
    )


@cache
def _counts() -> dict[Any, Callable[..., int]]:
    """Returns operation counts by op; PyTorch's own, whose module is slow to import."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry
