"""Computes the gradient variance that an error of a saved tensor adds if the op is linear in it.

dW is linear in the op's input x, and dx does not depend on it. An error e of x, independent of dY
and without mean, adds to the entries of dW, all together,

    linear   sum_t |dY_t|^2 sum_i e_ti^2                                    t: token
    conv     sum_p (sum_k dY_kp^2) (sum_{c, taps} e_c,p+tap^2)              p: sample and place

The square of one drawn error stands for its variance: thousands of elements are summed. No factor
is fitted, and borders, strides, dilations and groups are counted as they are, since the sum over
taps is itself a convolution, of a map with one channel, with ones. (Rewritten from the formula for
one weight, sigma^2 = sum dY^2 e^2; what is published assumes that dY is as large at all places.)
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from elbowroom.runtime.consumers import Call

_CONVS = ("conv1d", "conv2d", "conv3d")
# op -> where x and the weight stand among its arguments
_PRODUCTS = {
    **dict.fromkeys(("linear", "matmul", "__matmul__", "mm"), ((0, "input"), (1, "weight"))),
    "addmm": ((1, "mat1"), (2, "mat2")),
}


class Form(Protocol):
    """An op that is linear in x."""

    def fold(self, error: Tensor) -> Tensor:
        """The part of e^2 that is needed in backward: one number a token, or a place and group."""
        ...

    def variance(self, folded: Tensor, grad: Tensor) -> Tensor:
        """The variance that the error adds to the weight's gradient; grad: dY. A scalar."""
        ...


def form_of(call: Call, *, most: int = 0) -> Form | None:
    """The closed form of this op for x beside a weight, or None where there is none.

    most: tokens or places to count, evenly spread, for all of them; 0: all
    """
    if call.name in _PRODUCTS:
        at_x, at_weight = _PRODUCTS[call.name]
        x, weight = call.arg(*at_x), call.arg(*at_weight, call.arg(1, "other"))
        plain = is_weight(weight) and weight.dim() == 2
        if not plain or not isinstance(x, Tensor):
            return None
        tokens = x.numel() // max(x.shape[-1], 1)
        return Linear(tuple(x.shape), _every(tokens, tokens, most))
    conv = call.name.replace("_transpose", "")
    if conv not in _CONVS or not is_weight(call.arg(1, "weight")):
        return None
    transposed = conv != call.name
    at_groups, at_dilation = (6, 7) if transposed else (6, 5)
    shape = tuple(call.arg(0, "input").shape)
    samples = shape[0] if len(shape) > len(call.arg(1, "weight").shape) - 1 else 1
    return Convolution(
        shape,
        tuple(call.arg(1, "weight").shape[2:]),
        conv,
        {
            "stride": call.arg(3, "stride", 1),
            "padding": call.arg(4, "padding", 0),
            "dilation": call.arg(at_dilation, "dilation", 1),
        },
        int(call.arg(at_groups, "groups", 1)),
        transposed,
        _every(samples, samples * prod(shape[-len(call.arg(1, "weight").shape[2:]) :]), most),
    )


def _every(samples: int, places: int, most: int) -> int:
    """Returns which sample to count, so that about `most` places are: every so many. 0: all."""
    return max(min(samples, places // most), 1) if most else 1


def is_weight(x: Any) -> bool:
    """Returns whether x is a parameter that is trained."""
    return isinstance(x, Tensor) and x.is_leaf and x.requires_grad


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    shape  of the input, [..., features]
    every  of how many tokens one counts
    """

    shape: tuple[int, ...]
    every: int = 1

    def fold(self, error: Tensor) -> Tensor:
        return energy(self._rows(error.reshape(self.shape)), -1)

    def variance(self, folded: Tensor, grad: Tensor) -> Tensor:
        return (folded * energy(self._rows(grad), -1)).sum() * self.every

    def _rows(self, x: Tensor) -> Tensor:
        return x if self.every == 1 else x.reshape(-1, x.shape[-1])[:: self.every]


@dataclass(frozen=True)
class Convolution:
    """A convolution, or the transpose of one.

    shape  of the input, [N, C, ...] or [C, ...]
    conv   conv1d, conv2d or conv3d
    reach  stride, padding and dilation, as it was given them
    every  of how many samples one counts
    """

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    conv: str
    reach: dict[str, Any]
    groups: int
    transposed: bool
    every: int = 1

    def fold(self, error: Tensor) -> Tensor:
        energy = self._energy(error.reshape(self.shape))
        return energy if self.transposed else self._over_taps(energy)

    def variance(self, folded: Tensor, grad: Tensor) -> Tensor:
        energy = self._energy(grad)
        if self.transposed:
            energy = self._over_taps(energy)
        return (folded * energy).sum() * self.every

    def _energy(self, x: Tensor) -> Tensor:
        """[N, C, ...] -> sum of squares over each group's channels, [N * groups, 1, ...]."""
        x, space = x[:: self.every], x.shape[-len(self.kernel) :]
        channels = x.shape[-len(space) - 1] // self.groups
        return energy(x.reshape(-1, channels, *space), 1).unsqueeze(1)

    def _over_taps(self, energy: Tensor) -> Tensor:
        ones = torch.ones(1, 1, *self.kernel, device=energy.device)
        summed: Tensor = getattr(F, self.conv)(energy, ones, **self.reach)
        return summed


def energy(x: Tensor, dim: int | None = None) -> Tensor:
    """The sum of squares along a dimension, or of all elements, without a copy of x."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=torch.float32 if half else None)
    return norm.square()
