"""One bit an element (specification: `reference/bits.py`)."""

from functools import lru_cache
from math import copysign
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.numba.compiled import CHUNK, TILE, i32, jit, u8
from elbowroom.kernels.numba.launch import array, parallel, words
from elbowroom.kernels.numba.rounding import as_bits, as_float, from_float, target, to_float

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_BELOW_SIGN = {nbytes: kind(np.iinfo(kind).max) for nbytes, kind in _INTEGERS.items()}
_ALL = {nbytes: kind(-1) for nbytes, kind in _INTEGERS.items()}


def pack_bits(x: Tensor) -> Tensor:
    bits = outputs.bits(x)
    source, above_sign = _magnitudes(x)
    _pack(source, above_sign, array(bits))
    return bits


def unpack_bits(bits: Tensor, value: float, out: Tensor) -> None:
    one = _pattern(value, copysign(1, value), out.dtype)
    _unpack(array(bits), one, array(out, _WORDS[out.element_size()]))


def masked(x: Tensor, bits: Tensor, out: Tensor) -> None:
    words = _WORDS[x.element_size()]
    _masked(array(x, words), array(bits), array(out, words))


def times_bits(x: Tensor, bits: Tensor, value: float, out: Tensor) -> None:
    one = float(torch.tensor(value, dtype=x.dtype, device="cpu"))  # as the tensor of factors has it
    source, kind = words(x)
    _times(source, kind, array(bits), np.float32(one), words(out)[0])


@lru_cache(maxsize=256)
def _pattern(value: float, sign: float, dtype: torch.dtype) -> Any:
    """A number as a tensor of a dtype holds it, as an integer. sign: for 0.0 == -0.0."""
    return array(torch.full((1,), value, dtype=dtype), _WORDS[dtype.itemsize])[0]


def _magnitudes(x: Tensor) -> tuple[np.ndarray[Any, Any], Any]:
    """x as integers, and a mask that drops the sign of a float, so that -0.0 is zero."""
    nbytes = x.element_size()
    return array(x, _WORDS[nbytes]), (_BELOW_SIGN if x.is_floating_point() else _ALL)[nbytes]


_GATHER = np.uint64(
    0x0102040810204080
)  # times eight bytes of 0 or 1: their bits, in order, in the top byte
SPREAD = np.array(  # a byte of bits -> eight bytes of 0x00 or 0xFF, in order
    [sum(0xFF << (8 * k) for k in range(8) if byte >> k & 1) for byte in range(256)],
    dtype=np.uint64,
)


@jit
def pack_flags(x, mask, bits, spare):
    """bits [ceil(n / 8)] <- x [n] & mask != 0, through spare [>= n rounded up to 8] uint8."""
    n = x.shape[0]
    for o in range(n):
        spare[o] = (x[o] & mask) != 0
    spare[n : 8 * bits.shape[0]] = 0
    eights = spare.view(np.uint64)
    for o in range(bits.shape[0]):
        bits[o] = u8((eights[o] * _GATHER) >> np.uint64(56))


@parallel
def _pack(x, mask, bits):
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_flag = np.empty(TILE, u8)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            pack_flags(x[first:last], mask, bits[first // 8 : (last + 7) // 8], b_flag)


@jit
def unpack_flags(bits, flags):
    """flags [8 * bytes] int8 <- -1 where a bit is set, 0 elsewhere.

    After sign extension that is a mask of any width.
    """
    eights = flags.view(np.uint64)
    for o in range(bits.shape[0]):
        eights[o] = SPREAD[bits[o]]


@jit
def blank(values, flags):
    """values [n] <- +0 where flags [n] int8 is 0; elsewhere it is -1."""
    words = values.view(np.int32)
    for o in range(words.shape[0]):
        words[o] &= i32(flags[o])


@parallel
def _unpack(bits, one, out):
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_flag = np.empty(TILE, np.int8)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            unpack_flags(bits[first // 8 : (last + 7) // 8], b_flag)
            part = out[first:last]
            for o in range(part.shape[0]):
                part[o] = one & b_flag[o]


@parallel
def _masked(x, bits, out):
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_flag = np.empty(TILE, np.int8)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            unpack_flags(bits[first // 8 : (last + 7) // 8], b_flag)
            part, source = out[first:last], x[first:last]
            for o in range(part.shape[0]):
                part[o] = source[o] & b_flag[o]


@parallel
def _times(x, kind, bits, factor, out):
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    one = as_bits(factor)
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_flag, b_x = np.empty(TILE, np.int8), np.empty(TILE, np.float32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            unpack_flags(bits[first // 8 : (last + 7) // 8], b_flag)
            values = to_float(x[first:last], kind, b_x[: last - first])
            y = target(out[first:last], kind, b_x[: last - first])
            for o in range(last - first):
                y[o] = values[o] * as_float(one & i32(b_flag[o]))
            from_float(y, kind, out[first:last])


BELOW = np.array(  # a byte of bits -> in byte k of the result, how many bits are set below bit k
    [sum((byte & ((1 << k) - 1)).bit_count() << (8 * k) for k in range(8)) for byte in range(256)],
    dtype=np.uint64,
)
COUNT = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint64)


def tile_counts(bits: Tensor, tiles: int) -> Tensor:
    """Counts the bits that are set in each tile: [tiles] int64."""
    counts = torch.empty(tiles, dtype=torch.int64)
    _count(array(bits), array(counts))
    return counts


@jit
def count(bits):
    """Counts the bits that are set."""
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
