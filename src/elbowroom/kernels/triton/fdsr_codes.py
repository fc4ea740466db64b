"""The codes of a run, all at once (specification: `reference/fdsr.py`).

They are [R, L, P], P the least power of two that holds the run's positions; p_payload [R, 1] points
to the bytes of run I of BANDS, a `Bands`.
"""

import triton
import triton.language as tl

from elbowroom.kernels.triton.device import (
    base,
    bytes_block,
    inverse,
    parts,
    per_byte,
    pick,
    shift,
    uniform,
    unpack,
)
from elbowroom.kernels.triton.fdsr_tables import power_of_two, run_levels, run_size, run_start
from elbowroom.kernels.triton.map_tiles import apart, beside


@triton.jit
def noise(b_key, o_p, L: tl.constexpr, DITHER: tl.constexpr):
    """u of positions o_p [P] in each lane [R, L, P], or one half."""
    o_e = o_p[None, None, :] * L + tl.arange(0, L)[None, :, None]
    return uniform(b_key[:, :, None], o_e) if DITHER else 0.5


@triton.jit
def pack_run(
    p_payload, b_v, b_key, m_g, BANDS: tl.constexpr, I: tl.constexpr, DITHER: tl.constexpr
):
    """Values [R, L, P] in steps over that of code 0 -> bytes.

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
    """The codes less the noise: a tensor [R, L] a position."""
    P: tl.constexpr = power_of_two(run_size(BANDS, I))
    o_p = tl.arange(0, P)
    o_e = o_p[None, None, :] * L + tl.arange(0, L)[None, :, None]
    n = run_size(BANDS, I) * L
    m_e = m_g[:, None, None] & (o_e < n)  # [R, L, P]
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
    """Numbers by position."""
    b_q = load_run(p_payload, b_key, m_g, b_gain.shape[1], BANDS, I, DITHER)
    b_step = b_gain * (2 / (run_levels(BANDS, I) - 1))
    b_low = b_step * 0.5 - b_gain
    b_z = ()
    for p in tl.static_range(run_size(BANDS, I)):
        b_z = b_z + (b_low + b_step * b_q[p],)
    return b_z
