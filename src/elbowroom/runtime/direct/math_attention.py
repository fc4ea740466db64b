"""The backward of attention's math path with dropout, written out (CPU, float32).

    logits = (q f) (k f)^T + mask          f = sqrt(scale)
    p      = softmax(logits)
    out    = (p n) v                       n = 0 or 1 / (1 - dropout_p), a bit an element

Attention that runs again for its gradient runs forward to its end, under autograd and under a mode
that draws the same n once more. Of that, backward needs p and n; here only they are made:

    dv = (p n)^T g      dp = (g v^T) n      ds = p (dp - sum(p dp))      dq = ds k f^2 ...

The ops are those that autograd runs, on tensors of the same strides, so that the bits are. That is
not only believed: `MathAttention` compares both ways once for each geometry, and takes this one
only where they agree.
"""

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from elbowroom.kernels import ops

_Grads = tuple[Tensor | None, ...]
_MOST_KNOWN = 512  # geometries


class Given(NamedTuple):
    """What attention was given: q [B, H, T, E], k, v [B, H, S, E], mask, and its settings."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None

    @property
    def fits(self) -> bool:
        """Whether it is what this file is about."""
        alike = all(type(x) is Tensor and x.dim() == 4 for x in self[:3])
        alike = alike and all(x.dtype is torch.float32 and x.shape[:2] == self.q.shape[:2] for x in self[:3])
        learned = self.mask is not None and self.mask.requires_grad
        return alike and self.q.device.type == "cpu" and not learned and (self.scale or 1) > 0


def gradients(given: Given, bits: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. bits: where dropout let pass, in the order of the weights."""
    q, k, v = given[:3]
    batch, heads, T, E = q.shape
    S, each = k.shape[-2], batch * heads
    f = sqrt(1 / sqrt(E) if given.scale is None else given.scale)
    q3 = (q * f).reshape(each, T, E)
    k3 = (k.transpose(-2, -1) * f).reshape(each, E, S)
    v3, g3 = v.reshape(each, S, v.shape[-1]), grad.reshape(each, T, v.shape[-1])
    p = _weights(torch.bmm(q3, k3).view(batch, heads, T, S), given)
    keeps = float(torch.ones(()).div_(1 - given.dropout_p))
    dropped = torch.empty_like(p)
    ops.times_bits(p.view(-1), bits, keeps, dropped.view(-1))
    dv = dropped.view(each, T, S).transpose(1, 2).bmm(g3)
    del dropped
    dp = g3.bmm(v3.transpose(1, 2))
    ops.times_bits(dp.view(-1), bits, keeps, dp.view(-1))
    ds = torch._softmax_backward_data(dp.view(p.shape), p, -1, p.dtype).view(each, T, S)
    del dp, p
    dq = ds.bmm(k3.transpose(1, 2)).view(batch, heads, T, E).mul_(f)
    dk = q3.transpose(1, 2).bmm(ds).view(batch, heads, E, S).mul_(f).transpose(-2, -1)
    return dq, dk, dv.view(batch, heads, S, -1)


def _weights(logits: Tensor, given: Given) -> Tensor:
    """The softmax of logits [B, H, T, S], which are overwritten."""
    mask = given.mask
    if given.is_causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=logits.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    if mask is not None:
        logits.add_(mask)
    if given.mask is None:
        p = torch.softmax(logits, -1)
        if not p[..., 0].isnan().any():
            return p
    return torch._safe_softmax(logits, -1)  # zeros where a whole row is masked


class MathAttention:
    """Which geometries have been seen to get torch's bits so."""

    def __init__(self) -> None:
        self._agrees: dict[object, bool] = {}

    def gradients(
        self, given: Given, bits: Tensor, grad: Tensor, run: Callable[[], _Grads]
    ) -> _Grads:
        """The gradients of q, k, v and the mask; by `run`, torch's own way, the first time."""
        key = _geometry(given, grad)
        agrees = self._agrees.get(key)
        if agrees:
            return *gradients(given, bits, grad), None
        truth = run()
        if agrees is None:
            if len(self._agrees) >= _MOST_KNOWN:
                self._agrees.clear()
            found = gradients(given, bits, grad)
            self._agrees[key] = all(
                one is None or _is_same(one, other)
                for one, other in zip(truth, found, strict=False)
            )
        return truth


def _geometry(given: Given, grad: Tensor) -> object:
    tensors = (given.q, given.k, given.v, grad)
    mask = given.mask
    of_mask = None if mask is None else (mask.shape, mask.stride(), mask.dtype)
    settings = given[4:], of_mask, torch.get_num_threads()
    return (*((x.shape, x.stride()) for x in tensors), *settings)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether bits and strides are equal; gradients with a NaN are not."""
    return one.stride() == other.stride() and torch.equal(one, other)


MATH_ATTENTION = MathAttention()
