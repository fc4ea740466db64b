"""The DCT of tiles and the mixing of runs (specification: `reference/transform.py`).

A tile is in the registers of one thread: its numbers are as many tensors [R, L], L tiles of each of
R groups, in a tuple by row and column, or by position. Sums are taken in the reference's order, so
that no bit differs.
"""

import triton
import triton.language as tl

from elbowroom.kernels.triton.fdsr_tables import (
    column_of,
    log2,
    row_of,
    span_count,
    span_size,
    span_start,
)


@triton.jit
def coefficients(b_x, B: tl.constexpr):
    """B * B elements -> as many coefficients, both by row and column."""
    return across(across(b_x, B, False), B, False)


@triton.jit
def elements(b_y, B: tl.constexpr):
    """Inverse of `coefficients`."""
    return across(across(b_y, B, True), B, True)


@triton.jit
def across(b_x, B: tl.constexpr, BACK: tl.constexpr):
    """Transform down each column, and turn rows into columns: twice is both ways, and unturned."""
    b_y = ()
    for j in tl.static_range(B):
        b_y = b_y + (inverse_dct(b_x[j::B], B) if BACK else dct(b_x[j::B], B))
    return b_y


@triton.jit
def dct(b_x, B: tl.constexpr):
    """B numbers -> their DCT; a row of it is even or odd, so both halves are folded."""
    b_even, b_odd = (), ()
    for j in tl.static_range(B // 2):
        b_even = b_even + (b_x[j] + b_x[B - 1 - j],)
        b_odd = b_odd + (b_x[j] - b_x[B - 1 - j],)
    b_even = b_even + b_x[B // 2 : B - B // 2]
    b_y = ()
    for i in tl.static_range(B):
        b_y = b_y + (weighted(b_odd if i % 2 else b_even, row_of(B, i)),)
    return b_y


@triton.jit
def inverse_dct(b_y, B: tl.constexpr):
    b_first, b_last = (), ()
    for j in tl.static_range(B // 2):
        b_even = weighted(b_y[::2], column_of(B, j, 0))
        b_odd = weighted(b_y[1::2], column_of(B, j, 1))
        b_first = b_first + (b_even + b_odd,)
        b_last = (b_even - b_odd,) + b_last
    if B % 2:
        b_first = b_first + (weighted(b_y[::2], column_of(B, B // 2, 0)),)
    return b_first + b_last


@triton.jit
def weighted(b_x, WEIGHTS: tl.constexpr):
    """The sum of weights times numbers, added in turn: the order decides the last bit."""
    b_total = WEIGHTS[0] * b_x[0]
    for k in tl.static_range(1, len(WEIGHTS)):
        b_total = b_total + WEIGHTS[k] * b_x[k]
    return b_total


@triton.jit
def mix(b_z, BANDS: tl.constexpr, BACK: tl.constexpr):
    """Numbers by position -> each run turned, but for signs; BACK: the inverse."""
    for i in tl.static_range(span_count(BANDS)):
        b_z = mix_span(b_z, BANDS, span_count(BANDS) - 1 - i if BACK else i)
    return b_z


@triton.jit
def mix_span(b_z, BANDS: tl.constexpr, I: tl.constexpr):
    START: tl.constexpr = span_start(BANDS, I)
    SIZE: tl.constexpr = span_size(BANDS, I)
    b_mixed = hadamard(b_z[START : START + SIZE], SIZE)
    return b_z[:START] + b_mixed + b_z[START + SIZE :]


@triton.jit
def hadamard(b_z, SIZE: tl.constexpr):
    """SIZE numbers, a power of two -> their Walsh-Hadamard transform, which is its own inverse."""
    for k in tl.static_range(log2(SIZE)):
        b_next = ()
        for p in tl.static_range(SIZE):
            if (p >> k) % 2 == 0:
                b_next = b_next + (b_z[p] + b_z[p + (1 << k)],)
            else:
                b_next = b_next + (b_z[p - (1 << k)] - b_z[p],)
        b_z = b_next
    b_scaled = ()
    for p in tl.static_range(SIZE):
        b_scaled = b_scaled + (b_z[p] * SIZE**-0.5,)
    return b_scaled
