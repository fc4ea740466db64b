"""The pieces that the kernels are made of.

    R  tiles of a program   G  groups of a tile   S  elements of a group   N  elements of the tensor
    n  elements of a tile, TILE but for the last [R]    e  an element's place in its tile

Two things are not left to the compiler. bf16 is read and written as its bits: directed rounding
needs them anyway, and Triton's interpreter rounds wrongly (3.7). Division is `div_rn`: a plain `/`
is approximate on NVIDIA. What a comparison of two scalars masks is chosen by `tl.where`, and not by
`&`: Triton's interpreter takes such a comparison for a number (3.9).
"""

import triton
import triton.language as tl

from elbowroom.kernels import layout

TILE = tl.constexpr(layout.TILE)
LARGEST = tl.constexpr(2.0**125)
SMALLEST = tl.constexpr(1e-36)
NAN_BF16 = tl.constexpr(0x7FC0)


@triton.jit
def program_tiles(N, R: tl.constexpr):
    """The tiles of this program, and how many elements each has: [R] int64, [R] int32."""
    i_t = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    return i_t, tl.minimum(tl.maximum(N - i_t * TILE, 0), TILE).to(tl.int32)


@triton.jit
def group_elements(S: tl.constexpr):
    """e by group: [1, G, S]."""
    G: tl.constexpr = TILE // S
    return (tl.arange(0, G)[:, None] * S + tl.arange(0, S)[None, :])[None, :, :]


@triton.jit
def tile_payload(p_payload, p_spill, p_starts, i_t, m, C, MOST):
    """Returns where the payloads of tiles i_t lie, and whether all of each is there.

    A tile that does not end within the C bytes of the payload is in the spill, if there is one
    (reference/spill.py). MOST: bytes that no tile exceeds. m: which tiles exist.
    """
    b_start = tl.load(p_starts + i_t, mask=m, other=0)
    m_there = tl.load(p_starts + i_t + 1, mask=m, other=0) <= C
    p_tile = p_payload + b_start
    if p_spill is not None:
        p_tile = tl.where(m_there, p_tile, p_spill + (b_start - C + MOST))
        m_there = b_start >= 0
    return p_tile, m_there


@triton.jit
def places(m_e):
    """Where the j-th element that is set in m_e [TILE] lies [TILE], and how many are set.

    Beyond their number, places are any. The inclusive count of the set elements does not fall, so
    each place is searched for by halves: 11 gathers. With a histogram of as many bins as elements
    the whole of `nonzero_quantize` took 2.5 times as long on an H100.
    """
    b_count = tl.cumsum(m_e.to(tl.int32), axis=0)
    o_j = tl.arange(0, TILE)
    b_place = tl.zeros_like(b_count)
    for i in tl.static_range(halvings(TILE)):
        b_before = tl.gather(b_count, b_place + ((TILE >> (i + 1)) - 1), 0)
        b_place += tl.where(b_before <= o_j, TILE >> (i + 1), 0)
    return b_place, tl.max(b_count, axis=0)


@triton.constexpr_function
def halvings(size):
    return size.bit_length() - 1


# --- noise (reference/noise.py) ---


@triton.jit
def mix(b_x):
    b_x = b_x ^ (b_x >> 16)
    b_x = b_x * 0x7FEB352D
    b_x = b_x ^ (b_x >> 15)
    b_x = b_x * 0x846CA68B
    return b_x ^ (b_x >> 16)


@triton.jit
def tile_key(i_t, seed_low, seed_high):
    """The key of a tile: by the halves of a seed, or by both of one that lies at an address."""
    if seed_low.dtype.is_ptr():
        seed = tl.load(seed_low)
        seed_low, seed_high = seed.to(tl.int32), (seed >> 32).to(tl.int32)
    return mix(mix(mix(i_t.to(tl.uint32)) ^ seed_low.to(tl.uint32)) ^ seed_high.to(tl.uint32))


@triton.jit
def whole_below(b_x):
    """Floor as int32, |x| < 2^31: on NVIDIA `tl.floor` takes subnormals for 0 (3.7)."""
    b_whole = b_x.to(tl.int32)
    return b_whole - (b_whole.to(tl.float32) > b_x).to(tl.int32)


@triton.jit
def uniform(b_key, o_e, SIZE: tl.constexpr = TILE):
    """u in (0, 1) of elements `o_e` of the tile, of SIZE elements, with this key."""
    HALF: tl.constexpr = SIZE // 2
    b_word = mix(b_key + (o_e % HALF).to(tl.uint32) * 0x9E3779B9)
    b_half = tl.where(o_e < HALF, b_word & 0xFFFF, b_word >> 16)
    return b_half.to(tl.int32).to(tl.float32) * (1 / 65536) + (0.5 / 65536)


# --- floats (reference/rounding.py) ---


@triton.jit
def bf16_value(b_pattern):
    return (b_pattern.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_nearest(b_x):
    """float32 -> int32 holding the bits of the nearest bf16, ties to even."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    return tl.where(b_x != b_x, NAN_BF16, (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16)


@triton.jit
def bf16_directed(b_x, UP: tl.constexpr):
    """float32 (finite) -> int32 holding the bits of the next bf16 at or above, or at or below."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    away = (b_bits >= 0) if UP else (b_bits < 0)
    return (b_bits >> 16) + (away & ((b_bits & 0xFFFF) != 0)).to(tl.int32)


@triton.jit
def inverse(b_x):
    return tl.where(b_x < SMALLEST, 0.0, tl.div_rn(1.0, tl.where(b_x < SMALLEST, 1.0, b_x)))


@triton.jit
def load_float(p, m, KIND: tl.constexpr):
    """float32 from a float32 (KIND 0), bfloat16 (1, as int16) or float16 (2) tensor, masked 0."""
    b_x = tl.load(p, mask=m, other=0)
    if KIND == 1:
        b_x = bf16_value(b_x)
    return b_x.to(tl.float32)


@triton.jit
def store_float(p, b_x, m, KIND: tl.constexpr):
    if KIND == 1:
        b_x = bf16_nearest(b_x).to(tl.int16)
    tl.store(p, b_x, mask=m)


@triton.jit
def store_restored(p, b_x, m, KIND: tl.constexpr):
    """`store_float`, but where float16's range ends, its largest number is stored, not Inf."""
    if KIND == 2:
        b_x = tl.where(b_x > 65504.0, 65504.0, tl.where(b_x < -65504.0, -65504.0, b_x))
    store_float(p, b_x, m, KIND)


@triton.jit
def extremes(b_x, m_e):
    """Least and most of each group, and whether all are usable (else 0 and 0): [R, G] each."""
    m_g = tl.max((m_e & ~(tl.abs(b_x) < LARGEST)).to(tl.int32), axis=2) == 0
    b_least = tl.min(tl.where(m_e, b_x, float("inf")), axis=2)
    b_most = tl.max(tl.where(m_e, b_x, float("-inf")), axis=2)
    return tl.where(m_g, b_least, 0.0), tl.where(m_g, b_most, 0.0), m_g


# --- codes (reference/codes.py): byte j of a part holds those of e = j, j + n_bytes, ... ---
#
# The arithmetic on constants repeats `layout.py`, which compiled code cannot call;
# tests/contract/test_kernels.py compares the two.


@triton.constexpr_function
def widths(levels):
    """Bits of a code in each run of bytes, lowest last; 0: a byte is a number in base `levels`."""
    bits = max(1, (levels - 1).bit_length())
    return (0,) if levels in (3, 5, 6) else tuple(width for width in (8, 4, 2, 1) if bits & width)


@triton.constexpr_function
def parts(levels):
    """Returns the number of runs of bytes that a tile's codes are stored in."""
    return len(widths(levels))


@triton.constexpr_function
def width(levels, part):
    return widths(levels)[part]


@triton.constexpr_function
def per_byte(levels, part):
    """Codes in a byte."""
    bits = widths(levels)[part]
    return 8 // bits if bits else {3: 5, 5: 3, 6: 3}[levels]


@triton.constexpr_function
def base(levels, part):
    """A byte is a number in this base, one digit a code."""
    bits = widths(levels)[part]
    return 1 << bits if bits else levels


@triton.constexpr_function
def shift(levels, part):
    """Returns the bit of the code from which on a part's bits are taken."""
    return sum(widths(levels)[part + 1 :])


@triton.constexpr_function
def codes_nbytes(levels, n):
    return sum(-(-n // per_byte(levels, part)) for part in range(parts(levels)))


@triton.constexpr_function
def bytes_block(levels, part, n):
    """The power of two that holds a part's bytes of n elements."""
    return 1 << (-(-n // per_byte(levels, part)) - 1).bit_length()


@triton.jit
def part_nbytes(n, LEVELS: tl.constexpr, S: tl.constexpr):
    """Bytes of the ranges and codes of n values, in groups of S."""
    size = 2 * ((n + S - 1) // S)
    for part in tl.static_range(parts(LEVELS)):
        size += (n + per_byte(LEVELS, part) - 1) // per_byte(LEVELS, part)
    return size


@triton.jit
def pack(
    p_x, p_codes, n, b_key, b_low, b_scale, b_place,
    LEVELS: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, o_u=0,
):  # fmt: skip
    """Code whole tiles: p_x, p_codes, n, b_key [R, 1]; b_low, b_scale (1 / step) [R, G].

    Element e is read from p_x + e, or, where b_place [R, TILE] is given, from p_x + b_place[e];
    without p_x, b_place [R, n or more] has the elements themselves.
    Its noise is that of element o_u + e of the tile.
    """
    for part in tl.static_range(parts(LEVELS)):
        pack_part(p_x, p_codes, n, b_key, b_low, b_scale, b_place, LEVELS, part, S, KIND, o_u)
        p_codes += (n + per_byte(LEVELS, part) - 1) // per_byte(LEVELS, part)


@triton.jit
def pack_part(
    p_x, p_codes, n, b_key, b_low, b_scale, b_place,
    LEVELS: tl.constexpr, PART: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, o_u,
):  # fmt: skip
    """One run of bytes. Each reads the elements it holds: a second time, but from the cache."""
    PER: tl.constexpr = per_byte(LEVELS, PART)
    BASE: tl.constexpr = base(LEVELS, PART)
    n_bytes = (n + PER - 1) // PER  # [R, 1]
    o_b = tl.arange(0, bytes_block(LEVELS, PART, TILE))[None, :]
    m_b = o_b < n_bytes  # [R, B]
    b_byte = tl.zeros_like(m_b.to(tl.int32))
    for k in tl.static_range(PER):
        o_e = o_b + k * n_bytes
        m_e = m_b & (o_e < n)
        b_u = uniform(b_key, o_u + o_e)
        b_code = code_at(p_x, o_e, m_e, b_u, b_low, b_scale, b_place, LEVELS, S, KIND)
        b_byte += ((b_code >> shift(LEVELS, PART)) % BASE) * BASE**k
    tl.store(p_codes + o_b, b_byte.to(tl.uint8), mask=m_b)


@triton.jit
def code_at(
    p_x, o_e, m_e, b_u, b_low, b_scale, b_place,
    LEVELS: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """clamp(floor((x - low) * scale + u), 0, LEVELS - 1) as int32, and 0 where masked or NaN."""
    o_real = tl.where(m_e, o_e, 0)
    o_g = o_real // S
    if p_x is None:
        b_x = pick(b_place, o_real)
    else:
        o_x = o_real if b_place is None else pick(b_place, o_real)
        b_x = load_float(p_x + o_x, m_e, KIND)
    b_v = (b_x - pick(b_low, o_g)) * pick(b_scale, o_g) + b_u
    m_v = m_e & (b_v == b_v)
    return tl.minimum(tl.maximum(tl.where(m_v, b_v, 0.0), 0.0), LEVELS - 1.0).to(tl.int32)


@triton.jit
def pick(b_table, o_at):
    """b_table [R, G] at places o_at [R, B] of its rows.

    Flat, because Triton 3.7 cannot compile a gather along a short second axis (R = 1, G = 8).
    """
    R: tl.constexpr = b_table.shape[0]
    G: tl.constexpr = b_table.shape[1]
    B: tl.constexpr = o_at.shape[1]
    o_flat = tl.reshape(o_at + tl.arange(0, R)[:, None] * G, [R * B])
    return tl.reshape(tl.gather(tl.reshape(b_table, [R * G]), o_flat, 0), [R, B])


@triton.jit
def unpack(p_codes, n, o_e, m_e, LEVELS: tl.constexpr):
    """The codes of elements o_e of tiles with n elements, as int32: all arguments broadcast."""
    b_code = tl.zeros_like(m_e.to(tl.int32))
    for part in tl.static_range(parts(LEVELS)):
        b_code |= unpack_part(p_codes, n, o_e, m_e, LEVELS, part) << shift(LEVELS, part)
        p_codes += (n + per_byte(LEVELS, part) - 1) // per_byte(LEVELS, part)
    return b_code


@triton.jit
def unpack_part(p_codes, n, o_e, m_e, LEVELS: tl.constexpr, PART: tl.constexpr):
    PER: tl.constexpr = per_byte(LEVELS, PART)
    WIDTH: tl.constexpr = width(LEVELS, PART)
    n_bytes = (n + PER - 1) // PER
    b_k = tl.zeros_like(m_e.to(tl.int32))  # e // n_bytes, without a division
    for k in tl.static_range(1, PER):
        b_k += (o_e >= k * n_bytes).to(tl.int32)
    b_byte = tl.load(p_codes + (o_e - b_k * n_bytes), mask=m_e, other=0).to(tl.int32)
    if WIDTH > 0:
        return (b_byte >> (b_k * WIDTH)) & ((1 << WIDTH) - 1)
    for k in tl.static_range(1, PER):
        b_byte = tl.where(b_k >= k, b_byte // LEVELS, b_byte)
    return b_byte % LEVELS
