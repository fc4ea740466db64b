"""What each op of `ops.py` returns, in shape and dtype only: for torch's fake and meta tensors.

An op that writes `out` returns nothing, and has no entry here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from elbowroom.kernels.bands import WORDS, bands_of, tiles_of
from elbowroom.kernels.layout import blocks as runs
from elbowroom.kernels.layout import groups, packed_nbytes, tiles
from elbowroom.kernels.maps import blocks, ranges
from elbowroom.kernels.windows import window_of


def has_values(x: Tensor) -> bool:
    """Whether x has elements that may be looked at."""
    return x.device.type != "meta" and not isinstance(x, FakeTensor)


READ_AT_ONCE = {"cpu"}  # kinds of devices whose values the host can read without waiting


def would_wait(x: Tensor) -> bool:
    """Whether the host would wait for the device to read a value of x."""
    return x.device.type not in READ_AT_ONCE


def _fake_codes(x: Tensor, levels: int) -> Tensor:
    return x.new_empty(packed_nbytes(levels, x.numel()), dtype=torch.uint8)


def _fake_group(
    x: Tensor, seed: int, levels: int, group_size: int, *channels: Any
) -> tuple[Tensor, Tensor, Tensor]:
    step = x.new_empty(groups(x.numel(), group_size), dtype=torch.bfloat16)
    return _fake_codes(x, levels), step, torch.empty_like(step)


def _fake_dither(
    x: Tensor, seed: int, levels: int, group_size: int, *channels: Any
) -> tuple[Tensor, Tensor, Tensor]:
    ranges = x.new_empty(groups(x.numel(), group_size), 2, dtype=torch.uint8)
    return _fake_codes(x, levels), ranges, x.new_empty(tiles(x.numel()), 2, dtype=torch.bfloat16)


def _fake_nonzero(
    x: Tensor, seed: int, levels: int, group_size: int, *channels: Any
) -> tuple[Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    bits = x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)
    return (
        bits,
        x.new_empty(size, dtype=torch.uint8),
        x.new_empty(tiles(x.numel()), 2, dtype=torch.bfloat16),
    )


def _fake_division(
    x: Tensor, seed: int, levels: int, block: int, reach: int, maps: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean = x.new_empty(blocks(maps, block).entries, dtype=torch.bfloat16)
    scale = x.new_empty(ranges(maps, block, reach).entries, dtype=torch.bfloat16)
    return _fake_codes(x, levels), mean, scale, torch.empty_like(scale)


def _fake_sided(
    x: Tensor, bits: Tensor, seed: int, upper: int, lower: int, group_size: int, *rest: Any
) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    bounds = x.new_empty(2 * tiles(x.numel()), 2, dtype=torch.bfloat16)
    return x.new_empty(size, dtype=torch.uint8), bounds


def _fake_nonzero_into(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    bits = x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)
    return bits, x.new_empty(tiles(x.numel()), 2, dtype=torch.bfloat16)


def _fake_comet_into(
    x: Tensor, grid: Tensor, seed: int, rounding: str, aware: bool, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(-(-x.numel() // 8) if aware else 0, dtype=torch.uint8),
        x.new_empty(runs(x.numel()), dtype=torch.uint8),
        x.new_empty(tiles(x.numel()), dtype=torch.int16),
    )


def _fake_fp8(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(groups(x.numel(), group_size), dtype=torch.bfloat16)
    return torch.empty_like(x, dtype=torch.uint8), scale


def _fake_fdsr(
    x: Tensor,
    seed: int,
    maps: Sequence[int],
    block: int,
    levels: Sequence[int],
    kept: int,
    dither: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    b = bands_of(block, tuple(levels))
    groups = -(-tiles_of(maps, block) // b.lanes)
    return (
        x.new_empty(groups, b.nbytes(kept), dtype=torch.uint8),
        x.new_empty(groups, b.scales(kept), dtype=torch.bfloat16),
        x.new_empty(WORDS if kept else 0, b.rest, dtype=torch.int8),
    )


def _fake_comet(
    x: Tensor, grid: Tensor, seed: int, rounding: str, aware: bool, *maps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(-(-x.numel() // 8) if aware else 0, dtype=torch.uint8),
        x.new_empty(runs(x.numel()), dtype=torch.uint8),
        x.new_empty(tiles(x.numel()), dtype=torch.int16),
        x.new_empty(size, dtype=torch.uint8),
    )


def _fake_moments(m_codes: Tensor, *states: Any) -> tuple[Tensor, Tensor]:
    n = states[-1]
    return m_codes.new_empty(n, dtype=torch.float32), m_codes.new_empty(n, dtype=torch.float32)


def _fake_norm_backward(grad: Tensor, by_channel: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(by_channel), torch.empty_like(by_channel)


FAKES: dict[str, Callable[..., Any]] = {
    "pack_bits": lambda x: x.new_empty(-(-x.numel() // 8), dtype=torch.uint8),
    "sparse_pack_into": lambda x, *_: x.new_empty(-(-x.numel() // 8), dtype=torch.uint8),
    "narrow": lambda x, dtype: (
        torch.empty_like(x, dtype=dtype),
        x.new_empty((), dtype=torch.int64),
    ),
    "places_pack": lambda x, window, maps: (
        x.new_empty(window_of(window).nbytes(x.numel()), dtype=torch.uint8),
        x.new_empty((), dtype=torch.int64),
    ),
    "group_quantize": _fake_group,
    "dither_quantize": _fake_dither,
    "batch_norm_backward": _fake_norm_backward,
    "layer_norm_backward": _fake_norm_backward,
    "nonzero_quantize": _fake_nonzero,
    "nonzero_quantize_into": _fake_nonzero_into,
    "division_quantize": _fake_division,
    "sided_quantize": _fake_sided,
    "sided_quantize_into": lambda x, *_: x.new_empty(2 * tiles(x.numel()), 2, dtype=torch.bfloat16),
    "fp8_quantize": _fake_fp8,
    "fdsr_quantize": _fake_fdsr,
    "comet_quantize": _fake_comet,
    "comet_quantize_into": _fake_comet_into,
    "moments_dequantize": _fake_moments,
    "advance": lambda counters, by: torch.empty(len(counters), dtype=torch.float32),
    "beyond": lambda xs, limit: xs[0].new_empty((), dtype=torch.int32),
}
