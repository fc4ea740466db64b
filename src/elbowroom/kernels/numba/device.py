"""The pieces that the loops are made of.

Each works on one short slice, in a loop that LLVM can vectorize.

Floats are compared as integers (`order`): an integer minimum is a vector instruction without
fastmath, and NaN and Inf sort outside all finite numbers, so one comparison at the end tells
whether a slice held any. Slices, not offsets: numba checks an index that may be negative, and that
check keeps a loop scalar.
"""

import numba
import numpy as np

u8, u16, u32, u64, i32, f32 = np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.float32

TILE = 2048
SLACK = 16  # codes are packed in whole bytes: up to 7 elements beyond the last are read and written
CHUNK = 16  # tiles a work item of the parallel loop: scratch is allocated once for all of them
HUGE = i32(0x7E000000)  # the bits of 2^125: see LARGEST in the reference
SMALLEST = f32(1e-36)
TOP = i32(0x7FFFFFFF)
BOTTOM = i32(-0x80000000)

jit = numba.njit(cache=True, error_model="numpy", nogil=True)
inlined = numba.njit(inline="always", error_model="numpy")


@inlined
def mix(x):
    x = u32(x ^ (x >> u32(16)))
    x = u32(x * u32(0x7FEB352D))
    x = u32(x ^ (x >> u32(15)))
    x = u32(x * u32(0x846CA68B))
    return u32(x ^ (x >> u32(16)))


@inlined
def tile_key(i_t, seed_low, seed_high):
    return mix(u32(mix(u32(mix(u32(i_t)) ^ seed_low)) ^ seed_high))


@jit
def draw(key, u):
    """u [TILE] <- uniform numbers of this tile."""
    first, second = u[: TILE // 2], u[TILE // 2 :]
    for o in range(TILE // 2):
        word = mix(u32(key + u32(o) * u32(0x9E3779B9)))
        first[o] = f32(i32(word & u32(0xFFFF))) * f32(1 / 65536) + f32(0.5 / 65536)
        second[o] = f32(i32(word >> u32(16))) * f32(1 / 65536) + f32(0.5 / 65536)


@inlined
def order(pattern):
    """Bits of a float32 <-> an int32 that sorts as the float does (its own inverse)."""
    return i32(pattern ^ ((pattern >> i32(31)) & TOP))


@inlined
def as_float(pattern):
    return i32(pattern).view(np.float32)


@inlined
def as_bits(value):
    return f32(value).view(np.int32)


@inlined
def bf16_value(pattern):
    return as_float(i32(pattern) << i32(16))


@inlined
def bf16_nearest(value):
    """float32 -> int16 bits of the nearest bf16, ties to even; NaN stays NaN."""
    bits = as_bits(value)
    if value != value:
        return i32(0x7FC0)
    return i32((bits + i32(0x7FFF) + ((bits >> i32(16)) & i32(1))) >> i32(16))


@inlined
def bf16_directed(value, up):
    """float32 (finite) -> int16 bits of the next bf16 at or beyond it in one direction."""
    bits = as_bits(value)
    cut = i32(bits >> i32(16))  # towards zero
    if bits & i32(0xFFFF):
        negative = bits < i32(0)
        if negative != up:
            cut += i32(1)  # away from zero
    return cut


@inlined
def half_value(pattern):
    """int16 bits of a float16 -> float32."""
    bits = i32(pattern) & i32(0x7FFF)
    sign = (i32(pattern) & i32(0x8000)) << i32(16)
    magnitude = as_float(bits << i32(13)) * f32(
        2.0**112
    )  # rebias the exponent; exact for subnormals too
    magnitude_bits = as_bits(magnitude)
    if bits >= i32(0x7C00):  # Inf, NaN
        magnitude_bits = (bits << i32(13)) | i32(0x7F800000)
    return as_float(magnitude_bits | sign)


@inlined
def half_nearest(value):
    """float32 -> int32 holding the 16 bits of the nearest float16, ties to even."""
    bits = as_bits(value)
    sign = (bits >> i32(16)) & i32(0x8000)
    bits = bits & TOP
    small = as_bits(as_float(bits) + f32(0.5)) - i32(
        0x3F000000
    )  # the adder rounds: below 2^-14 a step is 2^-24
    normal = (bits - i32(0x38000000) + i32(0xFFF) + ((bits >> i32(13)) & i32(1))) >> i32(13)
    result = small if bits < i32(0x38800000) else normal
    if bits >= i32(0x477FF000):  # rounds to 65536 or more
        result = i32(0x7E00) if bits > i32(0x7F800000) else i32(0x7C00)
    return result | sign


@jit
def to_float(source, kind, spare):
    """source [n], words of a float32 (kind 0), bfloat16 (1) or float16 (2) tensor, as float32 [n].

    A float32 source is returned as it is; the others are converted into spare [n].
    """
    if kind == 0:
        return source.view(np.float32)
    if kind == 1:
        for o in range(spare.shape[0]):
            spare[o] = as_float(i32(source[o]) << i32(16))
    else:
        for o in range(spare.shape[0]):
            spare[o] = half_value(source[o])
    return spare


@jit
def target(out, kind, spare):
    """Where float32 values for `out` are written: out itself if it is float32, else spare.

    `from_float` takes them from spare.
    """
    return out.view(np.float32) if kind == 0 else spare


@jit
def from_float(values, kind, out):
    """out [n], words of the kind's dtype <- values [n] float32, rounded to nearest even.

    Nothing is done for kind 0.
    """
    if kind == 1:
        for o in range(out.shape[0]):
            out[o] = bf16_nearest(values[o])
    elif kind == 2:
        for o in range(out.shape[0]):
            out[o] = half_nearest(values[o])


@jit
def from_restored(values, kind, out):
    """`from_float`, but where float16's range ends, its largest number is stored, not Inf."""
    from_float(values, kind, out)
    if kind == 2:
        for o in range(out.shape[0]):
            word = i32(out[o])
            out[o] = word - i32((word & i32(0x7FFF)) == i32(0x7C00))


@jit
def extremes(values, S, least, most):
    """least, most [groups] <- the smallest and the largest of each group of S values [n].

    Both as `order` integers.
    """
    n = values.shape[0]
    patterns = values.view(np.int32)
    rows = patterns[: n - n % S].reshape(n // S, S)
    for i_g in range(n // S):
        low, high = TOP, BOTTOM
        for o in range(S):
            place = order(rows[i_g, o])
            low, high = min(low, place), max(high, place)
        least[i_g], most[i_g] = low, high
    if n % S:
        low, high = TOP, BOTTOM
        for place in patterns[n - n % S :]:
            low, high = min(low, order(place)), max(high, order(place))
        least[n // S], most[n // S] = low, high


@inlined
def finite(least, most):
    """Whether all values between two `order` integers are finite, and within +-2^125."""
    return most < HUGE and least > order(i32(HUGE | BOTTOM))


@inlined
def inverse(x):
    return f32(0) if x < SMALLEST else f32(f32(1) / x)


@inlined
def code_of(x, u, low, scale, top):
    return u8(min(max(i32((x - low) * scale + u), i32(0)), top))


@jit
def quantize(values, u, S, low, scale, top, codes):
    """codes [n] <- clamp(floor((values - low) * scale + u), 0, top), with low and scale [groups].

    A NaN goes anywhere in 0..top. codes has room for SLACK more, which are set to 0.
    """
    n = values.shape[0]
    whole = n - n % S
    b_x, b_u, b_code = (
        values[:whole].reshape(n // S, S),
        u[:whole].reshape(n // S, S),
        codes[:whole].reshape(n // S, S),
    )
    for i_g in range(n // S):
        g_low, g_scale = low[i_g], scale[i_g]
        for o in range(S):
            b_code[i_g, o] = code_of(b_x[i_g, o], b_u[i_g, o], g_low, g_scale, top)
    for o in range(whole, n):
        codes[o] = code_of(values[o], u[o], low[n // S], scale[n // S], top)
    codes[n : n + SLACK] = 0


@jit
def dequantize(codes, u, S, low, step, out):
    """out [n] float32 <- low + step * (codes - u), with low and step [groups]."""
    n = out.shape[0]
    whole = n - n % S
    b_x, b_u, b_code = (
        out[:whole].reshape(n // S, S),
        u[:whole].reshape(n // S, S),
        codes[:whole].reshape(n // S, S),
    )
    for i_g in range(n // S):
        g_low, g_step = low[i_g], step[i_g]
        for o in range(S):
            b_x[i_g, o] = g_low + g_step * (f32(i32(b_code[i_g, o])) - b_u[i_g, o])
    for o in range(whole, n):
        out[o] = low[n // S] + step[n // S] * (f32(i32(codes[o])) - u[o])


@inlined
def code_bits(levels):
    bits = 1
    while (1 << bits) < levels:
        bits += 1
    return bits


@jit
def pack(codes, n, levels, spare, out):
    """out [codes_nbytes] <- codes [n].

    Codes and spare have SLACK entries more; those of codes are 0 beyond n.

    The widths are written out: with constant shifts a loop is one vector pass (6x a loop over
    runtime shifts).
    """
    if levels == 3:
        pack_radix(codes, levels, 5, out)
        return
    if levels == 5 or levels == 6:
        pack_radix(codes, levels, 3, out)
        return
    bits = code_bits(levels)
    start = 0
    for width in (8, 4, 2, 1):
        if bits >= width:
            bits -= width
            n_bytes = (n * width + 7) // 8
            part = codes
            if bits > 0 or start > 0:
                part = spare
                for o in range(codes.shape[0]):
                    spare[o] = (codes[o] >> u8(bits)) & u8((1 << width) - 1)
            pack_width(part, width, out[start : start + n_bytes])
            start += n_bytes


@jit
def pack_width(codes, width, out):
    n = out.shape[0]
    if width == 8:
        for o in range(n):
            out[o] = codes[o]
    elif width == 4:
        a, b = codes[:n], codes[n : 2 * n]
        for o in range(n):
            out[o] = a[o] | b[o] << u8(4)
    elif width == 2:
        a, b, c, d = codes[:n], codes[n : 2 * n], codes[2 * n : 3 * n], codes[3 * n : 4 * n]
        for o in range(n):
            out[o] = a[o] | b[o] << u8(2) | c[o] << u8(4) | d[o] << u8(6)
    else:
        a, b, c, d = codes[:n], codes[n : 2 * n], codes[2 * n : 3 * n], codes[3 * n : 4 * n]
        for o in range(n):
            out[o] = a[o] | b[o] << u8(1) | c[o] << u8(2) | d[o] << u8(3)
        a, b, c, d = (
            codes[4 * n : 5 * n],
            codes[5 * n : 6 * n],
            codes[6 * n : 7 * n],
            codes[7 * n : 8 * n],
        )
        for o in range(n):
            out[o] |= a[o] << u8(4) | b[o] << u8(5) | c[o] << u8(6) | d[o] << u8(7)


@jit
def pack_radix(codes, levels, per, out):
    n = out.shape[0]
    a, b, c = codes[:n], codes[n : 2 * n], codes[2 * n : 3 * n]
    base = u8(levels)
    for o in range(n):
        out[o] = a[o] + b[o] * base + c[o] * u8(base * base)
    if per == 5:
        a, b = codes[3 * n : 4 * n], codes[4 * n : 5 * n]
        for o in range(n):
            out[o] += a[o] * u8(27) + b[o] * u8(81)


@jit
def unpack(packed, levels, codes):
    """codes [n] <- packed [codes_nbytes(levels, n)].

    Codes has SLACK entries more, which are left with anything.
    """
    if levels == 3:
        unpack_radix(packed, 3, 5, codes)
        return
    if levels == 5:
        unpack_radix(packed, 5, 3, codes)
        return
    if levels == 6:
        unpack_radix(packed, 6, 3, codes)
        return
    bits = code_bits(levels)
    n = codes.shape[0] - SLACK
    start = 0
    fresh = True
    for width in (8, 4, 2, 1):
        if bits >= width:
            bits -= width
            n_bytes = (n * width + 7) // 8
            unpack_width(packed[start : start + n_bytes], width, u8(bits), fresh, codes)
            start += n_bytes
            fresh = False


@jit
def unpack_width(packed, width, shift, fresh, codes):
    n = packed.shape[0]
    if fresh and shift == u8(0) and width == 2:  # the common case, in one pass
        a, b, c, d = codes[:n], codes[n : 2 * n], codes[2 * n : 3 * n], codes[3 * n : 4 * n]
        for o in range(n):
            byte = packed[o]
            a[o] = byte & u8(3)
            b[o] = (byte >> u8(2)) & u8(3)
            c[o] = (byte >> u8(4)) & u8(3)
            d[o] = byte >> u8(6)
        return
    mask = u8((1 << width) - 1)
    for k in range(8 // width):
        plane = codes[k * n : (k + 1) * n]
        if fresh:
            for o in range(n):
                plane[o] = ((packed[o] >> u8(k * width)) & mask) << shift
        else:
            for o in range(n):
                plane[o] |= ((packed[o] >> u8(k * width)) & mask) << shift


@inlined
def divided(x, levels):
    """x // levels for a byte x, by multiplication: exact for 3, 5 and 6 (all 256 values tested)."""
    return (
        u8((u16(x) * u16(205)) >> u16(10))
        if levels == 5
        else u8((u16(x) * u16(171)) >> u16(9 if levels == 3 else 10))
    )


@jit
def unpack_radix(packed, levels, per, codes):
    n = packed.shape[0]
    rest = np.empty(n, np.uint8)
    for o in range(n):
        rest[o] = packed[o]
    for k in range(per):
        plane = codes[k * n : (k + 1) * n]
        for o in range(n):
            quotient = divided(rest[o], levels)
            plane[o] = rest[o] - quotient * u8(levels)
            rest[o] = quotient


@inlined
def codes_nbytes(levels, n):
    if levels == 3:
        return (n + 4) // 5
    if levels == 5 or levels == 6:
        return (n + 2) // 3
    bits = code_bits(levels)
    total = 0
    for width in (8, 4, 2, 1):
        if bits >= width:
            bits -= width
            per = 8 // width
            total += (n + per - 1) // per
    return total
