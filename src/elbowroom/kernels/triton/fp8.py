"""Eight-bit floats with a scale a group (specification: `reference/fp8.py`).

Rounded and read by integer arithmetic, not by the hardware's own conversion: that begins with
compute capability 8.9.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import tiles
from elbowroom.kernels.triton.device import (
    LARGEST,
    NAN_BF16,
    TILE,
    bf16_directed,
    bf16_value,
    group_elements,
    inverse,
    load_float,
    program_tiles,
    store_restored,
)
from elbowroom.kernels.triton.launch import launch, patterns, words

FORMATS: dict[
    str, dict[str, Any]
] = {  # bits of fraction, exponent bias, largest value, first code that is not finite
    "e4m3": {"FRACTION": 3, "BIAS": 7, "MOST": 448.0, "INFINITE": 0x7F},
    "e5m2": {"FRACTION": 2, "BIAS": 15, "MOST": 57344.0, "INFINITE": 0x7C},
}


def fp8_quantize(x: Tensor, group_size: int, fmt: str) -> tuple[Tensor, Tensor]:
    codes, scale = outputs.fp8(x, group_size)
    source, kind = words(x)
    args = source, codes, patterns(scale), x.numel()
    launch(_quantize, tiles(x.numel()), *args, S=group_size, KIND=kind, **FORMATS[fmt])
    return codes, scale


def fp8_dequantize(codes: Tensor, scale: Tensor, group_size: int, fmt: str, out: Tensor) -> None:
    target, kind = words(out)
    args = codes, patterns(scale), target, out.numel()
    launch(_dequantize, tiles(out.numel()), *args, S=group_size, KIND=kind, **FORMATS[fmt])


@triton.jit
def float8_bits(b_x, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    """float32 in the format's range -> int32 holding the nearest float8, ties to even."""
    DROP: tl.constexpr = 23 - FRACTION
    STEP: tl.constexpr = 2.0 ** (1 - BIAS - FRACTION)  # of subnormals
    MAGIC: tl.constexpr = STEP * 2.0**23  # adding it rounds to STEP
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_sign = (b_bits >> 24) & 0x80
    b_bits = b_bits & 0x7FFFFFFF
    b_magnitude = b_bits.to(tl.float32, bitcast=True)
    b_small = ((b_magnitude + MAGIC) - MAGIC) * (1 / STEP)
    b_even = (1 << (DROP - 1)) - 1 + ((b_bits >> DROP) & 1)
    b_normal = (b_bits - ((127 - BIAS) << 23) + b_even) >> DROP
    return tl.where(b_magnitude < 2.0 ** (1 - BIAS), b_small.to(tl.int32), b_normal) | b_sign


@triton.jit
def float8_value(b_code, FRACTION: tl.constexpr, BIAS: tl.constexpr, INFINITE: tl.constexpr):
    """int32 holding the bits of a float8 -> float32, subnormals, Inf and NaN included."""
    b_magnitude = b_code & 0x7F
    b_value = (b_magnitude << (23 - FRACTION)).to(tl.float32, bitcast=True) * 2.0 ** (127 - BIAS)
    b_value = tl.where(b_magnitude == INFINITE, float("inf"), b_value)
    b_value = tl.where(b_magnitude > (0x7E if FRACTION == 3 else INFINITE), float("nan"), b_value)
    return tl.where(b_code >= 0x80, -b_value, b_value)


@triton.jit
def _quantize(
    p_x, p_codes, p_scale, N,
    FRACTION: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, INFINITE: tl.constexpr,
    S: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = TILE // S
    i_t, n = program_tiles(N, R)
    i_t, n = i_t[:, None, None], n[:, None, None]
    o_e = group_elements(S)
    m_e = o_e < n  # [R, G, S]
    b_x = load_float(p_x + i_t * TILE + o_e, m_e, KIND)
    m_usable = tl.max((~(tl.abs(b_x) < LARGEST)).to(tl.int32), axis=2) == 0  # [R, G]
    b_absmax = tl.where(m_usable, tl.max(tl.abs(b_x), axis=2), 0.0)
    b_scales = bf16_directed(b_absmax * (1 / MOST), UP=True)
    b_scaled = b_x * inverse(bf16_value(b_scales))[:, :, None]
    b_scaled = tl.where(m_usable[:, :, None], tl.minimum(tl.maximum(b_scaled, -MOST), MOST), 0.0)
    b_code = float8_bits(b_scaled, FRACTION, BIAS).to(tl.uint8)
    tl.store(p_codes + i_t * TILE + o_e, b_code, mask=m_e)
    o_g = tl.arange(0, G)[None, :, None]
    b_scales = tl.where(m_usable, b_scales, NAN_BF16).to(tl.int16)[:, :, None]
    tl.store(p_scale + i_t * G + o_g, b_scales, mask=o_g * S < n)


@triton.jit
def _dequantize(
    p_codes, p_scale, p_out, N,
    FRACTION: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, INFINITE: tl.constexpr,
    S: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = TILE // S
    i_t, n = program_tiles(N, R)
    i_t, n = i_t[:, None, None], n[:, None, None]
    o_e = group_elements(S)
    m_e = o_e < n
    o_g = tl.arange(0, G)[None, :, None]
    b_scale = bf16_value(tl.load(p_scale + i_t * G + o_g, mask=o_g * S < n, other=0))  # [R, G, 1]
    b_code = tl.load(p_codes + i_t * TILE + o_e, mask=m_e, other=0).to(tl.int32)
    b_x = float8_value(b_code, FRACTION, BIAS, INFINITE) * b_scale
    store_restored(p_out + i_t * TILE + o_e, b_x, m_e, KIND)
