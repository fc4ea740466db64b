"""Convolution, whose backward takes its input a few samples at a time.

    grad_x      = those of all turns, one after the other
    grad_weight = sum over turns

A turn makes the gradients of weight and bias first, and lets go of the samples before it makes
theirs, so that they and their gradient are never there at once.

oneDNN's copies of input, gradient and result in its own layouts are as large as these tensors, and
so is the decoded input; for a few samples at a time they are small, and stay in the caches
(docs/log.md, "a few samples at a time"). Rounding differs, by the order of the sum and by the
kernel that oneDNN chooses for a size. So this is done only in contexts whose codes add errors,
which are much larger; there it is done for every convolution, however its own input is held. In
exact mode the op is torch's own.

A turn takes two 3-D samples at the least where one alone would not go through oneDNN. torch's own
kernel (slow3d) writes each window out, which takes as many times the sample as a window has taps.
"""

from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs.base import FLOATS
from elbowroom.plan.restored import AT_ONCE, samples_at_once
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.held import packed
from elbowroom.runtime.handles import EncodeHandle, RebuildHandle
from elbowroom.runtime.handles.encode import Parts
from elbowroom.runtime.node import Node
from elbowroom.runtime.slot import Geometry, View
from elbowroom.runtime.storage import untouchable

Sizes = int | tuple[int, ...]
_Grads = tuple[Tensor | None, ...]


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Computes torch.nn.functional.conv1d, conv2d or conv3d of a batch."""
    how = _how(input.dim() - 2, stride, padding, dilation, groups)
    made: Tensor = _Convolution.apply(input, weight, bias, how)
    return made


def _how(maps: int, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> tuple[Any, ...]:
    """Returns the arguments of aten's convolution behind the bias; maps: dimensions of a map."""
    geometry = [[x] * maps if isinstance(x, int) else list(x) for x in (stride, padding, dilation)]
    return *geometry, False, [0] * maps, groups


def fits_convolution(call: Call, x: Tensor) -> bool:
    """Returns whether the node pays: for a batch of several chunks, and small weights.

    Each chunk computes a gradient of the weights, which must not be most of its work. Under
    autocast, only torch's own op is cast.
    """
    if x.device.type != "cpu" or x.dtype not in FLOATS or torch.is_autocast_enabled("cpu"):
        return False
    weight = call.arg(1, "weight")
    if not isinstance(weight, Tensor) or x.dim() != weight.dim():
        return False
    if weight.nbytes > AT_ONCE or not _is_batch(x) or not x.shape[0]:
        return False
    made = _made(call, x, weight)
    if made is None or weight.nbytes > max(x.nbytes, made * x.shape[0] * x.itemsize) // 2:
        return False
    sizes = call.arg(3, "stride", 1), call.arg(4, "padding", 0), call.arg(5, "dilation", 1)
    how = _how(x.dim() - 2, *sizes, call.arg(6, "groups", 1))
    call.samples = _samples_of_a_turn(x, made, _least(x, weight, call.arg(2, "bias"), how))
    return call.samples < x.shape[0]


def _samples_of_a_turn(x: Tensor, made: int, least: int) -> int:
    """Returns how many samples a turn takes; made: elements of each sample of the result."""
    found = samples_at_once(tuple(x.shape), x.itemsize, made)
    if found >= least:
        return found
    return least if 2 * least <= x.shape[0] else x.shape[0]


def _least(x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> int:
    """Returns how many samples a turn takes at the least: two, where torch's slow3d takes one."""
    if x.dim() < 5 or weight.shape[2:].numel() == 1:
        return 1
    whole, alone = (torch._C._select_conv_backend(y, weight, bias, *how) for y in (x, x[:1]))
    return 1 if alone == whole else 2


def _made(call: Call, x: Tensor, weight: Tensor) -> int | None:
    """Returns the elements of each sample of the result; None where sizes are in words."""
    maps = x.dim() - 2
    sizes = call.arg(3, "stride", 1), call.arg(4, "padding", 0), call.arg(5, "dilation", 1)
    if not all(_is_plain_size(size, maps) for size in sizes):
        return None
    each = zip(*([size] * maps if isinstance(size, int) else size for size in sizes), strict=True)
    made: int = weight.shape[0]
    for size, taps, (stride, padding, dilation) in zip(
        x.shape[2:], weight.shape[2:], each, strict=True
    ):
        made *= (size + 2 * padding - dilation * (taps - 1) - 1) // max(stride, 1) + 1
    return made


def _is_plain_size(size: Any, maps: int) -> bool:
    """Returns whether a size is an int, or one for each dimension of a map.

    torch takes words, arrays and tensors as well.
    """
    return isinstance(size, int) or (
        isinstance(size, tuple | list)
        and len(size) == maps
        and all(isinstance(one, int) for one in size)
    )


def _is_batch(x: Tensor) -> bool:
    """Returns whether samples follow each other in memory."""
    return x.numel() == x.shape[0] * x.stride(0)


class _Convolution(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Tensor:
        out = torch.convolution(x, weight, bias, *how)
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.how, ctx.bias_sizes = how, None if bias is None else [bias.shape[0]]
        ctx.least = _least(x, weight, bias, how)
        ctx.at_once = _samples_of_a_turn(x, out[0].numel(), ctx.least)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> _Grads:
        (grad,) = grads
        if grad is None:
            return (None,) * 4
        if torch.is_grad_enabled() or type(grad) is not Tensor or untouchable(grad):
            return *_backward(ctx, grad, *ctx.saved_tensors), None
        x, weight = ctx._raw_saved_tensors[:2]
        return *_in_turns(ctx, grad, _Samples(packed(x)), packed(weight).restore()), None


def _backward(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, wanted: list[bool] | None = None
) -> tuple[Tensor | None, ...]:
    """Computes torch's own backward: the wanted gradients of x, weight and bias."""
    wanted = _wanted(ctx) if wanted is None else wanted
    found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        grad, x, weight, ctx.bias_sizes, *ctx.how, wanted
    )
    return found


def _wanted(ctx: Any) -> list[bool]:
    """Returns whether gradients of x, weight and bias are asked for."""
    return [*ctx.needs_input_grad[:2], ctx.bias_sizes is not None and ctx.needs_input_grad[2]]


def _in_turns(
    ctx: Any, grad: Tensor, samples: "_Samples", weight: Tensor
) -> tuple[Tensor | None, ...]:
    """Computes the gradients of x, weight and bias a few samples at a time."""
    grad_x: Tensor | None = None
    sums: list[Tensor | None] = [None, None]  # of weight and bias
    of_x, of_weight, of_bias = _wanted(ctx)

    def turn(first: int, last: int) -> None:  # so that its tensors are freed before the next call
        wanted = [False, of_weight, of_bias]
        _, *others = _backward(ctx, grad[first:last], samples.get(first, last), weight, wanted)
        for i, other in enumerate(others):
            total = sums[i]
            if other is not None:
                sums[i] = other.float() if total is None else total.add_(other)

    def turn_of_x(first: int, last: int) -> None:
        nonlocal grad_x
        # No value of x is read: memory of its layout, which is written to, takes its place.
        like = samples.like(first, last) if grad_x is None else grad_x[first:last]
        part, *_ = _backward(ctx, grad[first:last], like, weight, [True, False, False])
        del like
        assert part is not None
        if len(firsts) == 1:
            grad_x = part
            return
        if grad_x is None:
            grad_x = part.new_empty_strided(samples.shape, part.stride())
        grad_x[first:last] = part

    firsts = range(0, samples.shape[0], ctx.at_once)
    if len(firsts) > 1 and samples.shape[0] - firsts[-1] < ctx.least:
        firsts = firsts[:-1]
    for first, last in zip(firsts, (*firsts[1:], samples.shape[0]), strict=True):
        if of_weight or of_bias:
            turn(first, last)
        if of_x:
            turn_of_x(first, last)
    return grad_x, *(None if total is None else total.to(weight.dtype) for total in sums)


class _Samples:
    """Samples of a saved tensor, decoded or rebuilt on request."""

    def __init__(self, held: Any) -> None:
        """held: what `_pack` made of the tensor."""
        self._parts = _parts_of(held)
        whole: Tensor | None = held.restore() if self._parts is None else None
        self._whole = whole
        like: Geometry = held.slot.base if whole is None else Geometry.of(whole)
        self._dtype: torch.dtype = held.slot.dtype if whole is None else whole.dtype
        self.shape, self._stride = like.shape, like.stride

    def like(self, first: int, last: int) -> Tensor:
        """Returns memory in the layout of these samples, or the samples if they are there."""
        if self._whole is not None:
            return self._whole[first:last]
        sizes = last - first, *self.shape[1:]
        return torch.empty_strided(sizes, self._stride, dtype=self._dtype)

    def get(self, first: int, last: int) -> Tensor:
        if self._parts is None:
            assert self._whole is not None
            return self._whole[first:last]
        each = self._stride[0]
        flat = self._parts(first * each, (last - first) * each)
        return flat.as_strided((last - first, *self.shape[1:]), self._stride)


def _parts_of(held: Any) -> Parts | None:
    """Returns a function that gives elements by their place in memory.

    None where the value can only be restored as a whole.
    """
    if type(held) is not View or held.geometry != held.slot.base or held.slot.is_window:
        return None
    value = held.slot.value
    if isinstance(value, EncodeHandle):
        return value.parts() if value.is_needed() else None
    return value.parts() if isinstance(value, RebuildHandle) else None
