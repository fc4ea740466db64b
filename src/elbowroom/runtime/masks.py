"""Ops whose backward reads one bit of an element, and which bit that is.

relu        set where its output is positive or NaN
leaky_relu  set where its input (in place: its output) is positive; not for a NaN
relu6       set where its input lies between 0 and 6. On a GPU also for a NaN; on a CPU this depends
            on the place of the NaN, so a tensor with a NaN is kept
"""

from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs import BitMask, Encoded, Facts
from elbowroom.codecs.base import memory_order
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.runtime.arena import ARENA

MASKED_OUTPUT = ("relu", "relu_")
MASKED_INPUT = ("leaky_relu", "leaky_relu_")
CAPPED = ("relu6", "hardtanh")  # the latter with limits of 0 and 6
_KINDS = (MASKED_OUTPUT, MASKED_INPUT, CAPPED)


def mask_bits(base: Tensor, consumer: str, *, only_output: bool = False) -> Tensor | None:
    """Returns one bit an element, exact, whatever the codec. None: one bit does not suffice.

    ReLU's output is never negative, so there != 0 says it too, if `base` is `only_output`, and not
    a larger tensor that ReLU changed a part of.
    """
    if consumer in MASKED_OUTPUT and base.is_contiguous():
        kernels = ops.by_address(base)
        if kernels is not None:
            bits = torch.empty(-(-base.numel() // 8), dtype=torch.uint8, device="cpu")
            kernels.positive(base.data_ptr(), base.numel(), bits.data_ptr())
            return bits
    if consumer in CAPPED and not would_wait(base) and bool(base.isnan().any()):
        return None
    if consumer in CAPPED:
        x = (base <= 0).logical_or_(base >= 6).logical_not_()
    elif consumer in MASKED_INPUT:
        x = base > 0
    else:
        x = base if only_output else ~(base <= 0)
    return ops.pack_bits(memory_order(x.detach())[0])


def unpacked(
    bits: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Returns 1 where a bit is set and 0 elsewhere, which is all that the op of a mask reads."""
    encoded = Encoded(BitMask(), (bits,), shape, stride, dtype, facts=Facts(value=1.0))
    return encoded.decode(ARENA.take(encoded.numel, dtype, bits.device))


class HeldMask(tuple[Tensor, tuple[int, ...], tuple[int, ...], torch.dtype, Any]):
    """The mask of a tensor of which a settled step holds nothing else.

    A tuple of the bits; shape, strides and dtype of the tensor; and the record of the forward.
    """

    __slots__ = ()

    def restore(self) -> Tensor:
        """Returns 1 where a bit is set, 0 elsewhere."""
        with torch.no_grad():
            return unpacked(*self[:4])


def masks_differ(one: str, other: str) -> bool:
    """Returns whether the masks of two ops can differ. Either op may be "", which has none."""
    return bool(one and other) and any((one in kind) != (other in kind) for kind in _KINDS)
