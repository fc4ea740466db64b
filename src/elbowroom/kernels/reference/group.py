"""Groups with their own range and stochastic rounding: the code of ActNN and GACT, our baseline.

    low   = min                           rounded down to bf16
    step  = (max - low) / (levels - 1)    rounded up to bf16
    code  = clamp(floor((x - low) / step + u), 0, levels - 1)         u uniform in (0, 1)
    x~    = low + step * code

Low and step are used as they are stored. Unbiased; variance step^2 f (1 - f) at remainder f,
step^2 / 6 on average (arXiv 2104.14129, eq. 3). A group with a NaN, an Inf, or a value beyond
2^125 gets step = NaN and decodes to NaN throughout.
"""

import torch
from torch import Tensor

from elbowroom.kernels.layout import TILE, tiles
from elbowroom.kernels.reference.affine import mapped
from elbowroom.kernels.reference.codes import pack_codes, unpack_codes
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.rounding import (
    LARGEST,
    bf16_down,
    bf16_up,
    inverse,
    rows_of,
    store,
)


def group_quantize(
    x: Tensor,
    seed: int,
    levels: int,
    group_size: int,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N] -> codes [packed] uint8, step [G] bf16, low [G] bf16."""
    x = mapped(x, scale, shift, inner)
    rows, real = rows_of(x, group_size)  # [G, S], True where an element exists
    smallest = rows.masked_fill(~real, float("inf")).amin(dim=1)  # [G]
    largest = rows.masked_fill(~real, float("-inf")).amax(dim=1)
    usable = (smallest > -LARGEST) & (largest < LARGEST)  # False for NaN too
    low = bf16_down(torch.where(usable, smallest, 0.0))
    step = bf16_up((torch.where(usable, largest, 0.0) - low.float()) * (1 / (levels - 1)))
    step = torch.where(usable, step, float("nan"))
    u = uniform(seed, 0, tiles(x.numel()), x.device).view(-1)[: x.numel()]
    v = ((rows - low.float()[:, None]) * inverse(step.float())[:, None]).view(-1)[: x.numel()]
    codes = (v + u).nan_to_num(0.0).clamp(0, levels - 1).to(torch.uint8)
    return pack_codes(codes, levels), step, low


def group_dequantize(
    codes: Tensor,
    step: Tensor,
    low: Tensor,
    levels: int,
    group_size: int,
    out: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inner: int = 1,
    mask: Tensor | None = None,
    first: int = 0,
) -> None:
    """Inverse of `group_quantize`: out [N] is written.

    If out is part of a larger tensor, it is the part that begins with tile `first`.
    """
    n = first * TILE + out.numel()
    q = unpack_codes(codes, n, levels).float()
    each = torch.arange(n, device=codes.device) // group_size
    y = low.float()[each] + step.float()[each] * q
    store(mapped(y, scale, shift, inner, mask)[first * TILE :], out)
