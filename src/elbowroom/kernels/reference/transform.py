"""Tiles of maps, their DCT, and the mixing of runs (see `fdsr.py`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from elbowroom.kernels.bands import SIGNS, Bands, cosines, mixed, tiles_of


def places(maps: Sequence[int], b: Bands, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns where each element of a tile lies in x, [G, B * B, lanes], and if it is its own."""
    _, rows, columns, inner = maps
    count, B = tiles_of(maps, b.block), b.block
    across, down = -(-columns // B), -(-rows // B)
    lane = torch.arange(-(-count // b.lanes) * b.lanes, device=device).view(-1, 1, b.lanes)
    tile = lane.clamp(max=count - 1)
    plane, row, column = tile // (across * down), tile // across % down * B, tile % across * B
    i = torch.arange(B * B, device=device)[None, :, None]
    row, column = row + i // B, column + i % B
    real = (lane < count) & (row < rows) & (column < columns)
    row, column = row.clamp(max=rows - 1), column.clamp(max=columns - 1)
    at = ((plane // inner * rows + row) * columns + column) * inner + plane % inner
    return at, real


def coefficients(x: Tensor, b: Bands) -> Tensor:
    """x [G, B * B, lanes] by row and column -> y of the same shape, by position."""
    x = x.view(len(x), b.block, b.block, -1)
    y = dct(dct(x, 1, b.block), 2, b.block)
    return y.reshape(len(x), b.block**2, -1)[:, list(b.order)]


def elements(y: Tensor, b: Bands) -> Tensor:
    """The inverse of `coefficients`."""
    raster = torch.empty_like(y)
    raster[:, list(b.order)] = y
    x = raster.view(len(y), b.block, b.block, -1)
    return inverse_dct(inverse_dct(x, 1, b.block), 2, b.block).reshape(y.shape)


def dct(x: Tensor, dim: int, B: int) -> Tensor:
    """One-dimensional, along dim: a row of D is even or odd, so both halves of x are folded."""
    D, rows = cosines(B), x.unbind(dim)
    sums = [rows[j] + rows[B - 1 - j] for j in range(B // 2)]
    differences = [rows[j] - rows[B - 1 - j] for j in range(B // 2)]
    middle = list(rows[B // 2 : B - B // 2])  # of an odd B; odd rows of D are 0 there
    folded = (sums + middle, differences)
    return torch.stack([weighted(D[i], folded[i % 2]) for i in range(B)], dim)


def inverse_dct(y: Tensor, dim: int, B: int) -> Tensor:
    """Returns the inverse of `dct`."""
    D, rows = cosines(B), y.unbind(dim)
    even = [weighted([D[i][j] for i in range(0, B, 2)], rows[::2]) for j in range(B - B // 2)]
    odd = [weighted([D[i][j] for i in range(1, B, 2)], rows[1::2]) for j in range(B // 2)]
    first = [even[j] + odd[j] for j in range(B // 2)]
    last = [even[j] - odd[j] for j in reversed(range(B // 2))]
    return torch.stack(first + even[B // 2 : B - B // 2] + last, dim)


def weighted(weights: Sequence[float], rows: Sequence[Tensor]) -> Tensor:
    """The sum of weights times rows, added in turn: the order decides the last bit."""
    total = weights[0] * rows[0]
    for weight, row in zip(weights[1 : len(rows)], rows[1:], strict=True):
        total = total + weight * row
    return total


def mix(z: Tensor, b: Bands) -> Tensor:
    """z [G, positions, lanes] -> each run turned by signs and Hadamard transforms; orthonormal."""
    z = z.clone()
    z[:, 1:] *= torch.tensor(SIGNS[1 : b.block**2], device=z.device)[:, None]
    for run in b.runs[1:]:
        for start, size in mixed(run):
            z[:, start : start + size] = hadamard(z[:, start : start + size])
    return z


def unmix(z: Tensor, b: Bands) -> Tensor:
    """The inverse of `mix`, but position 0, which it never touches."""
    z = z.clone()
    for run in b.runs[1:]:
        for start, size in reversed(list(mixed(run))):
            z[:, start : start + size] = hadamard(z[:, start : start + size])
    z[:, 1:] *= torch.tensor(SIGNS[1 : b.block**2], device=z.device)[:, None]
    return z


def hadamard(z: Tensor) -> Tensor:
    """z [G, size, lanes] -> its Walsh-Hadamard transform, which is its own inverse."""
    size, half = z.shape[1], 1
    while half < size:
        a, c = z.reshape(len(z), -1, 2, half, z.shape[2]).unbind(dim=2)
        z = torch.stack([a + c, a - c], dim=2).view(len(z), size, -1)
        half *= 2
    return z * float(size**-0.5)
