"""Indices of max-pooling as places in their windows, packed (`kernels/windows.py`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from elbowroom.kernels.windows import Window, window_of


def places_pack(x: Tensor, window: Sequence[int], maps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """x [N] int64, maps [outer, rows, columns, inner] -> packed uint8, and how many were lost.

    An index outside of its window is lost.
    """
    w = window_of(window)
    offset = x.view(*maps) - _starts(w, maps, x.device)
    y = (offset // w.step_y).clamp(0, w.kernel_y - 1)
    column = offset - y * w.step_y
    place_x = (column // w.dilation_x).clamp(0, w.kernel_x - 1)
    lost = (column != place_x * w.dilation_x).sum()
    return _pack((y * w.kernel_x + place_x).flatten().to(torch.uint8), w.bits), lost


def places_unpack(packed: Tensor, window: Sequence[int], maps: Sequence[int], out: Tensor) -> None:
    """Writes the indices, out [N] int64."""
    w = window_of(window)
    place = _unpack(packed, w.bits, out.numel()).long().view(*maps)
    offset = place // w.kernel_x * w.step_y + place % w.kernel_x * w.dilation_x
    out.copy_((offset + _starts(w, maps, out.device)).flatten())


def _starts(w: Window, maps: Sequence[int], device: torch.device) -> Tensor:
    """The index at which each window starts, [rows, columns, 1]; before the map's with padding."""
    y = torch.arange(maps[1], device=device) * w.stride_y - w.padding_y
    x = torch.arange(maps[2], device=device) * w.stride_x - w.padding_x
    return (y[:, None] * w.columns + x)[:, :, None]


def _pack(places: Tensor, bits: int) -> Tensor:
    each = 8 // bits
    rows = torch.nn.functional.pad(places, (0, -places.numel() % each)).view(-1, each)
    shifts = torch.arange(0, 8, bits, device=places.device)
    return (rows.to(torch.int16) << shifts).sum(1).to(torch.uint8)


def _unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, device=packed.device)
    places = (packed[:, None].to(torch.int16) >> shifts) & ((1 << bits) - 1)
    return places.flatten()[:n]
