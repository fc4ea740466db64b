"""Statistics, weights, gains and codes of a group (specification: `reference/fdsr.py`).

y is a raster [B * B, lanes], z is by position; both have rows of 32 or 128 tiles.
"""

import numpy as np

from elbowroom.kernels.bands import UNITS
from elbowroom.kernels.numba.compiled import f32, i32, inlined, jit, u8, u32, u64
from elbowroom.kernels.numba.fdsr_reuse import gain_code, gain_value
from elbowroom.kernels.numba.rounding import (
    TOP,
    as_float,
    bf16_directed,
    bf16_nearest,
    bf16_value,
    inverse,
)


@jit
def largest(values):
    """The bits of the largest magnitude: an integer, largest for NaN and Inf."""
    patterns, most = values.view(np.int32), i32(0)
    for o in range(patterns.shape[0]):
        most = max(most, patterns[o] & TOP)
    return most


@inlined
def unit_of(absmax):
    """Returns the factor that turns a coefficient into a number of units."""
    return inverse(absmax * f32(1 / UNITS))


@jit
def energies(y, raster, pieces, absmax, part, energy):
    """energy [positions] int64 <- the sum of squares, in units, of each of the `pieces`.

    It stands at a piece's first position, and 0 at the others; part [lanes] uint32 is scratch.
    Squares are 2^26 at most, so that 63 of them fit 32 bits.
    """
    scale = unit_of(absmax)
    energy[:] = 0
    for i in range(pieces.shape[0] - 1):
        for o in range(part.shape[0]):
            part[o] = u32(0)
        for p in range(pieces[i], pieces[i + 1]):
            row = raster[p]
            for o in range(part.shape[0]):
                unit = i32(y[row, o] * scale)
                part[o] += u32(unit * unit)
        total = np.int64(0)
        for o in range(part.shape[0]):
            total += np.int64(part[o])
        energy[pieces[i]] = total


@jit
def to_units(y, raster, absmax, q):
    """q [R, lanes] int32 <- the last R positions of y, in units, towards zero."""
    scale, skipped = unit_of(absmax), raster.shape[0] - q.shape[0]
    for p in range(q.shape[0]):
        row = raster[skipped + p]
        for o in range(q.shape[1]):
            q[p, o] = i32(y[row, o] * scale)


@jit
def rms(energy, lanes):
    """Computes the root mean square of positions, as a share of absmax.

    energy: their sums of squares.
    """
    total, count = np.int64(0), energy.shape[0] * lanes
    for one in energy:
        total += one
    return np.sqrt(f32(max(total, count)) * f32(1 / count)) * f32(1 / UNITS)


@jit
def band_weights(energy, edges, lanes, absmax, dither, weights):
    """weights [bands], bits of bf16."""
    for i_b in range(weights.shape[0]):
        ratio = rms(energy[edges[i_b + 1] : edges[i_b + 2]], lanes)
        weights[i_b] = bf16_nearest((np.sqrt(ratio) if dither else ratio) * absmax)


@jit
def normalize(y, weights, t, dither, z):
    """z <- the coded positions of y over their weights, with their signs turned if `dither`."""
    for p in range(u64(1), u64(t.coded)):
        factor, row = inverse(bf16_value(weights[t.band[p] - 1])), t.raster[p]
        if dither:
            factor *= t.signs[p]  # exact, as a step of its own would be
        for o in range(y.shape[1]):
            z[p, o] = y[row, o] * factor


@jit
def undo(z, weights, t, dither, y):
    """Inverse of `normalize`: the coded positions of y are written, but the mean."""
    for p in range(u64(1), u64(t.coded)):
        factor, row = bf16_value(weights[t.band[p] - 1]), t.raster[p]
        if dither:
            factor *= t.signs[p]
        for o in range(y.shape[1]):
            y[row, o] = z[p, o] * factor


@jit
def mean_codes(row, bounds, levels, u, code):
    least, most = row[0], row[0]
    for value in row:
        least, most = min(least, value), max(most, value)
    bounds[0], bounds[1] = bf16_directed(least, False), bf16_directed(most, True)
    lo = bf16_value(bounds[0])
    step = (bf16_value(bounds[1]) - lo) * f32(1 / (levels - 1))
    scale, top = inverse(step), i32(levels - 1)
    for o in range(row.shape[0]):
        code[o] = u8(min(max(i32((row[o] - lo) * scale + u[o]), i32(0)), top))


@jit
def mean_values(code, bounds, levels, u, row):
    lo = bf16_value(bounds[0])
    step = (bf16_value(bounds[1]) - lo) * f32(1 / (levels - 1))
    low = lo + step * f32(0.5)
    for o in range(row.shape[0]):
        row[o] = low + step * (f32(i32(code[o])) - u[o])


@jit
def gains_of(z, coded, cell, gains, gain):
    """gains [lanes / cell] and their values gain [lanes], from the largest of z."""
    most, pattern = gain.view(np.int32), z.view(np.int32)
    for o in range(most.shape[0]):
        most[o] = 0
    fours = u64((coded - 1) // 4 * 4)
    for p in range(u64(1), u64(1) + fours, u64(4)):  # fewer trips through memory than one by one
        q, r, s = p + u64(1), p + u64(2), p + u64(3)
        for o in range(most.shape[0]):
            a = max(pattern[p, o] & TOP, pattern[q, o] & TOP)  # bits order as magnitudes do
            b = max(pattern[r, o] & TOP, pattern[s, o] & TOP)
            most[o] = max(most[o], max(a, b))
    for p in range(u64(1) + fours, u64(coded)):
        for o in range(most.shape[0]):
            most[o] = max(most[o], pattern[p, o] & TOP)
    for i in range(gains.shape[0]):
        top = i32(0)
        for o in range(i * cell, i * cell + cell):
            top = max(top, most[o])
        gains[i] = gain_code(as_float(top), (1 << 19) - 1)
    gain_values(gains, cell, gain)


@jit
def gain_values(gains, cell, gain):
    for i in range(gains.shape[0]):
        value = gain_value(gains[i])
        for o in range(cell):
            gain[i * cell + o] = value


@jit
def run_codes(z, start, stop, gain, levels, u, scale, code):
    """code [(stop - start) * lanes] <- the codes of rows of z; u [positions * lanes] is noise."""
    n, top = u64(gain.shape[0]), i32(levels - 1)
    for o in range(n):
        scale[o] = inverse(gain[o] * f32(2 / (levels - 1)))
    for p in range(u64(start), u64(stop)):
        at, to = p * n, (p - u64(start)) * n
        for o in range(n):
            found = i32((z[p, o] + gain[o]) * scale[o] + u[at + o])
            code[to + o] = u8(min(max(found, i32(0)), top))


@jit
def run_values(code, start, stop, gain, levels, u, step, low, z):
    """Inverse of `run_codes`: rows of z <- what the codes stand for."""
    n = u64(gain.shape[0])
    for o in range(n):
        step[o] = gain[o] * f32(2 / (levels - 1))
        low[o] = step[o] * f32(0.5) - gain[o]
    for p in range(u64(start), u64(stop)):
        at, to = p * n, (p - u64(start)) * n
        for o in range(n):
            z[p, o] = low[o] + step[o] * (f32(i32(code[to + o])) - u[at + o])
