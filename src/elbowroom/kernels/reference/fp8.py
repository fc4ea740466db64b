"""Eight-bit floats with a scale a group.

    scale = absmax / largest    rounded up to bf16
    code  = x / scale           rounded to the nearest, ties to even
    x~    = code * scale

e4m3 has 3 bits of fraction and reaches up to 448, e5m2 has 2 bits and reaches up to 57344.
Relative error at most 2^-4 (e4m3) or 2^-3 (e5m2) for normal codes. A group with a NaN, an Inf, or a
value beyond 2^125 gets scale = NaN and decodes to NaN throughout.
"""

import torch
from torch import Tensor

from elbowroom.kernels.reference.rounding import LARGEST, bf16_up, inverse, rows_of, store

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8_quantize(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    """x [N] -> codes [N] uint8 (the bits of the float8), scale [G] bf16."""
    rows, _ = rows_of(x.float(), group_size)  # padding is 0, which absmax ignores
    absmax = rows.abs().amax(dim=1)
    usable = absmax < LARGEST
    scale = bf16_up(torch.where(usable, absmax, 0.0) * (1 / torch.finfo(FORMATS[fmt]).max))
    scale = torch.where(usable, scale, float("nan"))
    scaled = (rows * inverse(scale.float())[:, None]).nan_to_num(0.0)
    largest = torch.finfo(FORMATS[fmt]).max
    codes = scaled.clamp(-largest, largest).to(FORMATS[fmt]).view(torch.uint8)
    return codes.view(-1)[: x.numel()].clone(), scale


def fp8_dequantize(codes: Tensor, scale: Tensor, group_size: int, fmt: str, out: Tensor) -> None:
    """Inverse of `fp8_quantize`: out [N] is written."""
    each = torch.arange(codes.numel(), device=codes.device) // group_size
    store(codes.view(FORMATS[fmt]).float() * scale.float()[each], out)
