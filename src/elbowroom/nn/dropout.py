"""Dropout that saves a seed instead of a mask.

Which elements stay follows from a hash of (seed, element), so backward draws them again: nothing of
the tensor's size is held, where torch holds a mask or a factor of 1 to 4 bytes an element. The
seed is drawn from torch's CPU generator: runs stay reproducible, with other elements dropped than
torch would drop. Distribution and scale are torch's; p is met to 2^-33.
"""

from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.kernels import ops
from elbowroom.nn._autograd import apply
from elbowroom.nn._seed import next_seed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Dropout(torch.autograd.Function):
    """x, seed, p -> x / (1 - p) or 0."""

    @staticmethod
    def forward(x: Tensor, seed: int, p: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        ops.dropout(x.view(-1), seed, p, out.view(-1))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
        _, ctx.seed, ctx.p = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return apply(_Dropout, grads[0], ctx.seed, ctx.p), None, None


class Dropout(nn.Dropout):
    """torch's Dropout, without a mask. It is linear, and may be differentiated twice."""

    def forward(self, input: Tensor) -> Tensor:
        """Elementwise; float64, what works in place and what drops nothing goes torch's way."""
        usual = self.training and 0 < self.p < 1 and not self.inplace
        if not usual or input.dtype not in _DTYPES:
            return super().forward(input)
        out: Tensor = apply(_Dropout, input, next_seed(input), self.p)
        return out
