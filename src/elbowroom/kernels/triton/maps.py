"""Blocks and ranges of maps (`kernels/maps.py`): means, extremes, and whose an element is.

Extremes of a range meet in memory, by atomics on integers that sort as floats do, so that the order
in which programs end cannot matter.
"""

import triton
import triton.language as tl

from elbowroom.kernels.triton.device import (
    LARGEST,
    NAN_BF16,
    TILE,
    bf16_directed,
    bf16_nearest,
    bf16_value,
    load_float,
    program_tiles,
)


@triton.constexpr_function
def halvings(wide):
    return wide.bit_length() - 1


@triton.jit
def sorted_bits(b_x):
    """float32 -> an int32 that sorts as it does, and back (its own inverse) from int32 bits."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def sum_blocks(
    p_x, p_mean, p_edges, ranges, rows, columns, inner, down, across, spans, spans_inner, items,
    tall, broad, lines, per,
    HIGH: tl.constexpr, WIDE: tl.constexpr, K: tl.constexpr, J: tl.constexpr, KIND: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Means of K blocks side by side, J channels of each, in R places; the edges of x - mean."""
    PART: tl.constexpr = 1 / (HIGH * WIDE)
    i_w = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None, None, None]
    o_i = (i_w % spans_inner) * J + tl.arange(0, J)[None, None, None, :]  # channel
    i_s = i_w // spans_inner
    o_k = (i_s % spans) * K + tl.arange(0, K)[None, :, None, None]  # block in its row of blocks
    i_s = i_s // spans
    o_c = o_k * WIDE + tl.arange(0, WIDE)[None, None, :, None]  # column
    r, i_o = (i_s % down) * HIGH, i_s // down  # [R, 1, 1, 1]
    m_c = (i_w < items) & (o_c < columns) & (o_i < inner)  # [R, K, WIDE, J]
    p_x += ((i_o * rows + r) * columns + o_c) * inner + o_i
    b_total = tl.zeros([R, K, WIDE, J], tl.float32)
    b_least = tl.full([R, K, WIDE, J], float("inf"), tl.float32)
    b_most = tl.full([R, K, WIDE, J], float("-inf"), tl.float32)
    m_bad = tl.zeros([R, K, WIDE, J], tl.int32)
    for k in tl.static_range(HIGH):
        m_e = m_c & (r + k < rows)
        b_x = load_float(p_x, m_e, KIND)
        b_total += b_x * PART
        b_least = tl.where(m_e & (b_x < b_least), b_x, b_least)
        b_most = tl.where(m_e & (b_x > b_most), b_x, b_most)
        m_bad |= (m_e & ~(tl.abs(b_x) < LARGEST)).to(tl.int32)
        p_x += columns.to(tl.int64) * inner
    for k in tl.static_range(halvings(WIDE)):
        b_pairs = tl.reshape(b_total, [R, K, 2, WIDE >> (k + 1), J])
        b_left, b_right = tl.split(tl.permute(b_pairs, [0, 1, 3, 4, 2]))
        b_total = b_left + b_right
    b_total = tl.reshape(b_total, [R, K, 1, J])
    b_least = tl.min(b_least, axis=2, keep_dims=True)
    b_most = tl.max(b_most, axis=2, keep_dims=True)
    m_bad = tl.max(m_bad, axis=2, keep_dims=True) != 0
    b_held = tl.minimum(rows - r, HIGH) * tl.minimum(columns - o_k * WIDE, WIDE)
    b_held = tl.maximum(b_held, 1).to(tl.float32) * PART
    b_means = bf16_nearest(tl.div_rn(b_total, b_held))
    m_k = (i_w < items) & (o_k < across) & (o_i < inner)  # [R, K, 1, J]
    tl.store(p_mean + (i_s * across + o_k) * inner + o_i, b_means.to(tl.int16), mask=m_k)

    b_mean = bf16_value(b_means)
    b_mean = tl.where(m_bad, 0.0, b_mean)  # it may be Inf or NaN
    b_low = tl.where(m_bad, -0x80000000, sorted_bits(b_least - b_mean)).to(tl.int32)
    b_high = tl.where(m_bad, 0x7FFFFFFF, sorted_bits(b_most - b_mean)).to(tl.int32)
    i_r = ((i_o * lines + (i_s % down) // tall) * per + o_k // broad) * inner + o_i
    tl.atomic_min(p_edges + i_r, b_low, mask=m_k, sem="relaxed")
    tl.atomic_max(p_edges + ranges + i_r, b_high, mask=m_k, sem="relaxed")


@triton.jit
def finish_ranges(p_edges, p_scale, p_low, N, LEVELS: tl.constexpr, R: tl.constexpr):
    """Edges of ranges -> scale and low."""
    i_t, n = program_tiles(N, R)
    o_e = tl.arange(0, TILE)[None, :]
    m_e, o_e = o_e < n[:, None], (i_t * TILE)[:, None] + o_e
    b_low = tl.load(p_edges + o_e, mask=m_e, other=0)
    b_high = tl.load(p_edges + N + o_e, mask=m_e, other=0)
    m_usable = (b_low != -0x80000000) & (b_high != 0x7FFFFFFF)
    b_least = tl.where(m_usable, b_low ^ ((b_low >> 31) & 0x7FFFFFFF), 0)
    b_most = tl.where(m_usable, b_high ^ ((b_high >> 31) & 0x7FFFFFFF), 0)
    b_lows = bf16_directed(b_least.to(tl.float32, bitcast=True), UP=False)
    b_width = b_most.to(tl.float32, bitcast=True) - bf16_value(b_lows)
    b_scales = bf16_directed(b_width * (1 / (LEVELS - 1)), UP=True)
    tl.store(p_low + o_e, b_lows.to(tl.int16), mask=m_e)
    tl.store(p_scale + o_e, tl.where(m_usable, b_scales, NAN_BF16).to(tl.int16), mask=m_e)


@triton.jit
def elements(i_t, o_e, m_e, SHORT: tl.constexpr):
    """The places of elements o_e of tiles i_t in the tensor, 0 where masked.

    Of 32 bits where they do: an element costs up to seven divisions.
    """
    o_x = tl.where(m_e, i_t * TILE + o_e, 0)
    return o_x.to(tl.int32) if SHORT else o_x


@triton.jit
def cells_of(o_x, rows, columns, inner, high, wide, down, across, tall, broad, lines, per):
    """The block and the range of elements o_x of the tensor."""
    o_p = o_x // inner
    o_line = o_p // columns
    o_i, o_c = o_x - o_p * inner, o_p - o_line * columns
    i_o = o_line // rows
    o_r = o_line - i_o * rows
    o_block = ((i_o * down + o_r // high) * across + o_c // wide) * inner + o_i
    o_range = ((i_o * lines + o_r // tall) * per + o_c // broad) * inner + o_i
    return o_block, o_range
