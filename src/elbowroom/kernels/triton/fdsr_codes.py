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
    run_start,
    run_stop,
    sign,
)
from elbowroom.kernels.triton.map_tiles import beside

FIRST_GAIN = tl.constexpr(bands.FIRST_GAIN)
LIMIT = tl.constexpr(bands.LIMIT)
UNITS = tl.constexpr(bands.UNITS)


# --- the mean ---


@triton.jit
def zero_unusable(b_y):
    """b_y, 0 in groups with a NaN, an Inf or too large a coefficient, and which have none [R]."""
    m_y = b_y[0] == b_y[0]
    for i in tl.static_range(len(b_y)):
        m_y = m_y & (tl.abs(b_y[i]) < LIMIT)
    m_g = tl.min(m_y.to(tl.int32), axis=1) != 0
    b_kept = ()
    for i in tl.static_range(len(b_y)):
        b_kept = b_kept + (tl.where(m_g[:, None], b_y[i], 0.0),)
    return b_kept, m_g


@triton.jit
def store_bounds(p_scales, b_mean, m_usable, m_g, LEVELS: tl.constexpr):
    """Least and most of means [R, L], rounded outwards; code 0 and the step [R, 1]."""
    b_lo = bf16_directed(tl.min(b_mean, axis=1), UP=False)
    b_hi = bf16_directed(tl.max(b_mean, axis=1), UP=True)
    tl.store(p_scales, tl.where(m_usable, b_lo, NAN_BF16).to(tl.int16), mask=m_g)
    tl.store(p_scales + 1, tl.where(m_usable, b_hi, NAN_BF16).to(tl.int16), mask=m_g)
    return mean_grid(b_lo, b_hi, LEVELS)


@triton.jit
def load_bounds(p_scales, m_g, LEVELS: tl.constexpr):
    b_lo = tl.load(p_scales, mask=m_g, other=0)
    return mean_grid(b_lo, tl.load(p_scales + 1, mask=m_g, other=0), LEVELS)


@triton.jit
def mean_grid(b_lo, b_hi, LEVELS: tl.constexpr):
    b_lo, b_hi = bf16_value(b_lo)[:, None], bf16_value(b_hi)[:, None]
    return b_lo, (b_hi - b_lo) * (1 / (LEVELS - 1))


# --- weights and gains ---


@triton.jit
def store_weights(p_scales, b_y, m_g, BANDS: tl.constexpr, DITHER: tl.constexpr):
    """The weights [R, 1] of the coded bands, as they are stored."""
    b_most = tl.zeros_like(b_y[0])
    for i in tl.static_range(1, len(b_y)):
        b_most = tl.maximum(b_most, tl.abs(b_y[i]))
    b_absmax = tl.max(b_most, axis=1)  # [R]
    b_scale = inverse(b_absmax * (1 / UNITS))[:, None]
    b_weights = ()
    for i_b in tl.static_range(1, band_count(BANDS) + 1):
        b_squares = tl.zeros_like(b_y[0]).to(tl.uint32)  # of 2^26 each, at most 36 of them
        for p in tl.static_range(band_start(BANDS, i_b), band_start(BANDS, i_b) + band_size(BANDS, i_b)):
            b_unit = (b_y[place(BANDS, p)] * b_scale).to(tl.int32)
            b_squares += (b_unit * b_unit).to(tl.uint32)
        b_ratio = rms(b_squares, band_size(BANDS, i_b))
        b_ratio = tl.sqrt_rn(b_ratio) if DITHER else b_ratio
        b_weight = bf16_nearest(b_ratio * b_absmax)
        tl.store(p_scales + 1 + i_b, b_weight.to(tl.int16), mask=m_g)
        b_weights = b_weights + (bf16_value(b_weight)[:, None],)
    return b_weights


@triton.jit
def rms(b_squares, ROWS: tl.constexpr):
    """Of sums of ROWS squares [R, L], in units: as a share of absmax, at least one unit [R]."""
    COUNT: tl.constexpr = ROWS * b_squares.shape[1]
    b_total = tl.maximum(tl.sum(b_squares.to(tl.int64), axis=1), COUNT)
    return tl.sqrt_rn(b_total.to(tl.float32) * (1 / COUNT)) * (1 / UNITS)


@triton.jit
def load_weights(p_scales, m_g, COUNT: tl.constexpr):
    b_weights = ()
    for i_b in tl.static_range(1, COUNT + 1):
        b_weight = tl.load(p_scales + 1 + i_b, mask=m_g, other=0)
        b_weights = b_weights + (bf16_value(b_weight)[:, None],)
    return b_weights


@triton.jit
def normalized(b_y, b_weights, BANDS: tl.constexpr, DITHER: tl.constexpr):
    """By position: the coded ones over their weights, with signs turned if DITHER; 0 the mean."""
    b_z = (b_y[0],)
    for p in tl.static_range(1, coded(BANDS)):
        b_factor = inverse(b_weights[band(BANDS, p) - 1])
        b_factor = b_factor * sign(p) if DITHER else b_factor  # exact, as a step of its own
        b_z = b_z + (b_y[place(BANDS, p)] * b_factor,)
    return b_z


@triton.jit
def restored(b_z, b_weights, BANDS: tl.constexpr, DITHER: tl.constexpr):
    """The inverse, by row and column, and 0 where nothing is coded."""
    b_scaled = (b_z[0],)
    for p in tl.static_range(1, coded(BANDS)):
        b_factor = b_weights[band(BANDS, p) - 1]
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


@triton.jit
def noise(b_key, p, L: tl.constexpr, DITHER: tl.constexpr):
    """u of position p in each lane [R, L], or one half."""
    return uniform(b_key, tl.arange(0, L)[None, :] + p * L) if DITHER else 0.5


@triton.jit
def code(b_above, b_scale, b_u, LEVELS: tl.constexpr):
    """b_above (the value over that of code 0) and 1 / step -> codes as int32."""
    b_v = b_above * b_scale + b_u
    b_v = tl.where(b_v == b_v, b_v, 0.0)
    return tl.minimum(tl.maximum(b_v, 0.0), LEVELS - 1.0).to(tl.int32)


@triton.jit
def pack_run(p_payload, b_codes, m_g, LEVELS: tl.constexpr, ROWS: tl.constexpr):
    """Codes of ROWS positions [R, L] each -> the bytes of a run.

    A byte's codes come from as many threads: `tl.gather`, through shared memory.
    """
    R: tl.constexpr = b_codes[0].shape[0]
    L: tl.constexpr = b_codes[0].shape[1]
    P: tl.constexpr = power_of_two(ROWS)
    N: tl.constexpr = ROWS * L
    b_table = tl.reshape(beside(b_codes, ROWS), [R, L * P])
    for part in tl.static_range(parts(LEVELS)):
        n_bytes = (N + per_byte(LEVELS, part) - 1) // per_byte(LEVELS, part)
        o_b = tl.arange(0, bytes_block(LEVELS, part, N))[None, :]
        m_b = m_g[:, None] & (o_b < n_bytes)
        b_byte = tl.zeros_like(m_b.to(tl.int32))
        for k in tl.static_range(per_byte(LEVELS, part)):
            o_e = o_b + k * n_bytes
            m_e = m_b & (o_e < N)
            b_code = pick(b_table, tl.where(m_e, (o_e % L) * P + o_e // L, 0))
            b_digit = (b_code >> shift(LEVELS, part)) % base(LEVELS, part)
            b_byte += tl.where(m_e, b_digit, 0) * base(LEVELS, part) ** k
        tl.store(p_payload + o_b, b_byte.to(tl.uint8), mask=m_b)
        p_payload += n_bytes


@triton.jit
def load_codes(p_payload, row, m_g, LEVELS: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr):
    """The codes [R, L] of one position of a run of ROWS positions, as floats."""
    o_e = tl.arange(0, L)[None, :] + row * L
    m_e = m_g[:, None] & (o_e < ROWS * L)
    return unpack(p_payload, ROWS * L, o_e, m_e, LEVELS).to(tl.float32)


@triton.jit
def quantize_run(
    p_payload, b_z, b_gain, b_key, m_g, BANDS: tl.constexpr, I: tl.constexpr, DITHER: tl.constexpr
):
    START: tl.constexpr = run_start(BANDS, I)
    STOP: tl.constexpr = run_stop(BANDS, I)
    LEVELS: tl.constexpr = run_levels(BANDS, I)
    b_scale = inverse(b_gain * (2 / (LEVELS - 1)))
    b_codes = ()
    for p in tl.static_range(START, STOP):
        b_u = noise(b_key, p, b_gain.shape[1], DITHER)
        b_codes = b_codes + (code(b_z[p] + b_gain, b_scale, b_u, LEVELS),)
    pack_run(p_payload, b_codes, m_g, LEVELS, STOP - START)


@triton.jit
def dequantize_run(
    p_payload, b_gain, b_key, m_g, BANDS: tl.constexpr, I: tl.constexpr, DITHER: tl.constexpr
):
    """Numbers of the run, by position."""
    START: tl.constexpr = run_start(BANDS, I)
    STOP: tl.constexpr = run_stop(BANDS, I)
    LEVELS: tl.constexpr = run_levels(BANDS, I)
    L: tl.constexpr = b_gain.shape[1]
    b_step = b_gain * (2 / (LEVELS - 1))
    b_z = ()
    for p in tl.static_range(START, STOP):
        b_q = load_codes(p_payload, p - START, m_g, LEVELS, STOP - START, L)
        b_u = noise(b_key, p, L, DITHER)
        b_z = b_z + ((b_step * 0.5 - b_gain) + b_step * (b_q - b_u),)
    return b_z
