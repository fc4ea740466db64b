"""Eight-bit floats with a scale a group (specification: `reference/fp8.py`)."""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, i32, jit, u8
from elbowroom.kernels.numba.launch import array, parallel, patterns, words
from elbowroom.kernels.numba.rounding import (
    HUGE,
    TOP,
    as_bits,
    as_float,
    bf16_directed,
    bf16_value,
    from_restored,
    inverse,
    target,
    to_float,
)

FORMATS = {
    "e4m3": (3, 7, 448.0),
    "e5m2": (2, 15, 57344.0),
}  # bits of fraction, exponent bias, largest


def fp8_quantize(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    codes, scale = outputs.fp8(x, group_size)
    fraction, bias, largest = FORMATS[fmt]
    _quantize(
        *words(x), group_size, fraction, bias, np.float32(largest), array(codes), patterns(scale)
    )
    return codes, scale


def fp8_dequantize(codes: Tensor, scale: Tensor, group_size: int, fmt: str, out: Tensor) -> None:
    table = torch.arange(256, dtype=torch.uint8).view(
        torch.float8_e4m3fn if fmt == "e4m3" else torch.float8_e5m2
    )
    _dequantize(array(codes), patterns(scale), array(table.float()), group_size, *words(out))


@jit
def quantize_fp8(values, scale, fraction, bias, largest, codes):
    """codes [n] <- the bits of values * scale, rounded to the nearest float8, ties to even."""
    drop = i32(23 - fraction)
    rebias = i32((127 - bias) << 23)
    least_normal = i32((127 - bias + 1) << 23)
    magic = as_float(
        i32((127 - bias + 1 + 23 - fraction) << 23)
    )  # adding it rounds to the subnormal step
    for o in range(values.shape[0]):
        scaled = min(max(values[o] * scale, -largest), largest)
        bits = as_bits(scaled)
        sign = (bits >> i32(24)) & i32(0x80)
        bits = bits & TOP
        small = as_bits(as_float(bits) + magic) - as_bits(magic)
        normal = (
            bits - rebias + (i32(1) << (drop - i32(1))) - i32(1) + ((bits >> drop) & i32(1))
        ) >> drop
        codes[o] = u8((small if bits < least_normal else normal) | sign)


@jit
def absmax(values):
    """The largest abs(values [n]) as bits of a float32; NaN and Inf come out largest."""
    most = i32(0)
    source = values.view(np.int32)
    for o in range(source.shape[0]):
        most = max(most, source[o] & TOP)
    return most


@parallel
def _quantize(x, kind, S, fraction, bias, largest, codes, scales):
    N = x.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x = np.empty(TILE, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            start = i_t * TILE
            n = min(TILE, N - start)
            values = to_float(x[start : start + n], kind, b_x[:n])
            for i_g in range((n + S - 1) // S):
                first, last = i_g * S, min(i_g * S + S, n)
                most = absmax(values[first:last])
                g = start // S + i_g
                if most >= HUGE:
                    scales[g] = 0x7FC0  # NaN
                    codes[start + first : start + last] = 0
                    continue
                scales[g] = bf16_directed(as_float(most) * f32(f32(1) / largest), True)
                factor = inverse(bf16_value(scales[g]))
                quantize_fp8(
                    values[first:last],
                    factor,
                    fraction,
                    bias,
                    largest,
                    codes[start + first : start + last],
                )


@jit
def dequantize_fp8(codes, table, scale, out):
    for o in range(out.shape[0]):
        out[o] = table[codes[o]] * scale


@parallel
def _dequantize(codes, scales, table, S, out, kind):
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x = np.empty(TILE, f32)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            start = i_t * TILE
            n = min(TILE, N - start)
            values = target(out[start : start + n], kind, b_x[:n])
            for i_g in range((n + S - 1) // S):
                first, last = i_g * S, min(i_g * S + S, n)
                scale = bf16_value(scales[start // S + i_g])
                dequantize_fp8(
                    codes[start + first : start + last], table, scale, values[first:last]
                )
            from_restored(values, kind, out[start : start + n])
