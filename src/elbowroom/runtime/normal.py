"""Norm inputs are encoded as (x - mean) * rstd, with the statistics that the norm saves anyway.

A group's step follows its largest values, and the backward of a norm multiplies by rstd, which
follows each channel's own. Encoded as it is, an input whose channels differ in scale or mean drowns
the small ones: with 8 of 64 channels scaled by 0.01, gErr2 went from 0.0098 to 49 (NCHW, 10 x 10),
1,173 (channels_last) and 15,255 (BatchNorm1d); docs/log.md. Normalized, all channels have the same
spread, so the error of the code is the same share of each, on any layout and device, and no value
has to be examined. Codecs do it in the pass that quantizes (`codecs/affine.py`), and it costs no
byte: mean and rstd are held by the norm itself.

So is what has rows that a reader divides by their own size, where a code would not keep them apart
(`plan/site.py`): by the mean and std of each, which are then held beside the code.

A tensor whose exact zeros matter is scaled and not shifted, so that they stay. A site with an error
bound of its own (`facts.error_bound`, in units of x) is not normalized.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from elbowroom.codecs import Affine
from elbowroom.codecs.base import FLOATS
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.plan.site import Rows
from elbowroom.runtime.storage import untouchable

_MIN_STD = 16  # of a row, in units of how it is rounded: below that, its mean is all that it has
_PART = 1 << 16  # elements that are read twice, in a cache's reach, and held once more
_SURE = 1 / 64  # of a row's mean square: above that, sums in float32 tell its variance
_RANGE = 1e-18, 1e18  # of 1 / std: of a row of zeros, and so that a quotient of two is a float32


@dataclass(eq=False)  # not frozen, as `Ready`: one is made for each norm of a replayed step
class Statistics:
    """Statistics that each element of a norm's input is normalized by. They are never changed.

    mean, rstd  the norm's own memory, in the order of the input's
    inner       element i in memory order belongs to channel (i // inner) % C
    rows        equal shares of the input that have C channels of their own each
    """

    mean: Tensor
    rstd: Tensor
    inner: int
    rows: int = 1

    @property
    def nbytes(self) -> int:
        return self.mean.nbytes + self.rstd.nbytes

    def normalize(self, *, keep_zeros: bool) -> Affine:
        """x -> (x - mean) * rstd."""
        scale = self._scale(keep_zeros)
        shift = torch.zeros_like(scale) if keep_zeros else (self._laid(self.mean) * scale).neg_()
        return Affine(scale, shift, self.inner)

    def undo(self, *, keep_zeros: bool) -> Affine:
        """y -> y / rstd + mean."""
        scale = self._scale(keep_zeros).reciprocal()
        shift = torch.zeros_like(scale) if keep_zeros else self._laid(self.mean)
        return Affine(scale, shift, self.inner)

    def _scale(self, keep_zeros: bool) -> Tensor:
        rstd = self._laid(self.rstd)
        # Where zeros matter, no channel is made smaller: nothing else may become a zero.
        return rstd / rstd.min() if keep_zeros else rstd

    def _laid(self, statistic: Tensor) -> Tensor:
        """Returns a statistic in the layout that an `Affine` has its scale in."""
        flat = statistic
        if flat.dtype is not torch.float32 or flat.dim() != 1:
            flat = flat.float().flatten()
        return flat if self.rows == 1 else flat.view(self.rows, -1)


@dataclass(eq=False)  # not frozen, as `Statistics`
class Normalized:
    """Normalization of what is encoded in place of x: (x - mean) * rstd, or x scaled alone.

    It is scaled alone where zeros matter.

    rows: whose own statistics these are; None: those of a norm
    """

    statistics: Statistics
    keep_zeros: bool
    rows: Rows | None = None

    @property
    def own_nbytes(self) -> int:
        """Bytes that are held for this alone: a norm holds its statistics anyway."""
        return 0 if self.rows is None else self.statistics.nbytes

    def keeps_apart(self, rows: Rows) -> bool:
        """Returns whether these rows were normalized each by itself: as such or by a layer norm."""
        if self.rows is not None:
            return self.rows == rows
        by = self.statistics
        return (by.mean.numel(), by.inner) == rows.shape and by.rows == rows.stride[-1] == 1

    def normalize(self) -> Affine:
        return self.statistics.normalize(keep_zeros=self.keep_zeros)

    def undo(self) -> Affine:
        return self.statistics.undo(keep_zeros=self.keep_zeros)


class OfNormal(NamedTuple):
    """A scale and a shift, which a norm applies to its normalized input (x - mean) * rstd.

    inner   that of the statistics
    affine  gives the norm's own weight and bias, by the channels that these have
    """

    mean: Tensor
    rstd: Tensor
    inner: int
    affine: Callable[[], Affine]

    def fits(self, by: Statistics) -> bool:
        """Returns whether these statistics are the norm's own."""
        alike = by.rows == 1 and by.inner == self.inner
        alike = alike and by.mean.data_ptr() == self.mean.data_ptr()
        return alike and by.rstd.data_ptr() == self.rstd.data_ptr()


def weight_and_bias(
    weight: Tensor | None, bias: Tensor | None, count: int, device: torch.device, inner: int
) -> Affine:
    """Returns a norm's weight and bias [count] as an affine of its normalized input."""

    def filled(value: float) -> Tensor:
        return torch.full((count,), value, dtype=torch.float32, device=device)

    scale = filled(1.0) if weight is None else weight.float().flatten()
    shift = filled(0.0) if bias is None else bias.float().flatten()
    return Affine(scale, shift, inner)


def of_rows(x: Tensor, *, keep_zeros: bool) -> tuple[Tensor, Tensor]:
    """The mean and 1 / std of each row of x [..., D], as they are held.

    keep_zeros: x will be scaled and not shifted, so that 1 / rms takes the place of 1 / std.
    """
    if (found := _by_address(x, keep_zeros=keep_zeros)) is not None:
        return found
    with torch.no_grad():
        var, mean = (moment.float() for moment in var_mean(x.detach()))
        square = mean.square()
        if keep_zeros:
            rstd = (var + square).rsqrt_()
        else:
            rstd = (var + square * (_MIN_STD * torch.finfo(x.dtype).eps) ** 2).rsqrt_()
        # A copy: the mean of `statistics_of_rows` would hold all four statistics of each row.
        return mean.clone(), rstd.clamp_(*_RANGE).bfloat16()


def _by_address(x: Tensor, *, keep_zeros: bool) -> tuple[Tensor, Tensor] | None:
    """The same by one launch, in a fourth to a ninth of the time; None: ops must serve x."""
    kernels = ops.by_address(x)
    if kernels is None or would_wait(x) or not (x.numel() and x.is_contiguous()) or untouchable(x):
        return None
    sizes = *x.shape[:-1], 1
    mean, scale = x.new_empty(sizes), x.new_empty(sizes, dtype=torch.bfloat16)
    settings = keep_zeros, (_MIN_STD * torch.finfo(x.dtype).eps) ** 2, *_RANGE
    rows = mean.numel(), x.shape[-1]
    finite = kernels.row_scales(x.data_ptr(), *rows, *settings, mean.data_ptr(), scale.data_ptr())
    return (mean, scale) if finite else None


def var_mean(x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """The variance and mean over one dimension, which stays as one of size 1; at least float32.

    torch's own takes about ten times as long on a CPU as two passes over what lies in a cache.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.device.type == "cpu" and x.numel() > 1 and not would_wait(x):
        is_last = dim % x.dim() == x.dim() - 1
        if is_last and (quick := _by_sums(x)) is not None:
            return quick
        found = statistics_of_rows(x) if is_last else None
        if found is None:
            var, mean = _in_parts(x, dim, wide)
        else:
            var, mean = found[1].unsqueeze(-1), found[0].unsqueeze(-1)
        if bool(mean.isfinite().all()):  # else there is a NaN, or the sum of a row is too large
            return var, mean
    var, mean = torch.var_mean(x.to(wide), dim=dim, correction=0, keepdim=True)
    return var, mean


def _by_sums(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The variance and mean of each row of x [..., D] by its sum and its norm.

    Two passes of torch's, which take half as long as a kernel that also finds extremes. Returns
    None where a mean is so far from 0 that the difference of squares says little of a variance,
    where a sum is not finite, and for what is not float32 and contiguous.
    """
    if x.dtype is not torch.float32 or not x.is_contiguous() or not x.numel():
        return None
    mean = x.mean(-1, keepdim=True)
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    var = torch.addcmul(square, mean, mean, value=-1)
    # Of rows of zeros both are 0; of a NaN no comparison is true.
    is_sure = (var >= square.mul_(_SURE)).logical_and_(var < torch.inf)
    return (var, mean) if bool(is_sure.all()) else None


def _in_parts(x: Tensor, dim: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The variance and mean over one dimension, of what lies in a cache at a time."""
    along = max((d for d in range(x.dim()) if d != dim % x.dim()), key=x.size, default=None)
    count = x.numel() if along is None else max(_PART * x.size(along) // x.numel(), 1)
    found = []
    for part in (x,) if along is None else torch.split(x, count, along):
        part = part.to(wide)
        mean = part.mean(dim, keepdim=True)
        found.append(((part - mean).square_().mean(dim, keepdim=True), mean))
    var, mean = (torch.cat(parts, along or 0) for parts in zip(*found, strict=True))
    return var, mean


def statistics_of_rows(x: Tensor) -> Tensor | None:
    """The mean, variance, least and largest value of each row of x [..., D]: [4, ...], float32.

    All four are NaN where one of the row is. Returns None for what no kernel takes.
    """
    if x.dtype not in FLOATS or not x.numel() or would_wait(x):
        return None
    order, back = _order_of_rows(x.stride())
    laid = x.detach().permute(order)
    found = ops.row_statistics(laid.reshape(-1), x.shape[-1]).view(4, *laid.shape[:-1])
    return found.permute(back)


@lru_cache(1024)
def _order_of_rows(stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the dimensions of a tensor as its rows lie in memory, and those of [4, ...] back."""
    order = sorted(range(len(stride) - 1), key=stride.__getitem__, reverse=True)
    return (*order, -1), (0, *(1 + order.index(d) for d in range(len(order))))


def flat_of(x: Tensor) -> Tensor:
    """A dense tensor as a flat view in memory order."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


@lru_cache(1024)
def layout_of(
    sizes: tuple[int, ...], stride: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], int, int] | None:
    """Returns a tensor's dimensions in memory order, inner and rows, for a statistic of this shape.

    See `Statistics` for the last two. Returns None where the tensor has gaps or overlaps, or more
    alternations.

    sizes, stride: of the tensor
    """
    order = sorted(range(len(sizes)), key=lambda d: (-stride[d], d))
    expected = 1
    for d in reversed(order):
        if sizes[d] > 1 and stride[d] != expected:
            return None
        expected *= sizes[d]
    varying = ((shape[d] > 1, sizes[d]) for d in order if sizes[d] > 1)
    by_kind = groupby(varying, lambda one: one[0])
    runs = [(varies, prod(n for _, n in run)) for varies, run in by_kind]
    inner = runs.pop()[1] if runs and not runs[-1][0] else 1
    if runs:
        runs.pop()  # the channels
    before = [n for varies, n in runs if varies]
    if len(before) > 1 or (before and not runs[0][0]):
        return None
    return tuple(order), inner, before[0] if before else 1
