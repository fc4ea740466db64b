"""Rebuilding from a code: the tensor is decoded with another scale and shift, or in parts.

    norm of a code        one decoding: the norm's affine is part of it
    ReLU of a norm        the same, and 0 where a bit is not set

What a recipe makes of a code bears the error of the code. From exact sources its ops run as they
did in forward (`rebuild.py`).
"""

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elbowroom.codecs import Affine
from elbowroom.kernels import ops
from elbowroom.runtime.handles.encode import EncodeHandle, Parts
from elbowroom.runtime.normal import flat_of
from elbowroom.runtime.slot import Geometry, Slot, same_order
from elbowroom.runtime.storage import check_parameters, versions_of

if TYPE_CHECKING:
    from elbowroom.runtime.handles.rebuild import Ready

_AT_ONCE = 1 << 18  # elements, a multiple of 8: what `outside` makes of them stays in the cache


def mapped_source(ready: "Ready") -> tuple[Slot, Affine, Tensor | None] | None:
    """Returns a slot, an affine and its bits if the tensor is that affine of that slot.

    An affine of an exact slot gives other bits than the op itself: not for exact mode.
    """
    if ready.copies and tuple(versions_of(ready.op.fixed)) != ready.versions:
        return None
    check_parameters(ready.op.fixed, ready.versions, ready.fingerprints)
    source, affine = ready.source, ready.op.affine
    if affine is None or not isinstance(source, Slot):
        return None
    if ready.op.needs_bits and ready.bits is None:
        return None
    same = ready.seen == source.base and same_order(
        ready.seen.shape, ready.seen.stride, ready.made.stride
    )
    plain = same and ready.made.shape == ready.seen.shape
    return (source, affine(), ready.bits) if plain else None


def decoded(ready: "Ready") -> Tensor | None:
    """Returns the tensor if it is the code of its source, decoded with another scale or shift.

    Of a code of a norm's normalized input, these are the norm's own weight and bias.
    """
    source, op = ready.source, ready.op
    assert isinstance(source, Slot)
    if op.affine is None and source.stays_whole():
        return None  # what is decoded serves other readers, too
    if op.of_normal is not None and isinstance(source.value, EncodeHandle):
        x = source.value.restore_normalized(op.of_normal, ready.bits)
        if x is not None:
            return x
    return None if op.affine is None else source.restore_mapped(op.affine(), ready.bits)


def parts_of(ready: "Ready", base: Geometry) -> Parts | None:
    """Returns a function that gives elements start .. start + n of `base`, flat [n].

    None where a recomputed tensor cannot be computed in parts.
    """
    mapped = mapped_source(ready) if ready.made == base else None
    if mapped is None:
        return None
    source, affine, bits = mapped
    if isinstance(source.value, EncodeHandle) and source.value.is_needed():
        return source.value.parts(affine, bits)
    if affine.scale.dim() > 1 or not _repeats(affine, base):
        return None
    flat = flat_of(source.restore_value())

    def part(start: int, n: int) -> Tensor:
        """Returns elements from `start` to start + n.

        They begin with a sample: with the first channel, and with a whole byte of bits.
        """
        out = torch.empty(n, dtype=flat.dtype, device=flat.device)
        own = None if bits is None else bits[start // 8 : -(-(start + n) // 8)]
        ops.affine(flat[start : start + n], *affine, own, out)
        return out

    return part


def replace_outside(x: Tensor, bits: Tensor, outside: Callable[[Tensor], Tensor]) -> None:
    """x [N] <- outside(x) where the bit of bits [ceil(N / 8)] is not set."""
    for start in range(0, x.numel(), _AT_ONCE):
        part = x[start : start + _AT_ONCE]
        inside = torch.empty_like(part)
        ops.unpack_bits(bits[start // 8 : (start + len(part) + 7) // 8], 1.0, inside)
        part.copy_(torch.where(inside > 0, part, outside(part)))


def _repeats(affine: Affine, base: Geometry) -> bool:
    """Returns whether each sample begins with the first channel.

    The channels of a group norm are counted per sample.
    """
    each = prod(base.shape[1:])
    return each % (len(affine.scale) * affine.inner) == 0
