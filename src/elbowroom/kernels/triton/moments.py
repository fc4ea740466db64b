"""Optimizer states of a few groups of up to 128 (specification: `reference/moments.py`).

    R  groups of a program    o_e [1, 128]  places in a group    m_e [R, 128]  those that there are
    o_code [R, 1]  where a group's codes begin    i_g [R, 1]  the group

A kind is its place in `KINDS`. Values beyond the end of a group are 0, and count for no bound.
"""

import triton
import triton.language as tl

from elbowroom.kernels import states
from elbowroom.kernels.triton.device import bf16_directed, bf16_value, whole_below
from elbowroom.kernels.triton.powers import above_one, exp2_from, fma, log2_above, polynomial

NONE, FP32, SOFTSIGN8, EXPANDED8, LOG8, LOG4, SOFTSIGN4 = (
    tl.constexpr(kind) for kind in range(len(states.KINDS))
)
GROUP = tl.constexpr(states.GROUP)
_STEPS8, _STEPS4 = tl.constexpr(states.STEPS["log8"]), tl.constexpr(states.STEPS["log4"])
_LEAST, _MOST = tl.constexpr(states.LEAST), tl.constexpr(states.MOST)
_FLOOR, _CEILING = tl.constexpr(states.FLOOR), tl.constexpr(states.CEILING)
_OCTAVES, _PER_OCTAVES = tl.constexpr(states.OCTAVES), tl.constexpr(1 / states.OCTAVES)
_MOST_RANGE = tl.constexpr(states.MOST_RANGE)
_LEAST_RANGE = tl.constexpr(states.LEAST_RANGE)
_SLOW = tl.constexpr(states.SLOW)
_MAGIC = tl.constexpr(12582912.0)  # adding it rounds to an integer, ties to even
_HIGHEST = tl.constexpr(0x7F000000)


@triton.jit
def load_second(
    p_codes, p_bounds, o_code, o_x, i_g, o_e, m_e, KIND: tl.constexpr, FUSED: tl.constexpr
):  # fmt: skip
    """v and, for a log kind, its root: [R, 128]."""
    if KIND == FP32:
        b_v = tl.load(p_codes + o_x, mask=m_e, other=0.0)
        return b_v, b_v
    if KIND == NONE:
        b_v = tl.zeros_like(m_e.to(tl.float32))
        return b_v, b_v
    b_low, b_high = bounds_of(p_bounds, i_g, m_e)
    b_code = load_codes(p_codes, o_code, o_e, m_e, KIND)
    if KIND == EXPANDED8:
        b_v = expanded_load(b_code, b_low, b_high, FUSED)
        return b_v, b_v
    b_bits = (b_low << 16) + tl.maximum(b_code - 1, 0) * step_of(b_low, b_high, KIND)
    b_root = tl.where(b_code > 0, b_bits.to(tl.float32, bitcast=True), 0.0)
    return b_root * b_root, b_root


@triton.jit
def load_first(
    p_codes, p_bounds, o_code, o_x, i_g, o_e, m_e, b_root,
    KIND: tl.constexpr, ROOTED: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """m [R, 128]; b_root: that of v, if m is held relative to it."""
    if KIND == FP32:
        return tl.load(p_codes + o_x, mask=m_e, other=0.0)
    b_code = load_codes(p_codes, o_code, o_e, m_e, KIND)
    if KIND == EXPANDED8:
        b_low, b_high = bounds_of(p_bounds, i_g, m_e)
        return expanded_load(b_code, b_low, b_high, FUSED)
    MOST: tl.constexpr = 381.0 if KIND == SOFTSIGN8 else 21.0
    if KIND == SOFTSIGN4:
        b_code = (b_code ^ 8) - 8
    b_scale = bf16_value(tl.load(p_bounds + i_g, mask=some(m_e), other=0))
    b_c = b_code.to(tl.float32)
    b_m = b_scale * tl.div_rn(b_c + b_c, MOST - tl.abs(b_c))
    return b_m * b_root if ROOTED else b_m


@triton.jit
def store_second(
    b_v, p_codes, p_bounds, o_code, o_x, i_g, o_e, m_e, b_u,
    KIND: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Inverse of `load_second`; returns the stored roots of a log kind. b_u: noise."""
    if KIND == FP32:
        tl.store(p_codes + o_x, b_v, mask=m_e)
        return b_v
    if KIND == NONE:
        return b_v
    if KIND == EXPANDED8:
        expanded_store(b_v, p_codes, p_bounds, o_code, i_g, o_e, m_e, b_u, FUSED)
        return b_v
    STEPS: tl.constexpr = _STEPS8 if KIND == LOG8 else _STEPS4
    m_there = m_e & (b_v > 0)
    b_x = tl.minimum(tl.maximum(b_v, _LEAST), _MOST)
    b_bits = tl.sqrt_rn(b_x).to(tl.int32, bitcast=True)
    b_low = tl.min(tl.where(m_there, b_bits, _HIGHEST), axis=1, keep_dims=True) >> 16
    b_high = (tl.max(tl.where(m_there, b_bits, 0), axis=1, keep_dims=True) + 0xFFFF) >> 16
    b_low = tl.where(b_high > 0, b_low, 0)
    store_bounds(p_bounds, b_low, b_high, i_g, m_e)
    b_step = step_of(b_low, b_high, KIND)
    b_above = (b_bits - (b_low << 16)).to(tl.float32) * tl.div_rn(1.0, b_step.to(tl.float32))
    b_below = tl.minimum(tl.maximum(b_above.to(tl.int32), 0), STEPS - 1)
    b_lower = (b_low << 16) + b_below * b_step
    b_upper = (b_lower + b_step).to(tl.float32, bitcast=True)
    b_lower = b_lower.to(tl.float32, bitcast=True)
    b_least = b_lower * b_lower
    m_up = (b_x - b_least) > b_u * (b_upper * b_upper - b_least)
    b_code = tl.where(m_there, b_below + 1 + m_up.to(tl.int32), 0)
    store_codes(p_codes, b_code, o_code, o_e, m_e, KIND)
    return tl.where(m_there, tl.where(m_up, b_upper, b_lower), 0.0)


@triton.jit
def store_first(
    b_m, p_codes, p_bounds, o_code, o_x, i_g, o_e, m_e, b_root, b_u,
    KIND: tl.constexpr, ROOTED: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Inverse of `load_first`; b_root: the stored root of v."""
    if KIND == FP32:
        tl.store(p_codes + o_x, b_m, mask=m_e)
    elif KIND == EXPANDED8:
        expanded_store(b_m, p_codes, p_bounds, o_code, i_g, o_e, m_e, b_u, FUSED)
    else:
        softsign_store(b_m, p_codes, p_bounds, o_code, i_g, o_e, m_e, b_root, b_u, KIND, ROOTED)


@triton.jit
def softsign_store(
    b_m, p_codes, p_bounds, o_code, i_g, o_e, m_e, b_root, b_u,
    KIND: tl.constexpr, ROOTED: tl.constexpr,
):  # fmt: skip
    if ROOTED:
        b_m = tl.where(b_root > 0, tl.div_rn(b_m, tl.where(b_root > 0, b_root, 1.0)), 0.0)
    b_size = tl.abs(b_m)
    b_most = tl.max(tl.where(m_e, b_size, 0.0), axis=1, keep_dims=True)
    b_bound = bf16_directed(b_most, UP=True)
    b_bound = tl.where(bf16_value(b_bound) < 1e-36, 0, b_bound)
    tl.store(p_bounds + i_g, b_bound.to(tl.int16), mask=some(m_e))
    b_scale = bf16_value(b_bound)
    m_some = b_scale > 0
    b_over = tl.where(m_some, (b_scale + b_scale) + b_size, 1.0)
    if KIND == SOFTSIGN8:
        b_place = tl.where(m_some, tl.div_rn(b_m * 381.0, b_over), 0.0)
        b_before = load_codes(p_codes, o_code, o_e, m_e, KIND).to(tl.float32)
        b_place += tl.where(tl.abs(b_place - b_before) < _SLOW, b_u - 0.5, 0.0)
        b_code = ((b_place + _MAGIC) - _MAGIC).to(tl.int32)
    else:
        b_place = tl.where(m_some, tl.div_rn(b_size * 21.0, b_over), 0.0)
        b_below = tl.minimum(tl.maximum(b_place.to(tl.int32), 0), 6)
        b_lower = b_scale * tl.div_rn((2 * b_below).to(tl.float32), (21 - b_below).to(tl.float32))
        b_upper = (2 * b_below + 2).to(tl.float32)
        b_upper = b_scale * tl.div_rn(b_upper, (20 - b_below).to(tl.float32))
        b_code = b_below + ((b_size - b_lower) > b_u * (b_upper - b_lower)).to(tl.int32)
        b_code = tl.where(b_m < 0, -b_code, b_code) & 15
    store_codes(p_codes, b_code, o_code, o_e, m_e, KIND)


@triton.jit
def expanded_load(b_code, b_low, b_high, FUSED: tl.constexpr):
    b_magnitude = b_code & 127
    b_small = b_magnitude.to(tl.float32).to(tl.int32, bitcast=True)
    b_bits = tl.where(b_magnitude < 8, b_small, (b_magnitude << 20) + (129 << 23))
    b_f = (b_bits & 0x7FFFFF).to(tl.float32) * (2.0**-23)
    b_line = (b_bits - (127 << 23)).to(tl.float32) * (2.0**-23)
    b_octaves = fma(polynomial(b_f, "bend", FUSED), b_f, b_line, FUSED)
    b_z = tl.where(b_magnitude > 0, b_octaves, 0.0) * (range_of(b_low, b_high) * _PER_OCTAVES)
    b_size = tl.where(b_magnitude > 0, exp2_from(b_z, b_low, FUSED), 0.0)
    return tl.where(b_code > 127, -b_size, b_size)


@triton.jit
def expanded_store(b_x, p_codes, p_bounds, o_code, i_g, o_e, m_e, b_u, FUSED: tl.constexpr):
    b_size = tl.abs(b_x)
    m_there = m_e & (b_size > 0)
    b_size = tl.minimum(tl.maximum(b_size, _LEAST), _MOST)
    b_least = tl.min(tl.where(m_there, b_size, _MOST), axis=1, keep_dims=True)
    b_most = tl.max(tl.where(m_there, b_size, _LEAST), axis=1, keep_dims=True)
    m_some = tl.max(m_there.to(tl.int32), axis=1, keep_dims=True) > 0
    b_low = whole_below(log2_above(b_least, 0.0, FUSED) * 256)
    b_high = -whole_below(log2_above(b_most, 0.0, FUSED) * -256)
    b_low = tl.where(m_some, tl.minimum(tl.maximum(b_low, _FLOOR), _CEILING), 0)
    b_high = tl.where(m_some, tl.minimum(tl.maximum(b_high, _FLOOR), _CEILING), 0)
    b_low = tl.maximum(b_low, b_high - _MOST_RANGE)
    store_bounds(p_bounds, b_low, b_high, i_g, m_e)
    b_width = range_of(b_low, b_high)
    b_k = tl.div_rn(tl.full(b_width.shape, _OCTAVES, tl.float32), b_width)
    b_z = log2_above(b_size, b_low.to(tl.float32) * (1 / 256), FUSED) * b_k
    b_place, b_ratio = e4m3_place(tl.minimum(tl.maximum(b_z, 0.0), _OCTAVES), FUSED)
    b_before = (load_codes(p_codes, o_code, o_e, m_e, EXPANDED8) & 127).to(tl.float32)
    b_f = b_place - b_place.to(tl.int32).to(tl.float32)
    b_bend = tl.minimum((b_width * _PER_OCTAVES - 1.0) * 0.5, 1.0)
    b_bend = tl.div_rn(tl.broadcast_to(b_bend, b_ratio.shape), b_ratio)
    b_draw = (b_u - 0.5) - (b_f * (1.0 - b_f)) * b_bend
    b_place += tl.where(tl.abs(b_place - b_before) < _SLOW, b_draw, 0.0)
    b_code = ((b_place + _MAGIC) - _MAGIC).to(tl.int32)
    b_code = tl.where(m_there, b_code | tl.where(b_x < 0, 128, 0), 0)
    store_codes(p_codes, b_code, o_code, o_e, m_e, EXPANDED8)


@triton.jit
def e4m3_place(b_z, FUSED: tl.constexpr):
    """Returns the place among the codes of y = 2^(z - 9), and y over the step there."""
    b_whole = b_z.to(tl.int32)
    b_more = above_one(b_z - b_whole.to(tl.float32), FUSED)
    b_power = ((b_whole + 127) << 23).to(tl.float32, bitcast=True)
    b_large = b_more * 8 + (8 * b_whole - 16).to(tl.float32)
    b_small = b_more * b_power + b_power
    b_place = tl.minimum(tl.where(b_whole < 3, b_small, b_large), 126.0)
    return b_place, tl.where(b_whole < 3, b_small, b_more * 8 + 8)


@triton.jit
def step_of(b_low, b_high, KIND: tl.constexpr):
    """Returns the step from one level to the next, in bits."""
    STEPS: tl.constexpr = _STEPS8 if KIND == LOG8 else _STEPS4
    return (tl.maximum((b_high - b_low) << 16, STEPS) + STEPS - 1) // STEPS


@triton.jit
def range_of(b_low, b_high):
    """Returns the range between two bounds, in octaves."""
    return tl.maximum((b_high - b_low).to(tl.float32) * (1 / 256), _LEAST_RANGE)


@triton.jit
def some(m_e):
    """Returns which groups have any element: [R, 1]."""
    return tl.max(m_e.to(tl.int32), axis=1, keep_dims=True) > 0


@triton.jit
def bounds_of(p_bounds, i_g, m_e):
    m_g = some(m_e)
    b_low = tl.load(p_bounds + 2 * i_g, mask=m_g, other=0).to(tl.int32)
    return b_low, tl.load(p_bounds + 2 * i_g + 1, mask=m_g, other=0).to(tl.int32)


@triton.jit
def store_bounds(p_bounds, b_low, b_high, i_g, m_e):
    m_g = some(m_e)
    tl.store(p_bounds + 2 * i_g, b_low.to(tl.int16), mask=m_g)
    tl.store(p_bounds + 2 * i_g + 1, b_high.to(tl.int16), mask=m_g)


@triton.jit
def load_codes(p_codes, o_code, o_e, m_e, KIND: tl.constexpr):
    """int32, 0 beyond the end."""
    if KIND == LOG4 or KIND == SOFTSIGN4:
        b_byte = tl.load(p_codes + o_code + o_e // 2, mask=m_e, other=0).to(tl.int32)
        return (b_byte >> ((o_e % 2) * 4)) & 15
    return tl.load(p_codes + o_code + o_e, mask=m_e, other=0).to(tl.int32)


@triton.jit
def store_codes(p_codes, b_code, o_code, o_e, m_e, KIND: tl.constexpr):
    if KIND == LOG4 or KIND == SOFTSIGN4:
        R: tl.constexpr = m_e.shape[0]
        b_code = tl.where(m_e, b_code, 0)
        b_even, b_odd = tl.split(tl.reshape(b_code, [R, GROUP // 2, 2]))
        m_even, _ = tl.split(tl.reshape(m_e.to(tl.int32), [R, GROUP // 2, 2]))
        o_byte = o_code + tl.arange(0, GROUP // 2)[None, :]
        tl.store(p_codes + o_byte, (b_even | (b_odd << 4)).to(tl.uint8), mask=m_even > 0)
    else:
        tl.store(p_codes + o_code + o_e, b_code.to(p_codes.dtype.element_ty), mask=m_e)
