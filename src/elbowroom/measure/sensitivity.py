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

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from elbowroom.runtime.consumers import Call

_CONVS = ("conv1d", "conv2d", "conv3d")
PART = 4096  # elements that are squared at a time where few places are counted
_BLOCKS = 64  # of a large tensor, one of which is squared at a time: its copy is as much smaller
_COUNTED = 131072  # elements of a tensor, about, where few places are: not all channels, too
# op -> where x and the weight stand among its arguments
_PRODUCTS = {
    **dict.fromkeys(("linear", "matmul", "__matmul__", "mm"), ((0, "input"), (1, "weight"))),
    "addmm": ((1, "mat1"), (2, "mat2")),
}


class LinearForm(Protocol):
    """An op that is linear in x."""

    def fold(self, error: Tensor, of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The part of e^2 that is needed in backward: one number a token, or a place and group.

        of: gives, of a part of what is folded, what is to be folded in its place
        """
        ...

    def variance(self, folded: Tensor, grad: Tensor) -> Tensor:
        """The variance that the error adds to the weight's gradient; grad: dY. A scalar."""
        ...


def form_of(call: Call, *, most: int = 0) -> LinearForm | None:
    """The closed form of this op for x beside a weight, or None where there is none.

    most: tokens or places to count, drawn evenly, for all of them; 0: all
    """
    if call.name in _PRODUCTS:
        at_x, at_weight = _PRODUCTS[call.name]
        x, weight = call.arg(*at_x), call.arg(*at_weight, call.arg(1, "other"))
        plain = is_weight(weight) and weight.dim() == 2
        if not plain or not isinstance(x, Tensor):
            return None
        tokens = x.numel() // max(x.shape[-1], 1)
        return Linear(tuple(x.shape), _every(tokens, most))
    conv = call.name.replace("_transpose", "")
    if conv not in _CONVS or not is_weight(call.arg(1, "weight")):
        return None
    transposed = conv != call.name
    at_groups, at_dilation = (6, 7) if transposed else (6, 5)
    shape = tuple(call.arg(0, "input").shape)
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
        most,
    )


def _every(places: int, most: int) -> int:
    """Returns of how many places one is counted, so that about `most` are. 0: all of them."""
    return max(places // most, 1) if most else 1


def _drawn(places: int, every: int, device: torch.device) -> Tensor:
    """Returns one place of every so many, anywhere among them: [places // every].

    Every n-th itself would be the same token of each sequence, or the same corner of each map.
    """
    own = torch.Generator().manual_seed(places)  # the user's random numbers are untouched
    count = places // every
    return (torch.randint(every, (count,), generator=own) + torch.arange(count) * every).to(device)


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

    def fold(self, error: Tensor, of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        rows = self._rows(error.reshape(self.shape))
        if of is None:
            return energy(rows, -1)
        rows = rows.reshape(-1, rows.shape[-1])
        parts = torch.split(rows, max(PART // max(rows.shape[-1], 1), 1))
        folded = torch.cat([energy(of(part), -1) for part in parts])
        return folded.reshape(self.shape[:-1]) if self.every == 1 else folded

    def variance(self, folded: Tensor, grad: Tensor) -> Tensor:
        return (folded * energy(self._rows(grad), -1)).sum() * self.every

    def _rows(self, x: Tensor) -> Tensor:
        if self.every == 1:
            return x
        rows = x.reshape(-1, x.shape[-1])
        return rows[_drawn(len(rows), self.every, x.device)]


@dataclass(frozen=True)
class Convolution:
    """A convolution, or the transpose of one.

    shape  of the input, [N, C, ...] or [C, ...]
    conv   conv1d, conv2d or conv3d
    reach  stride, padding and dilation, as it was given them
    most   places to count; 0: all
    """

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    conv: str
    reach: dict[str, Any]
    groups: int
    transposed: bool
    most: int = 0

    def fold(self, error: Tensor, of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return self._at_places(error.reshape(self.shape), of, over_taps=not self.transposed)[0]

    def variance(self, folded: Tensor, grad: Tensor) -> Tensor:
        energies, every = self._at_places(grad, over_taps=self.transposed)
        return (folded * energies).sum() * every

    def _at_places(
        self, x: Tensor, of: Callable[[Tensor], Tensor] | None = None, *, over_taps: bool
    ) -> tuple[Tensor, float]:
        """Returns the energies at the places that are counted, and of how many each is one.

        Where only some are, few samples are taken at a time: no map of all of them is made.
        """
        if not self.most or not x.numel():
            return self._map(x, of, 1, over_taps=over_taps), 1.0
        batch = x if x.dim() > len(self.kernel) + 1 else x.unsqueeze(0)
        found, begin, drawn = [], 0, torch.empty(0)
        of_channels = max(x.numel() // _COUNTED, 1)
        each = prod(x.shape[-len(self.kernel) :]) if of is None else batch[0].numel() // of_channels
        for part in torch.split(batch, max(PART // max(each, 1), 1)):
            flat = self._map(part, of, of_channels, over_taps=over_taps).flatten()
            if not begin:
                places = len(flat) // len(part) * len(batch)
                drawn = _drawn(places, _every(places, self.most), torch.device("cpu"))
            end = begin + len(flat)
            found.append(flat[(drawn[(begin <= drawn) & (drawn < end)] - begin).to(x.device)])
            begin = end
        return torch.cat(found), begin / max(len(drawn), 1)

    def _map(
        self,
        x: Tensor,
        of: Callable[[Tensor], Tensor] | None,
        of_channels: int,
        *,
        over_taps: bool,
    ) -> Tensor:
        """[N, C, ...] -> sum of squares over each group's channels, [N * groups, 1, ...].

        of_channels: of so many, one is counted for all
        """
        space = x.shape[-len(self.kernel) :]
        maps = x.reshape(-1, x.shape[-len(space) - 1] // self.groups, *space)
        some = maps[:, :: min(of_channels, maps.shape[1])]
        if of is None:
            each = energy(some, 1)
        else:
            channels = max(PART // max(maps[:, :1].numel(), 1), 1)
            parts = [energy(of(part), 1) for part in torch.split(some, channels, 1)]
            each = torch.stack(parts).sum(0)
        if some.shape[1] < maps.shape[1]:
            each = each * (maps.shape[1] / some.shape[1])
        each = each.unsqueeze(1)
        return self._over_taps(each) if over_taps else each

    def _over_taps(self, energy: Tensor) -> Tensor:
        ones = torch.ones(1, 1, *self.kernel, dtype=energy.dtype, device=energy.device)
        summed: Tensor = getattr(F, self.conv)(energy, ones, **self.reach)
        return summed


def energy(x: Tensor, dim: int | None = None) -> Tensor:
    """The sum of squares along a dimension, or of all elements, without a copy of x."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    if dim is None or dim in (-1, x.dim() - 1) or not x.numel():
        norm: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=torch.float32 if half else None)
        return norm.square()
    # torch's norm along another dimension than the last takes six times as long (CPU).
    found, most = [], max(PART, x.numel() // _BLOCKS)
    for part in torch.split(x, max(most // x[0].numel(), 1)):
        each = max(x.shape[dim] * most // part.numel(), 1)
        blocks = (block.float() if half else block for block in torch.split(part, each, dim))
        found.append(torch.stack([block.square().sum(dim) for block in blocks]).sum(0))
    return torch.cat(found)
