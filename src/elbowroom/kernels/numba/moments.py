"""Optimizer states of a run of groups of up to 128 (specification: `reference/moments.py`).

A run is up to 8 groups, whose float32 values lie one after the other in scratch. Bounds of all its
groups come first, then codes: the chain from a group's extremes to its step is long (80 ns), and
chains of several groups overlap. `codes` and `bounds` are those of a whole state; `places` [groups,
4] says where a group begins: in scratch, in m's and v's codes, and its size. Places, not slices: a
slice counts a reference, and two threads that count on one array made a group take 1.8 us, five
times its arithmetic. They are unsigned, as an index that may be negative keeps a loop scalar.

A kind is an integer, its place in `KINDS`: a branch that never changes within a call.
"""

import numpy as np

from elbowroom.kernels.numba.compiled import f32, i32, inlined, leaf, u8, u64
from elbowroom.kernels.numba.powers import exp2_from, log2_above, part_of
from elbowroom.kernels.numba.rounding import TOP, as_bits, as_float, bf16_directed, bf16_value
from elbowroom.kernels.states import (
    CEILING,
    E4M3_OCTAVES,
    FLOOR,
    KINDS,
    LEAST,
    LEAST_RANGE,
    MOST,
    OCTAVES,
    STEPS,
)

NONE, FP32, SOFTSIGN8, EXPANDED8, LOG8, LOG4, SOFTSIGN4 = range(len(KINDS))
_STEPS8, _STEPS4 = STEPS["log8"], STEPS["log4"]
_LEAST, _MOST = f32(LEAST), f32(MOST)
_LEAST_BITS, _MOST_BITS = i32(_LEAST.view(np.int32)), i32(_MOST.view(np.int32))
_OCTAVES, _PER_OCTAVES, _LEAST_RANGE = f32(OCTAVES), f32(1 / OCTAVES), f32(LEAST_RANGE)
_E4M3 = np.array(E4M3_OCTAVES, np.float32)
_MAGIC = f32(12582912)  # adding it rounds to an integer, ties to even
_FP8_MAGIC_BITS = i32((127 - 7 + 1 + 23 - 3) << 23)  # and this to 2^-9
_FP8_MAGIC = f32(_FP8_MAGIC_BITS.view(np.float32))
_FP8_NORMAL, _FP8_REBIAS = i32((127 - 7 + 1) << 23), i32((127 - 7) << 23)


@inlined
def nearest(x):
    return i32((x + _MAGIC) - _MAGIC)


@leaf
def softsign_load(codes, at, bounds, b, root, rooted, m, s, n):
    """m [n] from s on <- codes (int8 as uint8), bounds; root [n]."""
    scale = bf16_value(bounds[b])
    for o in range(n):
        code = f32(np.int8(codes[at + o]))
        m[s + o] = scale * ((code + code) / (f32(381) - abs(code)))
    if rooted:
        for o in range(n):
            m[s + o] = m[s + o] * root[s + o]


@leaf
def softsign4_load(codes, bounds, b, root, rooted, m, s, n):
    """m [n] <- codes [n] int32 below 16, bounds; root [n]."""
    scale = bf16_value(bounds[b])
    for o in range(n):
        code = f32(i32(i32(codes[s + o] ^ i32(8)) - i32(8)))
        m[s + o] = scale * ((code + code) / (f32(21) - abs(code)))
    if rooted:
        for o in range(n):
            m[s + o] = m[s + o] * root[s + o]


@leaf
def softsign_bounds(m, root, rooted, s, n, bounds, b):
    """m [n] <- m / root; its bound."""
    if rooted:
        for o in range(n):
            r = m[s + o] / root[s + o]
            m[s + o] = r if root[s + o] > f32(0) else f32(0)
    most = i32(0)
    for o in range(n):
        most = max(most, as_bits(m[s + o]) & TOP)
    scale = bf16_directed(as_float(most), True)
    bounds[b] = i32(0) if bf16_value(scale) < f32(1e-36) else scale


@leaf
def softsign_store(m, s, n, codes, at, bounds, b):
    """Codes <- m [n], already divided by its root."""
    scale = bf16_value(bounds[b])
    twice = f32(scale + scale) if scale > f32(0) else f32(np.inf)
    for o in range(n):
        codes[at + o] = u8(nearest((m[s + o] * f32(381)) / (twice + abs(m[s + o]))))


@leaf
def softsign4_store(m, u, s, n, bounds, b, codes):
    """Codes [n] int32 below 16 <- m [n], already divided by its root, u [n]."""
    scale = bf16_value(bounds[b])
    twice = f32(scale + scale) if scale > f32(0) else f32(np.inf)
    for o in range(n):
        size = abs(m[s + o])
        below = min(i32((size * f32(21)) / (twice + size)), i32(6))
        lower = scale * (f32(i32(below + below)) / f32(i32(i32(21) - below)))
        upper = scale * (f32(i32(below + below + i32(2))) / f32(i32(i32(20) - below)))
        up = (size - lower) > u[s + o] * (upper - lower)
        code = i32(below + (i32(1) if up else i32(0)))
        codes[s + o] = i32(i32(-code) if m[s + o] < f32(0) else code) & i32(15)


@leaf
def find_bounds(x, s, n, bounds, b):
    """Two bounds <- log2 of the extremes of abs(x) [n] that are not 0, outward, in 1/256."""
    least, most = _MOST_BITS, i32(0)
    for o in range(n):
        bits = as_bits(x[s + o]) & TOP
        least = min(least, bits if bits > i32(0) else _MOST_BITS)
        most = max(most, bits)
    if most == i32(0):
        bounds[b], bounds[b + u64(1)] = 0, 0
        return
    least, most = max(least, _LEAST_BITS), min(max(most, _LEAST_BITS), _MOST_BITS)
    low = np.floor(log2_above(as_float(least), f32(0)) * f32(256))
    high = np.ceil(log2_above(as_float(most), f32(0)) * f32(256))
    bounds[b] = min(max(i32(low), i32(FLOOR)), i32(CEILING))
    bounds[b + u64(1)] = min(max(i32(high), i32(FLOOR)), i32(CEILING))


@leaf
def find_root_bounds(v, s, n, bounds, b):
    """Two bounds <- bf16 below and above the roots of what is not 0 in v [n]."""
    least, most = _MOST_BITS, i32(0)
    for o in range(n):
        bits = as_bits(v[s + o])
        least = min(least, bits if bits > i32(0) else _MOST_BITS)
        most = max(most, bits)
    low = np.sqrt(as_float(max(least, _LEAST_BITS)))
    high = np.sqrt(as_float(min(max(most, _LEAST_BITS), _MOST_BITS)))
    there = most > i32(0)
    bounds[b] = as_bits(low) >> i32(16) if there else i32(0)
    bounds[b + u64(1)] = i32(as_bits(high) + i32(0xFFFF)) >> i32(16) if there else i32(0)


@inlined
def step_of(bounds, b, steps):
    """In bits, from a level to the next."""
    wide = i32(i32(i32(bounds[b + u64(1)]) - i32(bounds[b])) << i32(16))
    return i32((max(wide, i32(steps)) + steps - 1) // steps)


@inlined
def range_of(bounds, b):
    low, high = i32(bounds[b]), i32(bounds[b + u64(1)])
    return max(f32(i32(high - low)) * f32(1 / 256), _LEAST_RANGE)


@leaf
def log_load(codes, bounds, b, step, v, root, s, n):
    """v, root [n] <- codes [n] int32."""
    low = i32(i32(bounds[b]) << i32(16))
    for o in range(n):
        code = codes[s + o]
        bits = i32(low + i32(max(i32(code - i32(1)), i32(0)) * step))
        r = as_float(bits if code > i32(0) else i32(0))
        root[s + o] = r
        v[s + o] = r * r


@leaf
def log_store(v, u, s, n, bounds, b, step, steps, codes, root):
    """Codes int32, root [n] <- v, u [n]."""
    low = i32(i32(bounds[b]) << i32(16))
    per, last = f32(1) / f32(step), i32(steps - 1)
    for o in range(n):
        x = min(max(v[s + o], _LEAST), _MOST)
        above = i32(as_bits(np.sqrt(x)) - low)
        below = min(max(i32(f32(above) * per), i32(0)), last)
        bits = i32(low + i32(below * step))
        lower, upper = as_float(bits), as_float(i32(bits + step))
        lo, hi = lower * lower, upper * upper
        up = (x - lo) > u[s + o] * (hi - lo)
        code = i32(below + (i32(2) if up else i32(1)))
        r = upper if up else lower
        there = v[s + o] > f32(0)
        codes[s + o] = code if there else i32(0)
        root[s + o] = r if there else f32(0)


@leaf
def expanded_load(codes, at, bounds, b, x, s, n):
    """x [n] <- codes, bounds."""
    low = i32(bounds[b])
    part, whole = part_of(low, 8), i32(low >> i32(8))
    per_k = range_of(bounds, b) * _PER_OCTAVES
    for o in range(n):
        code = i32(codes[at + o])
        size = exp2_from(_E4M3[u64(code & i32(127))] * per_k, part, whole)
        bits = as_bits(size) | i32(i32(code & i32(128)) << i32(24))
        x[s + o] = as_float(bits if (code & i32(127)) > i32(0) else i32(0))


@leaf
def expanded_store(x, s, n, codes, at, bounds, b):
    """Codes <- x [n], bounds."""
    k = _OCTAVES / range_of(bounds, b)
    level = f32(bounds[b]) * f32(1 / 256)
    for o in range(n):
        size = abs(x[s + o])
        above = log2_above(min(max(size, _LEAST), _MOST), level)
        z = min(max(above * k, f32(0)), _OCTAVES)
        value = min(exp2_from(z, f32(0), i32(-9)), f32(448))
        bits = as_bits(value)
        small = i32(as_bits(value + _FP8_MAGIC) - _FP8_MAGIC_BITS)
        even = i32(i32(bits >> i32(20)) & i32(1))
        normal = i32(i32(i32(bits - _FP8_REBIAS) + i32(i32(0x7FFFF) + even)) >> i32(20))
        code = small if bits < _FP8_NORMAL else normal
        sign = i32(as_bits(x[s + o]) >> i32(24)) & i32(128)
        codes[at + o] = u8(code | sign) if size > f32(0) else u8(0)


@leaf
def widen(codes, at, kind, spare, s, n):
    """spare [n] int32 <- the codes of a group, a byte or half a byte each."""
    if kind == LOG8:
        for o in range(n):
            spare[s + o] = i32(codes[at + o])
        return
    for o in range(n >> u64(1)):
        pair = i32(codes[at + o])
        spare[s + (o << u64(1))] = pair & i32(15)
        spare[s + (o << u64(1)) + u64(1)] = pair >> i32(4)
    if n & u64(1):
        spare[s + n - u64(1)] = i32(codes[at + (n >> u64(1))])


@leaf
def narrow(spare, s, n, kind, codes, at):
    """The inverse."""
    if kind == LOG8:
        for o in range(n):
            codes[at + o] = u8(spare[s + o])
        return
    for o in range(n >> u64(1)):
        two = s + (o << u64(1))
        codes[at + o] = u8(spare[two] | i32(spare[two + u64(1)] << i32(4)))
    if n & u64(1):
        codes[at + (n >> u64(1))] = u8(spare[s + n - u64(1)])


@leaf
def load_second(kind, state, bounds, b, places, count, v, root, spare):
    """v and, for a log kind, root <- a run's codes and bounds."""
    steps = _STEPS8 if kind == LOG8 else _STEPS4
    for i in range(count):
        s, at, n = places[i, 0], places[i, 2], places[i, 3]
        if kind == EXPANDED8:
            expanded_load(state, at, bounds, b, v, s, n)
        elif kind in (LOG8, LOG4):
            widen(state, at, kind, spare, s, n)
            log_load(spare, bounds, b, step_of(bounds, b, steps), v, root, s, n)
        b += u64(2)


@leaf
def store_second(kind, v, u, state, bounds, b, places, count, root, spare):
    """The inverse."""
    if kind == NONE:
        return
    for i in range(count):
        if kind == EXPANDED8:
            find_bounds(v, places[i, 0], places[i, 3], bounds, b + (i << u64(1)))
        else:
            find_root_bounds(v, places[i, 0], places[i, 3], bounds, b + (i << u64(1)))
    steps = _STEPS8 if kind == LOG8 else _STEPS4
    for i in range(count):
        s, at, n = places[i, 0], places[i, 2], places[i, 3]
        if kind == EXPANDED8:
            expanded_store(v, s, n, state, at, bounds, b)
        else:
            step = step_of(bounds, b, steps)
            log_store(v, u, s, n, bounds, b, step, steps, spare, root)
            narrow(spare, s, n, kind, state, at)
        b += u64(2)


@leaf
def load_first(kind, state, bounds, b, places, count, root, rooted, m, spare):
    """m <- a run's codes and bounds; root: that of v, if m is held relative to it."""
    for i in range(count):
        s, at, n = places[i, 0], places[i, 1], places[i, 3]
        if kind == EXPANDED8:
            expanded_load(state, at, bounds, b + (i << u64(1)), m, s, n)
        elif kind == SOFTSIGN4:
            widen(state, at, kind, spare, s, n)
            softsign4_load(spare, bounds, b + i, root, rooted, m, s, n)
        else:
            softsign_load(state, at, bounds, b + i, root, rooted, m, s, n)


@leaf
def store_first(kind, m, u, root, rooted, state, bounds, b, places, count, spare):
    """The inverse. m is lost."""
    for i in range(count):
        s, at, n = places[i, 0], places[i, 1], places[i, 3]
        if kind == EXPANDED8:
            find_bounds(m, s, n, bounds, b + (i << u64(1)))
        else:
            softsign_bounds(m, root, rooted, s, n, bounds, b + i)
    for i in range(count):
        s, at, n = places[i, 0], places[i, 1], places[i, 3]
        if kind == EXPANDED8:
            expanded_store(m, s, n, state, at, bounds, b + (i << u64(1)))
        elif kind == SOFTSIGN8:
            softsign_store(m, s, n, state, at, bounds, b + i)
        else:
            softsign4_store(m, u, s, n, bounds, b + i, spare)
            narrow(spare, s, n, kind, state, at)
