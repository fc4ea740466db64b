"""The pieces of the `comet` kernels: its integers, the form of each block, and where bytes lie.

BB  blocks of a program     o_x [BB, 32]  elements of the tensor     k  codes of a block [BB]
"""

import triton
import triton.language as tl

from elbowroom.kernels.triton.device import (
    TILE,
    bf16_nearest,
    bf16_value,
    load_float,
    tile_key,
    uniform,
)

LARGEST = tl.constexpr(2.0**26)
ZIGZAG = tl.constexpr(0x20)
RAW = tl.constexpr(0x80)


@triton.jit
def noise(o_x, seed_low, seed_high, RANDOM: tl.constexpr):
    if RANDOM:
        return uniform(tile_key(o_x // TILE, seed_low, seed_high), o_x % TILE)
    return tl.full(o_x.shape, 0.5, tl.float32)


@triton.jit
def value_of(b_q, p_grid, o_x, seed_low, seed_high, BACK: tl.constexpr, KIND: tl.constexpr):
    """x~ float32, before it is rounded to the dtype."""
    LEAST: tl.constexpr = 2.0**-24 if KIND == 2 else 2.0**-126
    b_u = noise(o_x, seed_low, seed_high, BACK)
    b_x = (b_q.to(tl.float32) + (0.5 - b_u)) * tl.load(p_grid + 1)
    return tl.where(tl.abs(b_x) < LEAST, LEAST, b_x)


@triton.jit
def element(
    p_x, p_grid, o_x, m_x, seed_low, seed_high,
    NOISE: tl.constexpr, BACK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """q, whether x is not 0, whether its bound does not hold."""
    b_x = load_float(p_x + o_x, m_x, KIND)
    b_v = b_x * tl.load(p_grid + 2) + noise(o_x, seed_low, seed_high, NOISE)
    b_v = tl.where(b_v == b_v, b_v, 0.0)
    b_v = tl.minimum(tl.maximum(b_v, -LARGEST), LARGEST)
    b_q = b_v.to(tl.int32)
    b_q = b_q - (b_q.to(tl.float32) > b_v).to(tl.int32)  # floor
    b_back = value_of(b_q, p_grid, o_x, seed_low, seed_high, BACK, KIND)
    if KIND == 1:
        b_back = bf16_value(bf16_nearest(b_back))
    if KIND == 2:
        b_back = tl.minimum(tl.maximum(b_back, -65504.0), 65504.0).to(tl.float16).to(tl.float32)
    m_some = b_x != 0
    m_held = tl.abs(b_back - b_x) <= tl.load(p_grid)
    return tl.where(m_some & m_held, b_q, 0), m_some, m_some & ~m_held


@triton.jit
def residual(
    p_x, p_grid, o_x, N, rows, columns, inner, seed_low, seed_high,
    NOISE: tl.constexpr, BACK: tl.constexpr, PREDICT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """`element`, with the prediction taken off; 0 where x is 0."""
    m_x = o_x < N
    b_r, m_some, m_bad = element(p_x, p_grid, o_x, m_x, seed_low, seed_high, NOISE, BACK, KIND)
    if PREDICT:
        row = columns * inner
        place = o_x % (rows * row)
        m_left, m_above = m_x & (place % row >= inner), m_x & (place >= row)
        b_q, _, _ = element(
            p_x, p_grid, o_x - inner, m_left, seed_low, seed_high, NOISE, BACK, KIND
        )
        b_r -= b_q
        b_q, _, _ = element(p_x, p_grid, o_x - row, m_above, seed_low, seed_high, NOISE, BACK, KIND)
        b_r -= b_q
        m_both = m_left & m_above
        b_q, _, _ = element(
            p_x, p_grid, o_x - row - inner, m_both, seed_low, seed_high, NOISE, BACK, KIND
        )
        b_r += b_q
    return tl.where(m_some, b_r, 0), m_some, m_bad


@triton.jit
def nbytes(k, width):
    return (k * width + 7) // 8


@triton.jit
def bit_length(b_x):
    """Computes the bit length of what is not negative and below 2^30."""
    b_n = tl.zeros_like(b_x)
    for i in tl.static_range(30):
        b_n += ((b_x >> i) != 0).to(tl.int32)
    return b_n


@triton.jit
def is_filled(b_header):
    return (b_header > RAW) & ((b_header & 64) == 0)


@triton.jit
def measure(b_r, m_some, m_bad, each, ITEM: tl.constexpr, AWARE: tl.constexpr):
    """Headers and the bytes of each block, its bitmap with it: [BB] each."""
    k = tl.sum(m_some.to(tl.int32), axis=1)
    b_top = tl.max((b_r << 1) ^ (b_r >> 31), axis=1)
    m_sign = tl.min(b_r, axis=1) < 0
    b_top = tl.where(m_sign, b_top, b_top >> 1)
    b_sign = m_sign.to(tl.int32) * ZIGZAG
    width = bit_length(b_top)
    m_full = k == each
    b_header = tl.where(m_full, tl.where(width == 0, ZIGZAG, b_sign + width), b_sign + width + 64)
    b_size = nbytes(k, width)
    if not AWARE:
        b_size += tl.where(m_full, 0, 4)
        filled = bit_length(b_top + 1)
        b_other = nbytes(each, filled)
        m_filled = ~m_full & (b_other <= b_size)
        b_header = tl.where(m_filled, RAW + b_sign + filled, b_header)
        b_size = tl.where(m_filled, b_other, b_size)
    m_raw = (tl.max(m_bad.to(tl.int32), axis=1) != 0) | (b_size >= each * ITEM)
    b_header = tl.where(m_raw, RAW, b_header)
    b_size = tl.where(m_raw, each * ITEM, b_size)
    return tl.where(k == 0, 0, b_header), tl.where(k == 0, 0, b_size)


@triton.jit
def block_starts(b_header, k, each, ITEM: tl.constexpr, AWARE: tl.constexpr, R: tl.constexpr):
    """Returns where bitmap and body of each block start in the payload of its tile: [BB] each."""
    PER: tl.constexpr = TILE // 32
    b_body = tl.where(b_header == RAW, each * ITEM, nbytes(k, b_header & 31))
    b_bodies = tl.reshape(b_body, [R, PER])
    b_start = tl.cumsum(b_bodies, axis=1) - b_bodies
    b_bitmap = tl.reshape(((b_header & 64) != 0).to(tl.int32) * 4, [R, PER])
    b_at = tl.cumsum(b_bitmap, axis=1) - b_bitmap
    if not AWARE:
        b_start += tl.sum(b_bitmap, axis=1)[:, None]
    return tl.reshape(b_at, [R * PER]), tl.reshape(b_start, [R * PER])


@triton.jit
def place_of(m_some, m_masked, each):
    """The place of each element among the codes of its block, and whether it has one."""
    o_l = tl.arange(0, 32)[None, :]
    b_some = m_some.to(tl.int32)
    o_rank = tl.where(m_masked[:, None], tl.cumsum(b_some, axis=1) - b_some, o_l)
    return o_rank, tl.where(m_masked[:, None], b_some, (o_l < each[:, None]).to(tl.int32)) != 0


@triton.jit
def store_codes(p_body, b_code, o_rank, m_coded, k, width):
    """Bytes of 8 bits first; then eight codes of what is left make a word, and a word its bytes."""
    whole, rest = width // 8, width % 8  # [BB]
    for i in tl.static_range(3):
        m = m_coded & (i < whole)[:, None]
        b_byte = ((b_code >> (8 * i)) & 255).to(tl.uint8)
        tl.store(p_body[:, None] + i * k[:, None] + o_rank, b_byte, mask=m)
    p_rest, b_size = p_body + whole * k, nbytes(k, rest)
    b_top = (b_code >> (8 * whole)[:, None]).to(tl.int64)
    b_shifted = b_top << ((o_rank % 8) * rest[:, None])
    for i in tl.static_range(4):
        b_word = tl.sum(tl.where(m_coded & (o_rank // 8 == i), b_shifted, 0), axis=1)
        for j in tl.static_range(7):
            o_byte = i * rest + j
            m = (j < rest) & (o_byte < b_size)
            tl.store(p_rest + o_byte, ((b_word >> (8 * j)) & 255).to(tl.uint8), mask=m)


@triton.jit
def load_codes(p_tile, b_body, o_rank, m_coded, k, width, P):
    """Inverse of `store_codes`, [BB, 32]; nothing of a tile is read at P [BB, 1] or beyond."""
    p_tile = p_tile[:, None]
    whole, rest = (width // 8)[:, None], (width % 8)[:, None]
    o_body = b_body[:, None]
    b_code = tl.zeros_like(o_rank)
    for i in tl.static_range(3):
        o_byte = o_body + i * k[:, None] + o_rank
        m = m_coded & (i < whole) & (o_byte < P)
        b_code |= tl.load(p_tile + o_byte, mask=m, other=0).to(tl.int32) << (8 * i)
    o_bit = o_rank * rest
    o_byte = o_body + whole * k[:, None] + o_bit // 8
    m = m_coded & (rest > 0)
    b_low = tl.load(p_tile + o_byte, mask=m & (o_byte < P), other=0).to(tl.int32)
    m = m & (o_bit % 8 + rest > 8) & (o_byte + 1 < P)
    b_high = tl.load(p_tile + o_byte + 1, mask=m, other=0).to(tl.int32)
    b_rest = ((b_low | (b_high << 8)) >> (o_bit % 8)) & ((1 << rest) - 1)
    return b_code | (b_rest << (8 * whole))


@triton.jit
def store_words(p_x, p_body, o_x, m_raw, m_some, ITEM: tl.constexpr, KIND: tl.constexpr):
    """Raw blocks, byte by byte: a payload is not aligned."""
    b_x = tl.load(p_x + o_x, mask=m_raw, other=0)
    b_word = b_x.to(tl.int32, bitcast=True) if KIND == 0 else b_x.to(tl.int16, bitcast=True)
    b_word = tl.where(m_some, b_word, 0)  # -0.0 is 0
    p_word = p_body[:, None] + tl.arange(0, 32)[None, :] * ITEM
    for i in tl.static_range(ITEM):
        tl.store(p_word + i, ((b_word >> (8 * i)) & 255).to(tl.uint8), mask=m_raw)


@triton.jit
def load_words(p_tile, b_body, p_out, o_x, m_raw, P, ITEM: tl.constexpr, KIND: tl.constexpr):
    """Inverse of `store_words`."""
    o_word = b_body[:, None] + tl.arange(0, 32)[None, :] * ITEM
    b_word = tl.zeros_like(o_x).to(tl.int32)
    for i in tl.static_range(ITEM):
        m = m_raw & (o_word + i < P)
        b_word |= tl.load(p_tile[:, None] + o_word + i, mask=m, other=0).to(tl.int32) << (8 * i)
    if KIND == 0:
        tl.store(p_out + o_x, b_word.to(tl.float32, bitcast=True), mask=m_raw)
    elif KIND == 1:
        tl.store(p_out + o_x, b_word.to(tl.int16), mask=m_raw)
    else:
        tl.store(p_out + o_x, b_word.to(tl.int16).to(tl.float16, bitcast=True), mask=m_raw)
