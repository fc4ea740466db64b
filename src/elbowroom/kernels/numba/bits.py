"""One bit an element (specification: `reference/bits.py`)."""

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.numba.device import CHUNK, TILE, i32, jit, u8
from elbowroom.kernels.numba.launch import parallel

_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_bits(x: Tensor) -> Tensor:
    bits = torch.empty(-(-x.numel() // 8), dtype=torch.uint8)
    source, above_sign = _magnitudes(x)
    _pack(source, above_sign, bits.numpy())
    return bits


def unpack_bits(bits: Tensor, value: float, out: Tensor) -> None:
    words = _UNSIGNED[out.element_size()]
    one = torch.full((1,), value, dtype=out.dtype).view(words).numpy()[0]
    _unpack(bits.numpy(), one, out.view(words).numpy())


def _magnitudes(x: Tensor) -> tuple[np.ndarray[Any, Any], Any]:
    """x as integers, and a mask that drops the sign of a float, so that -0.0 is zero."""
    words = x.view(_UNSIGNED[x.element_size()]).numpy()
    if x.is_floating_point():
        return words, words.dtype.type(torch.iinfo(_UNSIGNED[x.element_size()]).max)
    return words, words.dtype.type(255 if x.element_size() == 1 else -1)


@jit
def pack_flags(x, mask, bits):
    """bits [ceil(n / 8)] <- x [n] & mask != 0"""
    whole = x.shape[0] // 8
    for o in range(whole):
        eight = x[8 * o : 8 * o + 8]
        b = u8(0)
        for k in range(8):
            b |= u8((eight[k] & mask) != 0) << u8(k)
        bits[o] = b
    if bits.shape[0] > whole:
        b = u8(0)
        for k in range(x.shape[0] - 8 * whole):
            b |= u8((x[8 * whole + k] & mask) != 0) << u8(k)
        bits[whole] = b


@parallel
def _pack(x, mask, bits):
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        first, last = i_c * CHUNK * TILE, min((i_c + 1) * CHUNK * TILE, N)
        pack_flags(x[first:last], mask, bits[first // 8 : (last + 7) // 8])


@jit
def unpack_flags(bits, one, out):
    whole = out.shape[0] // 8
    zero = one ^ one
    for o in range(whole):
        eight = out[8 * o : 8 * o + 8]
        b = bits[o]
        for k in range(8):
            eight[k] = one if (b >> u8(k)) & u8(1) else zero
    for o in range(8 * whole, out.shape[0]):
        out[o] = one if (bits[o >> 3] >> u8(o & 7)) & u8(1) else zero


@parallel
def _unpack(bits, one, out):
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        first, last = i_c * CHUNK * TILE, min((i_c + 1) * CHUNK * TILE, N)
        unpack_flags(bits[first // 8 : (last + 7) // 8], one, out[first:last])


def tile_counts(bits: Tensor, tiles: int) -> Tensor:
    """How many bits are set in each tile: [tiles] int64."""
    counts = torch.empty(tiles, dtype=torch.int64)
    _count(bits.numpy(), counts.numpy())
    return counts


@jit
def count(bits):
    """How many bits are set."""
    total = 0
    for o in range(bits.shape[0]):
        b = i32(bits[o])
        b = (b & i32(0x55)) + ((b >> i32(1)) & i32(0x55))
        b = (b & i32(0x33)) + ((b >> i32(2)) & i32(0x33))
        total += (b & i32(0x0F)) + (b >> i32(4))
    return total


@parallel
def _count(bits, counts):
    for i_t in prange(counts.shape[0]):
        counts[i_t] = count(bits[i_t * (TILE // 8) : min((i_t + 1) * (TILE // 8), bits.shape[0])])
