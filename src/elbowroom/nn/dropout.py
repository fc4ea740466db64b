"""Dropout that saves a seed instead of a mask.

Which elements stay follows from a hash of (seed, element), so backward draws them again: nothing of
the tensor's size is held, where torch holds a mask or a factor of 1 to 4 bytes an element. Elements
are counted as x lies in memory (channels_last), and a gradient is brought into that order. The
seed is drawn from torch's CPU generator: runs stay reproducible, with other elements dropped than
torch would drop. Distribution and scale are torch's; p is met to 2^-33.
"""

from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.codecs.base import memory_order
from elbowroom.kernels import ops
from elbowroom.nn._autograd import apply, next_seed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Dropout(torch.autograd.Function):
    """x, seed, p, strides in memory -> x / (1 - p) or 0, with these strides."""

    @staticmethod
    def forward(x: Tensor, seed: int, p: float, stride: tuple[int, ...]) -> Tensor:
        out = x.new_empty_strided(x.shape, stride)
        x = x if x.stride() == stride else torch.empty_like(out).copy_(x)
        ops.dropout(memory_order(x)[0], seed, p, memory_order(out)[0])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *ctx.settings = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return apply(_Dropout, grads[0], *ctx.settings), None, None, None


class Dropout(nn.Dropout):
    """Dropout that saves a seed instead of a mask. It can be differentiated twice."""

    def forward(self, input: Tensor) -> Tensor:
        """Applies dropout elementwise.

        torch's own dropout is used for float64, in place, and if no element is dropped.
        """
        usual = self.training and 0 < self.p < 1 and not self.inplace
        if not usual or input.dtype not in _DTYPES or torch.compiler.is_exporting():
            return super().forward(input)
        stride = torch.empty_like(input, device="meta").stride()  # dense, as torch's own output is
        out: Tensor = apply(_Dropout, input, next_seed(input), self.p, stride)
        return out
