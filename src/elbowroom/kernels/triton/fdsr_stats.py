"""Scales, gains and normalized coefficients of groups (specification: `reference/fdsr.py`).

Coefficients are tensors [R, L] in a tuple, b_y by row and column, b_z by position; p_scales [R] and
p_payload [R, 1] point to a group's scales and to what comes next of it. BANDS is a `Bands`.
"""

import triton
import triton.language as tl

from elbowroom.kernels import bands
from elbowroom.kernels.triton.device import (
    NAN_BF16,
    bf16_directed,
    bf16_nearest,
    bf16_value,
    inverse,
)
from elbowroom.kernels.triton.fdsr_tables import (
    band,
    band_count,
    band_start,
    band_stop,
    coded,
    place,
    position,
    position_count,
    scale_count,
    sign,
)
from elbowroom.kernels.triton.map_tiles import apart

FIRST_GAIN = tl.constexpr(bands.FIRST_GAIN)
LIMIT = tl.constexpr(bands.LIMIT)
UNITS = tl.constexpr(bands.UNITS)


@triton.jit
def zero_unusable(b_y):
    """b_y, 0 in groups with a NaN, an Inf or too large a coefficient.

    Also absmax [R], of all but the mean, and which groups are usable [R].
    """
    b_most = tl.abs(b_y[1])
    for i in tl.static_range(2, len(b_y)):
        b_most = tl.maximum(b_most, tl.abs(b_y[i]), propagate_nan=tl.PropagateNan.ALL)
    m_y = (b_most < LIMIT) & (tl.abs(b_y[0]) < LIMIT)
    m_g = tl.min(m_y.to(tl.int32), axis=1) != 0
    b_kept = ()
    for i in tl.static_range(len(b_y)):
        b_kept = b_kept + (tl.where(m_g[:, None], b_y[i], 0.0),)
    return b_kept, tl.max(tl.where(m_g[:, None], b_most, 0.0), axis=1), m_g


@triton.jit
def bounds(b_mean):
    """Least and most of means [R, L], rounded outwards to bf16, as bits [R]."""
    b_lo = bf16_directed(tl.min(b_mean, axis=1), UP=False)
    return b_lo, bf16_directed(tl.max(b_mean, axis=1), UP=True)


@triton.jit
def store_scales(p_scales, b_lo, b_hi, b_weights, m_usable, m_g, BANDS: tl.constexpr):
    """The scales of what is coded, at once: bits of bf16, [R] each."""
    o_s = tl.arange(0, 16)[None, :]
    b_lo = tl.where(m_usable, b_lo, NAN_BF16)[:, None]
    b_scale = tl.where(o_s == 0, b_lo, tl.where(m_usable, b_hi, NAN_BF16)[:, None])
    for i_b in tl.static_range(band_count(BANDS)):
        b_scale = tl.where(o_s == 2 + i_b, b_weights[i_b][:, None], b_scale)
    m_s = m_g[:, None] & (o_s < 2 + band_count(BANDS))
    tl.store(p_scales[:, None] + o_s, b_scale.to(tl.int16), mask=m_s)


@triton.jit
def load_scales(p_scales, m_g, BANDS: tl.constexpr, KEPT: tl.constexpr):
    """All scales of a group, that of the residual too, as 16 tensors [R, 1]."""
    o_s = tl.arange(0, 16)[None, None, :]
    m_s = m_g[:, None, None] & (o_s < scale_count(BANDS, KEPT))
    return apart(tl.load(p_scales[:, None, None] + o_s, mask=m_s, other=0))


@triton.jit
def mean_grid(b_lo, b_hi, LEVELS: tl.constexpr):
    """Code 0 and the step of means between bounds, bits [R, 1]."""
    b_lo, b_hi = bf16_value(b_lo), bf16_value(b_hi)
    return b_lo, (b_hi - b_lo) * (1 / (LEVELS - 1))


@triton.jit
def band_weights(b_y, b_absmax, BANDS: tl.constexpr, DITHER: tl.constexpr):
    """The weights of the coded bands, bits of bf16 [R] each."""
    b_scale = inverse(b_absmax * (1 / UNITS))[:, None]
    b_weights = ()
    for i_b in tl.static_range(1, band_count(BANDS) + 1):
        b_squares = tl.zeros_like(b_y[0]).to(tl.int32)
        for p in tl.static_range(band_start(BANDS, i_b), band_stop(BANDS, i_b)):
            b_unit = (b_y[place(BANDS, p)] * b_scale).to(tl.int32)
            b_squares += b_unit * b_unit  # 36 of 2^26 at most: they fit uint32
        b_ratio = rms(b_squares.to(tl.uint32), band_stop(BANDS, i_b) - band_start(BANDS, i_b))
        b_ratio = tl.sqrt_rn(b_ratio) if DITHER else b_ratio
        b_weights = b_weights + (bf16_nearest(b_ratio * b_absmax),)
    return b_weights


@triton.jit
def rms(b_squares, ROWS: tl.constexpr):
    """Computes the root mean square from sums of ROWS squares [R, L], in units.

    It is a share of absmax, and at least one unit [R].
    """
    COUNT: tl.constexpr = ROWS * b_squares.shape[1]
    b_total = tl.maximum(tl.sum(b_squares.to(tl.int64), axis=1), COUNT)
    return tl.sqrt_rn(b_total.to(tl.float32) * (1 / COUNT)) * (1 / UNITS)


@triton.jit
def normalized(b_y, b_weights, BANDS: tl.constexpr, DITHER: tl.constexpr):
    """Returns, by position, the mean and the coded coefficients over their weights.

    With DITHER, signs are turned.
    """
    b_z = (b_y[0],)
    for p in tl.static_range(1, coded(BANDS)):
        b_factor = inverse(bf16_value(b_weights[band(BANDS, p) - 1]))[:, None]
        b_factor = b_factor * sign(p) if DITHER else b_factor  # exact, as a step of its own
        b_z = b_z + (b_y[place(BANDS, p)] * b_factor,)
    return b_z


@triton.jit
def restored(b_z, b_scales, b_rest, BANDS: tl.constexpr, DITHER: tl.constexpr):
    """Inverse of `normalized`, by row and column.

    What is not coded is b_rest, by position, or 0 where that is empty.
    """
    b_scaled = (b_z[0],)
    for p in tl.static_range(1, coded(BANDS)):
        b_factor = bf16_value(b_scales[1 + band(BANDS, p)])
        b_scaled = b_scaled + (b_z[p] * (b_factor * sign(p) if DITHER else b_factor),)
    b_scaled = b_scaled + b_rest
    for _ in tl.static_range(len(b_scaled), position_count(BANDS)):
        b_scaled = b_scaled + (tl.zeros_like(b_z[0]),)
    b_y = ()
    for i in tl.static_range(position_count(BANDS)):
        b_y = b_y + (b_scaled[position(BANDS, i)],)
    return b_y


@triton.jit
def store_gains(p_payload, b_z, m_g, CELL: tl.constexpr):
    """The largest of each CELL lanes over positions 1.., rounded up; as they are stored [R, L]."""
    R: tl.constexpr = b_z[0].shape[0]
    L: tl.constexpr = b_z[0].shape[1]
    b_most = tl.zeros_like(b_z[0])
    for p in tl.static_range(1, len(b_z)):
        b_most = tl.maximum(b_most, tl.abs(b_z[p]))
    b_most = tl.max(tl.reshape(b_most, [R, L // CELL, CELL]), axis=2)
    b_code = gain_code(b_most, (1 << 19) - 1)  # [R, L / CELL]
    o_b = tl.arange(0, L // CELL)[None, :]
    tl.store(p_payload + o_b, b_code.to(tl.uint8), mask=m_g[:, None])
    b_code = tl.broadcast_to(b_code[:, :, None], [R, L // CELL, CELL])
    return gain_value(tl.reshape(b_code, [R, L]))


@triton.jit
def load_gains(p_payload, m_g, CELL: tl.constexpr, L: tl.constexpr):
    o_l = tl.arange(0, L)[None, :]
    b_code = tl.load(p_payload + o_l // CELL, mask=m_g[:, None] & (o_l < L), other=0)
    return gain_value(b_code.to(tl.int32))


@triton.jit
def gain_code(b_g, EXTRA: tl.constexpr):
    """Floats that are not negative to 8 bits; EXTRA: 2^19 - 1 rounds up, 2^18 to the nearest."""
    b_bits = b_g.to(tl.int32, bitcast=True) + EXTRA
    return tl.where(b_g == 0.0, 0, tl.minimum(tl.maximum((b_bits >> 19) - FIRST_GAIN, 1), 255))


@triton.jit
def gain_value(b_code):
    b_bits = (b_code + FIRST_GAIN) << 19
    return tl.where(b_code == 0, 0.0, b_bits.to(tl.float32, bitcast=True))
