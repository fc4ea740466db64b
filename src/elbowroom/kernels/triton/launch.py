"""Starts a kernel on the device of its arguments, over all tiles, without fused multiply-adds.

A fused multiply-add rounds once where the reference rounds twice: a value at a rounding boundary
would get another code.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from elbowroom.kernels.layout import tiles

# What a kernel raises, before it runs, where this GPU or this compiler cannot serve it. Not what
# the interpreter raises, which wraps any error of ours.
FAILURES = (CompilationError, OutOfResources, PTXASError)

_FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def launch(kernel: Any, count: int, *args: Any, R: int | None = None, **constants: Any) -> None:
    """Runs `kernel` over `count` tiles, R of them a program, on the device of the first argument.

    On a GPU a program has one tile. The interpreter takes as long for a program however many tiles
    it has (4 ms to 0.4 s, by the length of the kernel; triton 3.7), so there are at most two
    programs then, and one for two tiles.
    """
    if count == 0:
        return
    if R is None:
        few = triton.next_power_of_2(2 if count == 2 else triton.cdiv(count, 2))
        R = 1 if args[0].is_cuda else few
    with torch.cuda.device_of(args[0]):
        kernel[(triton.cdiv(count, R),)](*args, R=R, enable_fp_fusion=False, **constants)


def starts_of(kernel: Any, bits: Tensor, numel: int, *args: Any, **constants: Any) -> Tensor:
    """Returns where each tile's payload starts, and the end of the last: [tiles + 1] int64.

    kernel: writes the sizes that the bits of a tile ask for; numel: elements, a bit each
    """
    starts = torch.zeros(tiles(numel) + 1, dtype=torch.int64, device=bits.device)
    launch(kernel, tiles(numel), bits, starts, *args, **constants)
    return starts.cumsum_(dim=0)


def float_kind(x: Tensor) -> int:
    """float32, bfloat16 or float16 as the KIND that `load_float` takes."""
    return _FLOATS[x.dtype]


def words(x: Tensor) -> tuple[Tensor, int]:
    """A float tensor as kernels take it, bf16 as its bits, and its KIND for `load_float`."""
    kind = float_kind(x)
    return (x.view(torch.int16) if kind == 1 else x), kind


def patterns(x: Tensor) -> Tensor:
    """A bf16 tensor as int16."""
    return x.view(torch.int16)


def split_seed(seed: int | Tensor) -> tuple[int | Tensor, int | Tensor]:
    """The two halves of a 64-bit seed, signed, so that an argument has one type for all seeds.

    Of one in a tensor (int64 [1]) twice its address, which `tile_key` reads: a CUDA graph launches
    a kernel again with the numbers that it was captured with.
    """
    if isinstance(seed, Tensor):
        return seed, seed
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)
