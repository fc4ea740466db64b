"""Directed rounding to bf16, cutting into rows, and an inverse that is 0 for what is near 0."""

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST = 2.0**125  # beyond it a range may overflow: such a group or tile counts as not finite
SMALLEST = 1e-36  # a step below it is taken as 0: differences that small are not coded


def bf16_down(x: Tensor) -> Tensor:
    """The largest bf16 that is at most x, float32 -> bf16."""
    nearest = x.to(torch.bfloat16)
    return torch.where(nearest.float() > x, _next_bf16(nearest, up=False), nearest)


def bf16_up(x: Tensor) -> Tensor:
    """The smallest bf16 that is at least x, float32 -> bf16."""
    nearest = x.to(torch.bfloat16)
    return torch.where(nearest.float() < x, _next_bf16(nearest, up=True), nearest)


def _next_bf16(x: Tensor, *, up: bool) -> Tensor:
    """The bf16 neighbor of x: its bit pattern plus or minus one; the step across 0 by hand."""
    pattern = x.view(torch.int16)
    away = (x > 0) if up else (x < 0)
    smallest = torch.tensor(1 if up else -32767, dtype=torch.int16, device=x.device)  # +-9e-41
    moved = torch.where(away, pattern + 1, pattern - 1)
    return torch.where(x == 0, smallest, moved).view(torch.bfloat16)


def inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 where x is below SMALLEST."""
    return torch.where(x < SMALLEST, torch.zeros_like(x), 1 / x)


def store(values: Tensor, out: Tensor) -> None:
    """out <- values, rounded to its dtype.

    Where float16's range ends, its largest number is stored, not Inf: a grid over finite values may
    reach beyond them.
    """
    largest = torch.finfo(torch.float16).max
    out.copy_(values.clamp(-largest, largest) if out.dtype is torch.float16 else values)


def rows_of(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """x [N] -> rows [ceil(N / size), size], and a mask like it that is False in the padding."""
    missing = -x.numel() % size
    real = pad(torch.ones_like(x, dtype=torch.bool), (0, missing), value=False).view(-1, size)
    return pad(x, (0, missing)).view(-1, size), real


def square_root(x: Tensor) -> Tensor:
    """Correctly rounded; `torch.sqrt` of float32 is not (CPU, torch 2.13: 17 % are 1 ulp off)."""
    return x.double().sqrt().float()
