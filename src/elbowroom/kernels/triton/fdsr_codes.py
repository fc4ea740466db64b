"""Statistics, weights, gains and codes of groups (specification: `reference/fdsr.py`).

Coefficients are tensors [R, L] in a tuple, b_y by row and column, b_z by position; p_payload [R, 1]
points to what comes next of a group, p_scales [R] to its scales. BANDS is a `Bands`.
"""

import triton
import triton.language as tl

from elbowroom.kernels import bands
from elbowroom.kernels.triton.device import (
    NAN_BF16,
    base,
    bf16_directed,
    bf16_nearest,
    bf16_value,
    bytes_block,
    inverse,
    parts,
    per_byte,
    pick,
    shift,
    uniform,
    unpack,
)
from elbowroom.kernels.triton.fdsr_tables import (
    band,
    band_count,
    band_size,
    band_start,
    coded,
    place,
    position,
    position_count,
    power_of_two,
    run_levels,
    run_size,
    run_start,
    sign,
)
from elbowroom.kernels.triton.map_tiles import apart, beside

FIRST_GAIN = tl.constexpr(bands.FIRST_GAIN)
LIMIT = tl.constexpr(bands.LIMIT)
UNITS = tl.constexpr(bands.UNITS)


# --- the mean ---


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
    """All scales of a group at once: bits of bf16, [R] each."""
    o_s = tl.arange(0, 16)[None, :]
    b_lo = tl.where(m_usable, b_lo, NAN_BF16)[:, None]
    b_scale = tl.where(o_s == 0, b_lo, tl.where(m_usable, b_hi, NAN_BF16)[:, None])
    for i_b in tl.static_range(band_count(BANDS)):
        b_scale = tl.where(o_s == 2 + i_b, b_weights[i_b][:, None], b_scale)
    m_s = m_g[:, None] & (o_s < 2 + band_count(BANDS))
    tl.store(p_scales[:, None] + o_s, b_scale.to(tl.int16), mask=m_s)


@triton.jit
def load_scales(p_scales, m_g, BANDS: tl.constexpr):
    """The inverse, as 16 tensors [R, 1]."""
    o_s = tl.arange(0, 16)[None, None, :]
    m_s = m_g[:, None, None] & (o_s < 2 + band_count(BANDS))
    return apart(tl.load(p_scales[:, None, None] + o_s, mask=m_s, other=0))


@triton.jit
def mean_grid(b_lo, b_hi, LEVELS: tl.constexpr):
    """Code 0 and the step of means between bounds, bits [R, 1]."""
    b_lo, b_hi = bf16_value(b_lo), bf16_value(b_hi)
    return b_lo, (b_hi - b_lo) * (1 / (LEVELS - 1))


# --- weights and gains ---


@triton.jit
def band_weights(b_y, b_absmax, BANDS: tl.constexpr, DITHER: tl.constexpr):
    """The weights of the coded bands, bits of bf16 [R] each."""
    b_scale = inverse(b_absmax * (1 / UNITS))[:, None]
    b_weights = ()
    for i_b in tl.static_range(1, band_count(BANDS) + 1):
        b_squares = tl.zeros_like(b_y[0]).to(tl.int32)
        for p in tl.static_range(band_start(BANDS, i_b), band_start(BANDS, i_b) + band_size(BANDS, i_b)):
            b_unit = (b_y[place(BANDS, p)] * b_scale).to(tl.int32)
            b_squares += b_unit * b_unit  # 36 of 2^26 at most: they fit uint32
        b_ratio = rms(b_squares.to(tl.uint32), band_size(BANDS, i_b))
        b_ratio = tl.sqrt_rn(b_ratio) if DITHER else b_ratio
        b_weights = b_weights + (bf16_nearest(b_ratio * b_absmax),)
    return b_weights


@triton.jit
def rms(b_squares, ROWS: tl.constexpr):
    """Of sums of ROWS squares [R, L], in units: as a share of absmax, at least one unit [R]."""
    COUNT: tl.constexpr = ROWS * b_squares.shape[1]
    b_total = tl.maximum(tl.sum(b_squares.to(tl.int64), axis=1), COUNT)
    return tl.sqrt_rn(b_total.to(tl.float32) * (1 / COUNT)) * (1 / UNITS)


@triton.jit
def normalized(b_y, b_weights, BANDS: tl.constexpr, DITHER: tl.constexpr):
    """By position: the coded ones over their weights, with signs turned if DITHER; 0 the mean."""
    b_z = (b_y[0],)
    for p in tl.static_range(1, coded(BANDS)):
        b_factor = inverse(bf16_value(b_weights[band(BANDS, p) - 1]))[:, None]
        b_factor = b_factor * sign(p) if DITHER else b_factor  # exact, as a step of its own
        b_z = b_z + (b_y[place(BANDS, p)] * b_factor,)
    return b_z


@triton.jit
def restored(b_z, b_scales, BANDS: tl.constexpr, DITHER: tl.constexpr):
    """The inverse, by row and column, and 0 where nothing is coded."""
    b_scaled = (b_z[0],)
    for p in tl.static_range(1, coded(BANDS)):
        b_factor = bf16_value(b_scales[1 + band(BANDS, p)])
        b_scaled = b_scaled + (b_z[p] * (b_factor * sign(p) if DITHER else b_factor),)
    for _ in tl.static_range(coded(BANDS), position_count(BANDS)):
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
    b_bits = b_most.to(tl.int32, bitcast=True) + ((1 << 19) - 1)
    b_code = tl.minimum(tl.maximum((b_bits >> 19) - FIRST_GAIN, 1), 255)
    b_code = tl.where(b_most == 0.0, 0, b_code)  # [R, L / CELL]
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
def gain_value(b_code):
    b_bits = (b_code + FIRST_GAIN) << 19
    return tl.where(b_code == 0, 0.0, b_bits.to(tl.float32, bitcast=True))


# --- codes ---
#
# Of a run at once: [R, L, P], P the least power of two that holds its positions.


@triton.jit
def noise(b_key, o_p, L: tl.constexpr, DITHER: tl.constexpr):
    """u of positions o_p [P] in each lane [R, L, P], or one half."""
    o_e = o_p[None, None, :] * L + tl.arange(0, L)[None, :, None]
    return uniform(b_key[:, :, None], o_e) if DITHER else 0.5


@triton.jit
def pack_run(p_payload, b_v, b_key, m_g, BANDS: tl.constexpr, I: tl.constexpr, DITHER: tl.constexpr):
    """Values [R, L, P] in steps over that of code 0 -> the bytes of run I.

    The codes of a byte come from as many threads: `tl.gather`, through shared memory.
    """
    R: tl.constexpr = b_v.shape[0]
    L: tl.constexpr = b_v.shape[1]
    P: tl.constexpr = b_v.shape[2]
    LEVELS: tl.constexpr = run_levels(BANDS, I)
    N: tl.constexpr = run_size(BANDS, I) * L
    b_v += noise(b_key, tl.arange(0, P) + run_start(BANDS, I), L, DITHER)
    b_v = tl.where(b_v == b_v, b_v, 0.0)
    b_codes = tl.minimum(tl.maximum(b_v, 0.0), LEVELS - 1.0).to(tl.int32)
    b_codes = tl.reshape(b_codes, [R, L * P])
    for part in tl.static_range(parts(LEVELS)):
        n_bytes = (N + per_byte(LEVELS, part) - 1) // per_byte(LEVELS, part)
        o_b = tl.arange(0, bytes_block(LEVELS, part, N))[None, :]
        m_b = m_g[:, None] & (o_b < n_bytes)
        b_byte = tl.zeros_like(m_b.to(tl.int32))
        for k in tl.static_range(per_byte(LEVELS, part)):
            o_e = o_b + k * n_bytes
            m_e = m_b & (o_e < N)
            b_code = pick(b_codes, tl.where(m_e, (o_e % L) * P + o_e // L, 0))
            b_digit = (b_code >> shift(LEVELS, part)) % base(LEVELS, part)
            b_byte += tl.where(m_e, b_digit, 0) * base(LEVELS, part) ** k
        tl.store(p_payload + o_b, b_byte.to(tl.uint8), mask=m_b)
        p_payload += n_bytes


@triton.jit
def load_run(
    p_payload, b_key, m_g, L: tl.constexpr, BANDS: tl.constexpr, I: tl.constexpr,
    DITHER: tl.constexpr,
):  # fmt: skip
    """The codes of run I less the noise: a tensor [R, L] a position."""
    P: tl.constexpr = power_of_two(run_size(BANDS, I))
    o_p = tl.arange(0, P)
    o_e = o_p[None, None, :] * L + tl.arange(0, L)[None, :, None]
    m_e = m_g[:, None, None] & (o_p < run_size(BANDS, I))[None, None, :] & (o_e >= 0)
    n = run_size(BANDS, I) * L
    b_q = unpack(p_payload[:, :, None], n, o_e, m_e, run_levels(BANDS, I)).to(tl.float32)
    return apart(b_q - noise(b_key, o_p + run_start(BANDS, I), L, DITHER))[: run_size(BANDS, I)]


@triton.jit
def quantize_run(
    p_payload, b_z, b_gain, b_key, m_g, BANDS: tl.constexpr, I: tl.constexpr, DITHER: tl.constexpr
):
    b_scale = inverse(b_gain * (2 / (run_levels(BANDS, I) - 1)))
    b_v = ()
    for p in tl.static_range(run_start(BANDS, I), run_start(BANDS, I) + run_size(BANDS, I)):
        b_v = b_v + ((b_z[p] + b_gain) * b_scale,)
    pack_run(p_payload, beside(b_v, run_size(BANDS, I)), b_key, m_g, BANDS, I, DITHER)


@triton.jit
def dequantize_run(
    p_payload, b_gain, b_key, m_g, BANDS: tl.constexpr, I: tl.constexpr, DITHER: tl.constexpr
):
    """Numbers of run I, by position."""
    b_q = load_run(p_payload, b_key, m_g, b_gain.shape[1], BANDS, I, DITHER)
    b_step = b_gain * (2 / (run_levels(BANDS, I) - 1))
    b_low = b_step * 0.5 - b_gain
    b_z = ()
    for p in tl.static_range(run_size(BANDS, I)):
        b_z = b_z + (b_low + b_step * b_q[p],)
    return b_z
