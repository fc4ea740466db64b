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
from elbowroom.kernels.numba.lanes import least, most
from elbowroom.kernels.numba.powers import above_one, exp2_from, fma, log2_above, part_of, power_of
from elbowroom.kernels.numba.rounding import TOP, as_bits, as_float, bf16_directed, bf16_value
from elbowroom.kernels.states import (
    BEND,
    CEILING,
    FLOOR,
    KINDS,
    LEAST,
    LEAST_RANGE,
    MOST,
    MOST_RANGE,
    OCTAVES,
    SLOW,
    STEPS,
)

NONE, FP32, SOFTSIGN8, EXPANDED8, LOG8, LOG4, SOFTSIGN4 = range(len(KINDS))
_STEPS8, _STEPS4 = STEPS["log8"], STEPS["log4"]
_LEAST, _MOST = f32(LEAST), f32(MOST)
_LEAST_BITS, _MOST_BITS = i32(_LEAST.view(np.int32)), i32(_MOST.view(np.int32))
_OCTAVES, _PER_OCTAVES, _LEAST_RANGE = f32(OCTAVES), f32(1 / OCTAVES), f32(LEAST_RANGE)
_BEND0, _BEND1, _BEND2, _BEND3 = (f32(c) for c in BEND)
_SLOW = f32(SLOW)
_MAGIC = f32(12582912)  # adding it rounds to an integer, ties to even


@inlined
def nearest(x):
    return i32((x + _MAGIC) - _MAGIC)


@inlined
def softsign(code, scale):
    code = f32(np.int8(code))
    return scale * ((code + code) / (f32(381) - abs(code)))


@leaf
def softsign_load(codes, at, bounds, b, root, rooted, m, s, n):
    """m [n] from s on <- codes (int8 as uint8), bounds; root [n]."""
    scale = bf16_value(bounds[b])
    if rooted:
        for o in range(n):
            m[s + o] = softsign(codes[at + o], scale) * root[s + o]
    else:
        for o in range(n):
            m[s + o] = softsign(codes[at + o], scale)


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
    bound = i32(0)
    if rooted:
        for o in range(n):
            r = m[s + o] / root[s + o]
            r = r if root[s + o] > f32(0) else f32(0)
            m[s + o], bound = r, most(bound, i32(as_bits(r) & TOP))
    else:
        for o in range(n):
            bound = most(bound, i32(as_bits(m[s + o]) & TOP))
    scale = bf16_directed(as_float(bound), True)
    bounds[b] = i32(0) if bf16_value(scale) < f32(1e-36) else scale


@leaf
def softsign_store(m, u, s, n, codes, at, bounds, b):
    """Codes, which hold those before, <- m [n], already divided by its root, u [n]."""
    scale = bf16_value(bounds[b])
    twice = f32(scale + scale) if scale > f32(0) else f32(np.inf)
    for o in range(n):
        x = (m[s + o] * f32(381)) / (twice + abs(m[s + o]))
        slow = abs(x - f32(np.int8(codes[at + o]))) < _SLOW
        codes[at + o] = u8(nearest(x + (u[s + o] - f32(0.5) if slow else f32(0))))


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
def extremes(x, s, n):
    """The bits of the least abs(x) [n] that is not 0, and of the largest: 0, if none."""
    lowest, highest = _MOST_BITS, i32(0)
    for o in range(n):
        bits = i32(as_bits(x[s + o]) & TOP)
        lowest = least(lowest, bits if bits > i32(0) else _MOST_BITS)
        highest = most(highest, bits)
    return lowest, highest


@inlined
def held(bits):
    return least(most(bits, _LEAST_BITS), _MOST_BITS)


@leaf
def find_bounds(x, s, n, bounds, b):
    """Two bounds <- log2 of the extremes of abs(x) [n] that are not 0, outward, in 1/256."""
    lowest, highest = extremes(x, s, n)
    if highest == i32(0):
        bounds[b], bounds[b + u64(1)] = 0, 0
        return
    low = np.floor(log2_above(as_float(held(lowest)), f32(0)) * f32(256))
    high = np.ceil(log2_above(as_float(held(highest)), f32(0)) * f32(256))
    high = min(max(i32(high), i32(FLOOR)), i32(CEILING))
    low = min(max(i32(low), i32(FLOOR)), i32(CEILING))
    bounds[b], bounds[b + u64(1)] = max(low, high - i32(MOST_RANGE)), high


@leaf
def find_root_bounds(v, s, n, bounds, b):
    """Two bounds <- bf16 below and above the roots of what is not 0 in v [n]."""
    lowest, highest = extremes(v, s, n)
    low, high = np.sqrt(as_float(held(lowest))), np.sqrt(as_float(held(highest)))
    there = highest > i32(0)
    bounds[b] = as_bits(low) >> i32(16) if there else i32(0)
    bounds[b + u64(1)] = i32(as_bits(high) + i32(0xFFFF)) >> i32(16) if there else i32(0)


@inlined
def step_of(bounds, b, steps):
    """Returns the step from one level to the next, in bits."""
    wide = i32(i32(i32(bounds[b + u64(1)]) - i32(bounds[b])) << i32(16))
    return i32((max(wide, i32(steps)) + steps - 1) // steps)


@inlined
def range_of(bounds, b):
    low, high = i32(bounds[b]), i32(bounds[b + u64(1)])
    return max(f32(i32(high - low)) * f32(1 / 256), _LEAST_RANGE)


@inlined
def root_at(code, low, step):
    bits = i32(low + i32(most(i32(code - i32(1)), i32(0)) * step))
    return as_float(bits if code > i32(0) else i32(0))


@leaf
def log_load(kind, codes, at, bounds, b, v, root, spare, s, n):
    """v, root [n] <- codes, a byte or half a byte each; spare [n] int32."""
    low = i32(i32(bounds[b]) << i32(16))
    if kind == LOG8:
        step = step_of(bounds, b, _STEPS8)
        for o in range(n):
            r = root_at(i32(codes[at + o]), low, step)
            v[s + o], root[s + o] = r * r, r
    else:
        step = step_of(bounds, b, _STEPS4)
        widen(codes, at, spare, s, n)
        for o in range(n):
            r = root_at(spare[s + o], low, step)
            v[s + o], root[s + o] = r * r, r


@inlined
def nearest_levels(v, u, low, per, step, last):
    """The code of one of the two levels around v, and its root."""
    x = min(max(v, _LEAST), _MOST)
    above = i32(as_bits(np.sqrt(x)) - low)
    below = least(most(i32(f32(above) * per), i32(0)), last)
    bits = i32(low + i32(below * step))
    lower, upper = as_float(bits), as_float(i32(bits + step))
    lo, hi = lower * lower, upper * upper
    up = (x - lo) > u * (hi - lo)
    code = i32(below + (i32(2) if up else i32(1)))
    return code if v > f32(0) else i32(0), (upper if up else lower) if v > f32(0) else f32(0)


@leaf
def log_store(kind, v, u, s, n, bounds, b, codes, at, root, spare):
    """Codes, a byte or half a byte each, and root [n] <- v, u [n]; spare [n] int32."""
    low = i32(i32(bounds[b]) << i32(16))
    if kind == LOG8:
        step, last = step_of(bounds, b, _STEPS8), i32(_STEPS8 - 1)
        per = f32(1) / f32(step)
        for o in range(n):
            code, root[s + o] = nearest_levels(v[s + o], u[s + o], low, per, step, last)
            codes[at + o] = u8(code)
    else:
        step, last = step_of(bounds, b, _STEPS4), i32(_STEPS4 - 1)
        per = f32(1) / f32(step)
        for o in range(n):
            code, root[s + o] = nearest_levels(v[s + o], u[s + o], low, per, step, last)
            spare[s + o] = code
        narrow(spare, s, n, codes, at)


# Both in two loops: one is a chain of 150 cycles, of which too few are begun at a time.
@leaf
def expanded_load(codes, at, bounds, b, x, s, n):
    """x [n] <- codes, bounds."""
    low = i32(bounds[b])
    part, whole = part_of(low, 8), i32(low >> i32(8))
    per_k = range_of(bounds, b) * _PER_OCTAVES
    for o in range(n):
        x[s + o] = octaves(i32(i32(codes[at + o]) & i32(127))) * per_k
    for o in range(n):
        code = i32(codes[at + o])
        bits = as_bits(exp2_from(x[s + o], part, whole)) | i32(i32(code & i32(128)) << i32(24))
        x[s + o] = as_float(bits if (code & i32(127)) > i32(0) else i32(0))


@inlined
def octaves(magnitude):
    small, large = as_bits(f32(magnitude)), i32(i32(magnitude << i32(20)) + i32(129 << 23))
    bits = small if magnitude < i32(8) else large
    f = f32(i32(bits & i32(0x7FFFFF))) * f32(2.0**-23)
    bend = fma(fma(fma(_BEND3, f, _BEND2), f, _BEND1), f, _BEND0)
    return fma(bend, f, f32(i32(bits - i32(127 << 23))) * f32(2.0**-23))


@leaf
def expanded_store(x, u, s, n, codes, at, bounds, b, spare):
    """Codes, which hold those before, <- x [n], bounds, u [n]; spare [n] float32."""
    k = _OCTAVES / range_of(bounds, b)
    bend = min((range_of(bounds, b) * _PER_OCTAVES - f32(1)) * f32(0.5), f32(1))
    level = f32(bounds[b]) * f32(1 / 256)
    for o in range(n):
        above = log2_above(min(max(abs(x[s + o]), _LEAST), _MOST), level)
        spare[s + o] = min(max(above * k, f32(0)), _OCTAVES)
    for o in range(n):
        sign = i32(as_bits(x[s + o]) >> i32(24)) & i32(128)
        code = u8(e4m3_of(spare[s + o], u[s + o], bend, codes[at + o]) | sign)
        codes[at + o] = code if abs(x[s + o]) > f32(0) else u8(0)


@inlined
def e4m3_of(z, u, bend, before):
    n = i32(z)
    more, power = above_one(z - f32(n)), power_of(n)
    small, size = fma(more, power, power), fma(more, f32(8), f32(8))
    large = fma(more, f32(8), f32(i32(i32(n << i32(3)) - i32(16))))
    even = n < i32(3)
    place = min(small if even else large, f32(126))
    f = place - f32(i32(place))
    draw = (u - f32(0.5)) - (f * (f32(1) - f)) * (bend / (small if even else size))
    slow = abs(place - f32(i32(before) & i32(127))) < _SLOW
    return nearest(place + (draw if slow else f32(0)))


@leaf
def widen(codes, at, spare, s, n):
    """spare [n] int32 <- the codes of a group, half a byte each."""
    for o in range(n >> u64(1)):
        pair = i32(codes[at + o])
        spare[s + (o << u64(1))] = pair & i32(15)
        spare[s + (o << u64(1)) + u64(1)] = pair >> i32(4)
    if n & u64(1):
        spare[s + n - u64(1)] = i32(codes[at + (n >> u64(1))])


@leaf
def narrow(spare, s, n, codes, at):
    """Inverse of `widen`."""
    for o in range(n >> u64(1)):
        two = s + (o << u64(1))
        codes[at + o] = u8(spare[two] | i32(spare[two + u64(1)] << i32(4)))
    if n & u64(1):
        codes[at + (n >> u64(1))] = u8(spare[s + n - u64(1)])


@leaf
def load_second(kind, state, bounds, b, places, count, v, root, spare):
    """v and, for a log kind, root <- a run's codes and bounds."""
    for i in range(count):
        s, at, n = places[i, 0], places[i, 2], places[i, 3]
        if kind == EXPANDED8:
            expanded_load(state, at, bounds, b, v, s, n)
        elif kind in (LOG8, LOG4):
            log_load(kind, state, at, bounds, b, v, root, spare, s, n)
        b += u64(2)


@leaf
def store_second(kind, v, u, state, bounds, b, places, count, root, spare):
    """Inverse of `load_second`."""
    if kind == NONE:
        return
    for i in range(count):
        if kind == EXPANDED8:
            find_bounds(v, places[i, 0], places[i, 3], bounds, b + (i << u64(1)))
        else:
            find_root_bounds(v, places[i, 0], places[i, 3], bounds, b + (i << u64(1)))
    for i in range(count):
        s, at, n = places[i, 0], places[i, 2], places[i, 3]
        if kind == EXPANDED8:
            expanded_store(v, u, s, n, state, at, bounds, b, root)
        else:
            log_store(kind, v, u, s, n, bounds, b, state, at, root, spare)
        b += u64(2)


@leaf
def load_first(kind, state, bounds, b, places, count, root, rooted, m, spare):
    """m <- a run's codes and bounds; root: that of v, if m is held relative to it."""
    for i in range(count):
        s, at, n = places[i, 0], places[i, 1], places[i, 3]
        if kind == EXPANDED8:
            expanded_load(state, at, bounds, b + (i << u64(1)), m, s, n)
        elif kind == SOFTSIGN4:
            widen(state, at, spare, s, n)
            softsign4_load(spare, bounds, b + i, root, rooted, m, s, n)
        else:
            softsign_load(state, at, bounds, b + i, root, rooted, m, s, n)


@leaf
def store_first(kind, m, u, root, rooted, state, bounds, b, places, count, spare):
    """Inverse of `load_first`. m is lost."""
    for i in range(count):
        s, at, n = places[i, 0], places[i, 1], places[i, 3]
        if kind == EXPANDED8:
            find_bounds(m, s, n, bounds, b + (i << u64(1)))
        else:
            softsign_bounds(m, root, rooted, s, n, bounds, b + i)
    for i in range(count):
        s, at, n = places[i, 0], places[i, 1], places[i, 3]
        if kind == EXPANDED8:
            expanded_store(m, u, s, n, state, at, bounds, b + (i << u64(1)), root)
        elif kind == SOFTSIGN8:
            softsign_store(m, u, s, n, state, at, bounds, b + i)
        else:
            softsign4_store(m, u, s, n, bounds, b + i, spare)
            narrow(spare, s, n, state, at)
