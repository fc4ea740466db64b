"""Floats as their bits, rounded to bf16 and float16 (specification: `reference/rounding.py`).

Floats are compared as integers (`order`): an integer minimum is a vector instruction without
fastmath, and NaN and Inf sort outside all finite numbers, so one comparison at the end tells
whether a slice held any.
"""

import numpy as np

from elbowroom.kernels.numba.compiled import counted, f32, i32, inlined, jit

HUGE = i32(0x7E000000)  # the bits of 2^125: see LARGEST in the reference
SMALLEST = f32(1e-36)
TOP = i32(0x7FFFFFFF)
BOTTOM = i32(-0x80000000)


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


@counted
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


@counted
def target(out, kind, spare):
    """Returns where float32 values for `out` are written: out itself if it is float32, else spare.

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


@inlined
def inverse(x):
    return f32(0) if x < SMALLEST else f32(f32(1) / x)
