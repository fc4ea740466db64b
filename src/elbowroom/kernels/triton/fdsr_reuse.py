"""The residual of a transform code: words, norms, and the codebook (see `fdsr.py`).

The specification is `reference/fdsr_reuse.py`. A tile is in one thread, so that the eight sums of
its word, its energy and its rank among the tiles of its group need no other. What a tile adds to
the codebook it adds to a table in memory, atomically: these are integers, whose sums do not depend
on the order.

    sums [256, R + 1] int64    by word: the sum of the residuals r, and that of their lengths |r|
"""

import triton
import triton.language as tl

from elbowroom.kernels import bands
from elbowroom.kernels.triton.device import bf16_nearest, inverse
from elbowroom.kernels.triton.fdsr_stats import UNITS, gain_code, gain_value, rms
from elbowroom.kernels.triton.fdsr_tables import coded, place, plane, position_count, power_of_two
from elbowroom.kernels.triton.map_tiles import apart, beside

HASH_BITS = tl.constexpr(bands.HASH_BITS)
EVEN = tl.constexpr(1.5 * 2.0**23)  # added and taken off, it rounds to the nearest, ties to even


@triton.jit
def store_residual(
    p_payload, p_scale, p_sums, b_y, b_absmax, m_g, BANDS: tl.constexpr, KEPT: tl.constexpr
):
    """The residual of the KEPT tiles of most energy of each group, and what it adds to the sums.

    b_y: coefficients [R, L] by row and column; p_scale [R] points to the residual's scale.
    """
    L: tl.constexpr = b_y[0].shape[1]
    N: tl.constexpr = position_count(BANDS) - coded(BANDS)
    b_inverse = inverse(b_absmax * (1 / UNITS))[:, None]
    b_units = ()
    b_squares = tl.zeros_like(b_y[0]).to(tl.int32)
    for p in tl.static_range(coded(BANDS), position_count(BANDS)):
        b_unit = (b_y[place(BANDS, p)] * b_inverse).to(tl.int32)
        b_units = b_units + (b_unit,)
        b_squares += b_unit * b_unit  # 63 of 2^26 at most: they fit uint32
    b_squares = b_squares.to(tl.uint32)
    b_ratio = rms(b_squares, N)
    tl.store(p_scale, bf16_nearest(b_ratio * b_absmax).to(tl.int16), mask=m_g)

    b_word = word_of(b_units, BANDS)
    b_root = tl.sqrt_rn(b_squares.to(tl.float32))
    b_norm = gain_code(tl.div_rn(b_root * (1 / UNITS), b_ratio[:, None]), 1 << 18)
    b_keep = (rank_of(b_squares) < KEPT).to(tl.int32)
    m_keep = m_g[:, None] & (b_keep != 0)
    if KEPT < L:
        store_bitmap(p_payload, b_keep, m_g)
        p_payload += L // 8
    o_place = tl.cumsum(b_keep, axis=1) - b_keep
    tl.store(p_payload + o_place, b_word.to(tl.uint8), mask=m_keep)
    tl.store(p_payload + KEPT + o_place, b_norm.to(tl.uint8), mask=m_keep)

    b_added = beside(b_units + (b_root.to(tl.int32),), N + 1).to(tl.int64)  # [R, L, P]
    o_p = tl.arange(0, power_of_two(N + 1))[None, None, :]
    p_row = p_sums + b_word[:, :, None] * (N + 1)
    tl.atomic_add(p_row + o_p, b_added, mask=m_keep[:, :, None] & (o_p <= N), sem="relaxed")


@triton.jit
def word_of(b_units, BANDS: tl.constexpr):
    """On which side of each of the planes a residual lies: one bit each, [R, L]."""
    b_word = tl.zeros_like(b_units[0])
    for h in tl.static_range(HASH_BITS):
        b_side = tl.zeros_like(b_units[0])
        for i in tl.static_range(len(b_units)):
            b_side += b_units[i] * plane(h, coded(BANDS) + i)
        b_word += (b_side > 0).to(tl.int32) << h
    return b_word


@triton.jit
def rank_of(b_squares):
    """How many lanes of the group have more energy, or as much and are before it: [R, L]."""
    o_l = tl.arange(0, b_squares.shape[1])
    b_own, b_other = b_squares[:, :, None], b_squares[:, None, :]
    m_before = (o_l[None, :] < o_l[:, None])[None, :, :]
    return tl.sum(((b_other > b_own) | ((b_other == b_own) & m_before)).to(tl.int32), axis=2)


@triton.jit
def store_bitmap(p_payload, b_keep, m_g):
    """b_keep [R, L] of 0 and 1 -> L / 8 bytes."""
    R: tl.constexpr = b_keep.shape[0]
    L: tl.constexpr = b_keep.shape[1]
    b_bit = b_keep << (tl.arange(0, L) % 8)[None, :]
    b_byte = tl.sum(tl.reshape(b_bit, [R, L // 8, 8]), axis=2)
    o_b = tl.arange(0, L // 8)[None, :]
    tl.store(p_payload + o_b, b_byte.to(tl.uint8), mask=m_g[:, None])


@triton.jit
def load_residual(
    p_payload, p_codebook, b_scale, m_g, L: tl.constexpr, BANDS: tl.constexpr, KEPT: tl.constexpr
):
    """The coefficients of the residual again, a tensor [R, L] a position; b_scale [R, 1]."""
    N: tl.constexpr = position_count(BANDS) - coded(BANDS)
    o_l = tl.arange(0, L)[None, :]
    m_keep, o_place = m_g[:, None] & (o_l < L), o_l
    if KEPT < L:
        b_byte = tl.load(p_payload + o_l // 8, mask=m_keep, other=0).to(tl.int32)
        b_keep = (b_byte >> (o_l % 8)) & 1
        o_place = tl.cumsum(b_keep, axis=1) - b_keep
        m_keep = m_keep & (b_keep != 0) & (o_place < KEPT)
        p_payload += L // 8
    b_word = tl.load(p_payload + o_place, mask=m_keep, other=0).to(tl.int32)
    b_norm = tl.load(p_payload + KEPT + o_place, mask=m_keep, other=0).to(tl.int32)
    b_size = gain_value(b_norm) * b_scale * (1 / 127)
    o_p = tl.arange(0, power_of_two(N))[None, None, :]
    m_p = m_keep[:, :, None] & (o_p < N)
    b_row = tl.load(p_codebook + b_word[:, :, None] * N + o_p, mask=m_p, other=0)  # [R, L, P]
    return apart(b_row.to(tl.float32) * b_size[:, :, None])[:N]


@triton.jit
def finish_codebook(p_sums, p_codebook, WORDS, N: tl.constexpr, R: tl.constexpr):
    """Sums of R words -> their rows of the codebook, in units of 1 / 127."""
    P: tl.constexpr = power_of_two(N)
    i_w = tl.program_id(0) * R + tl.arange(0, R)
    m_w, o_p = i_w < WORDS, tl.arange(0, P)[None, :]
    m_p = m_w[:, None] & (o_p < N)
    b_length = tl.load(p_sums + i_w * (N + 1) + N, mask=m_w, other=0)
    b_whole = tl.maximum(b_length, 1).to(tl.float32)[:, None]
    b_sum = tl.load(p_sums + i_w[:, None] * (N + 1) + o_p, mask=m_p, other=0)
    b_mean = tl.div_rn(b_sum.to(tl.float32), b_whole) * 127.0
    b_mean = tl.minimum(tl.maximum(b_mean, -127.0), 127.0)
    b_code = ((b_mean + EVEN) - EVEN).to(tl.int8)
    tl.store(p_codebook + i_w[:, None] * N + o_p, b_code, mask=m_p)
