"""The numbers of FP8: codes with their scales, and products of codes.

    scale = largest absolute value / largest of the format     of a tensor, or of each row
    code  = x / scale, rounded once to the nearest, ties to even
    x~    = code * scale

The largest absolute value is taken from the tensor itself, not from earlier steps. A product runs
in `torch._scaled_mm` on a GPU of compute capability 8.9 or more, where all its sizes are multiples
of 16. Elsewhere it is *emulated*: the same codes, whose products are exact in fp32, with sums in
fp32. That is slow, and proves numbers, not speed. A NaN or an Inf makes what its scale covers NaN.
"""

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MIN = 1e-30


def quantize(x: Tensor, to: torch.dtype, *, rows: bool = False) -> tuple[Tensor, Tensor]:
    """x -> codes of its shape in the float8 dtype `to`, and their scale in fp32.

    The scale is [] for the tensor, or [..., 1] with `rows`: one for each run of the last dimension.
    """
    x = x.detach()
    low, high = x.aminmax(dim=-1, keepdim=True) if rows else x.aminmax()
    scale = torch.maximum(high, -low).float().clamp(min=_MIN) / torch.finfo(to).max
    return cast(x, scale, to), scale


def cast(x: Tensor, scale: Tensor, to: torch.dtype) -> Tensor:
    """x [...] -> its codes by a scale that is known: the same bits from the same values."""
    largest = torch.finfo(to).max
    return (x.detach().float() / scale).clamp_(-largest, largest).to(to)


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a [M, K] b [K, N], both float8 -> [M, N] of `dtype`; sums are in fp32.

    Scales are [] both, or [M, 1] and [1, N], of which the second may be [1, 1].
    """
    sixteens = all(size % 16 == 0 for size in (*a.shape, b.shape[1]))
    if backend(a.device) == "scaled_mm" and sixteens:
        # The hardware wants rows of a and columns of b in one run of memory.
        a, b = a.contiguous(), b.t().contiguous().t()
        # Scales of rows come with bfloat16 results only.
        made = dtype if a_scale.dim() == 0 else torch.bfloat16
        b_scale = b_scale if b_scale.dim() == 0 else b_scale.expand(1, b.shape[1])
        scales = a_scale.contiguous(), b_scale.contiguous()
        out: Tensor = torch._scaled_mm(a, b, *scales, out_dtype=made)
        return out.to(dtype)
    return ((a.float() @ b.float()) * (a_scale * b_scale)).to(dtype)


def backend(device: torch.device) -> str:
    """The backend that computes on a device: "scaled_mm" or "emulated"."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return "emulated"
    return "scaled_mm"
