"""Kernels that take nothing but numbers: addresses, sizes, settings. For float32, on one thread.

An address costs 20 ns a call, an array 1 us, and an op that the dispatcher serves 4 us. So what is
done with a small tensor in every step (`codecs/compact.py`, masks) is launched so. A code lies in
one run of bytes, which one launch makes and one reads:

    dither     bounds [T, 2] bf16 | ranges [G, 2] uint8 | codes
    nonzero    bounds [T, 2] bf16 | bits [ceil(N / 8)]  | payload, whose size depends on x
    group      step [G] bf16      | low [G] bf16        | codes

The same bytes as `dither.py`, `nonzero.py` and `group.py` write into three tensors. The backward of
a norm takes tensors and launches by address itself; here it is called without the dispatcher.
"""

import numpy as np

from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.affine import rows_at
from elbowroom.kernels.numba.batch_norm_backward import batch_norm_backward as batch_norm_backward
from elbowroom.kernels.numba.bits import pack_flags, unpack_flags
from elbowroom.kernels.numba.compiled import TILE, counted, f32, i32, jit, u8, u32
from elbowroom.kernels.numba.dither import _dequantize as _dither_dequantize
from elbowroom.kernels.numba.dither import _quantize as _dither_quantize
from elbowroom.kernels.numba.dither import bounds_at
from elbowroom.kernels.numba.fingerprint import fingerprints as fingerprints
from elbowroom.kernels.numba.group import _dequantize as _group_dequantize
from elbowroom.kernels.numba.group import _quantize as _group_quantize
from elbowroom.kernels.numba.head_spread import _heads
from elbowroom.kernels.numba.head_spread import _rows as _rows_of_heads
from elbowroom.kernels.numba.launch import SERIAL as SERIAL
from elbowroom.kernels.numba.launch import runs_serially as runs_serially
from elbowroom.kernels.numba.layer_norm_backward import layer_norm_backward as layer_norm_backward
from elbowroom.kernels.numba.nonzero import _dequantize as _nonzero_dequantize
from elbowroom.kernels.numba.nonzero import _pack_mapped, _starts_of
from elbowroom.kernels.numba.nonzero import _quantize as _nonzero_quantize
from elbowroom.kernels.numba.row_statistics import row_scales as row_scales

MOST_UNSIZED = SERIAL  # elements, where a code is written to memory of its bound first
_quantize, _dequantize = _dither_quantize.serial, _dither_dequantize.serial
_pack, _quantize_nonzero = _pack_mapped.serial, _nonzero_quantize.serial
_dequantize_nonzero = _nonzero_dequantize.serial
_quantize_group, _dequantize_group = _group_quantize.serial, _group_dequantize.serial
_find_rows, _find_heads = _rows_of_heads.serial, _heads.serial
f64 = np.float64
_GROUP = 64  # elements that share a step of a code, at most (`plan/precision_floor.py`)


@jit
def _are_finite(values):
    """Return whether none of these bf16 patterns [n] is a NaN or an Inf."""
    beyond = 0
    for o in range(values.shape[0]):
        beyond += (i32(values[o]) & i32(0x7F80)) == i32(0x7F80)
    return beyond == 0


@counted
def dither(x, N, seed, levels, S, scale, shift, R, C, inner, row, out, nbytes):
    """Write the code of x [N] to out [nbytes]; return nbytes, or -1: x must be held raw."""
    T, G = (N + TILE - 1) // TILE, (N + S - 1) // S
    bounds = bounds_at(out, T)
    ranges = array_at(out + 4 * T, 2 * G, u8).reshape(G, 2)
    codes = array_at(out + 4 * T + 2 * G, nbytes - 4 * T - 2 * G, u8)
    by = rows_at(scale, R, C), rows_at(shift, R, C), (inner, row)
    low, high = u32(seed & 0xFFFFFFFF), u32((seed >> 32) & 0xFFFFFFFF)
    _quantize(array_at(x, N, i32), 0, *by, low, high, levels, S, codes, ranges, bounds)
    return nbytes if _are_finite(bounds.reshape(-1)) else -1


@counted
def dither_restored(
    code, nbytes, N, seed, levels, S, scale, shift, R, C, inner, row, mask, mask_nbytes, out
):  # fmt: skip
    """Write what a code of N elements stands for to out [N]; return whether it is one."""
    T, G = (N + TILE - 1) // TILE, (N + S - 1) // S
    bounds = bounds_at(code, T)
    ranges = array_at(code + 4 * T, 2 * G, u8).reshape(G, 2)
    codes = array_at(code + 4 * T + 2 * G, nbytes - 4 * T - 2 * G, u8)
    by = rows_at(scale, R, C), rows_at(shift, R, C), (inner, row), array_at(mask, mask_nbytes, u8)
    low, high = u32(seed & 0xFFFFFFFF), u32((seed >> 32) & 0xFFFFFFFF)
    there = array_at(out, N, i32), 0, 0
    _dequantize(codes, ranges, bounds, low, high, levels, S, *by, *there)
    return True


@counted
def group(x, N, seed, levels, S, scale, shift, R, C, inner, row, out, nbytes):
    """The same of groups with their own range, rounded stochastically."""
    G = (N + S - 1) // S
    steps, lows = array_at(out, G, np.int16), array_at(out + 2 * G, G, np.int16)
    codes = array_at(out + 4 * G, nbytes - 4 * G, u8)
    by = rows_at(scale, R, C), rows_at(shift, R, C), (inner, row)
    low, high = u32(seed & 0xFFFFFFFF), u32((seed >> 32) & 0xFFFFFFFF)
    _quantize_group(array_at(x, N, i32), 0, *by, low, high, levels, S, codes, steps, lows)
    return nbytes if _are_finite(steps) else -1


@counted
def group_restored(
    code, nbytes, N, seed, levels, S, scale, shift, R, C, inner, row, mask, mask_nbytes, out
):  # fmt: skip
    """The same of a code of groups, whose seed is not read."""
    G = (N + S - 1) // S
    steps, lows = array_at(code, G, np.int16), array_at(code + 2 * G, G, np.int16)
    codes = array_at(code + 4 * G, nbytes - 4 * G, u8)
    by = rows_at(scale, R, C), rows_at(shift, R, C), (inner, row), array_at(mask, mask_nbytes, u8)
    _dequantize_group(codes, steps, lows, levels, S, *by, array_at(out, N, i32), 0, 0)
    return True


@counted
def nonzero(x, N, seed, levels, S, scale, shift, R, C, inner, row, out, most):
    """The same of the non-zeros of x. Return how many of the `most` bytes of out are the code."""
    T, B = (N + TILE - 1) // TILE, (N + 7) // 8
    bounds, bits = bounds_at(out, T), array_at(out + 4 * T, B, u8)
    by = rows_at(scale, R, C), rows_at(shift, R, C), (inner, row)
    values = array_at(x, N, i32)
    _pack(values, 0, *by, bits)
    starts = _starts_of(bits, levels, S)
    payload = array_at(out + 4 * T + B, starts[-1], u8)
    low, high = u32(seed & 0xFFFFFFFF), u32((seed >> 32) & 0xFFFFFFFF)
    _quantize_nonzero(values, 0, *by, low, high, levels, S, starts, payload, bounds)
    return 4 * T + B + starts[-1] if _are_finite(bounds.reshape(-1)) else -1


@counted
def nonzero_restored(
    code, nbytes, N, seed, levels, S, scale, shift, R, C, inner, row, mask, mask_nbytes, out
):  # fmt: skip
    T, B = (N + TILE - 1) // TILE, (N + 7) // 8
    bounds, bits = bounds_at(code, T), array_at(code + 4 * T, B, u8)
    starts = _starts_of(bits, levels, S)
    if 4 * T + B + starts[-1] != nbytes:
        return False
    payload = array_at(code + 4 * T + B, starts[-1], u8)
    by = rows_at(scale, R, C), rows_at(shift, R, C), (inner, row), array_at(mask, mask_nbytes, u8)
    low, high = u32(seed & 0xFFFFFFFF), u32((seed >> 32) & 0xFFFFFFFF)
    settings = low, high, levels, S, f32(2.0**-126)
    there = array_at(out, N, i32), 0, 0
    _dequantize_nonzero(bits, starts, payload, bounds, *settings, *by, *there)
    return True


@counted
def masked(x, N, bits, out):
    """Write x [N] where its bit is set, else +0, to out [N]."""
    values, flags, made = (
        array_at(x, N, i32),
        array_at(bits, (N + 7) // 8, u8),
        array_at(out, N, i32),
    )
    b_flag = np.empty(TILE, np.int8)
    for start in range(0, N, TILE):
        last = min(start + TILE, N)
        unpack_flags(flags[start // 8 : (last + 7) // 8], b_flag)
        part, source = made[start:last], values[start:last]
        for o in range(part.shape[0]):
            part[o] = source[o] & b_flag[o]


@counted
def positive(x, N, out):
    """Write whether an element of x [N] is above 0, or a NaN, to out: one bit each."""
    values, bits = array_at(x, N, f32), array_at(out, (N + 7) // 8, u8)
    b_is, b_flag = np.empty(TILE, u8), np.empty(TILE, u8)
    for start in range(0, N, TILE):
        last = min(start + TILE, N)
        part, found = values[start:last], b_is[: last - start]
        for o in range(part.shape[0]):
            found[o] = not (part[o] <= f32(0))
        pack_flags(found, u8(1), bits[start // 8 : (last + 7) // 8], b_flag)


@counted
def _of_heads(x, D, B, H, T, of_batch, of_head, of_token):
    """Return the four means of `head_spread`, [4, B, H], of x [B, H, T, D] with these strides."""
    n = D + (B - 1) * of_batch + (H - 1) * of_head + (T - 1) * of_token
    by_row, found = np.empty((2, B, H, T), f32), np.empty((4, B, H), f32)
    _find_rows(array_at(x, n, i32), 0, D, of_batch, of_head, of_token, by_row)
    _find_heads(by_row, D % _GROUP != 0, found)
    return found


@jit
def _larger(one, other):
    """Return the larger one; a NaN if one is."""
    return other if other > one or other != other else one


@counted
def logits_spread(
    D, q, B, H, T, q_batch, q_head, q_token, k, k_B, k_H, S, k_batch, k_head, k_token
):  # fmt: skip
    """Return the largest |q|^2 range_k^2 + |k|^2 range_q^2 of a head (`head_spread`)."""
    of_q = _of_heads(q, D, B, H, T, q_batch, q_head, q_token)
    of_k = _of_heads(k, D, k_B, k_H, S, k_batch, k_head, k_token)
    most = f32(0)
    if (k_B, k_H) == (B, H):
        for b in range(B):
            for h in range(H):
                most = _larger(most, of_q[0, b, h] * of_k[1, b, h] + of_k[0, b, h] * of_q[1, b, h])
        return most
    each = np.zeros((2, 2), f32)  # grouped queries, broadcast batches
    for i in range(2):
        for a in of_q[i].reshape(-1):
            each[0, i] = _larger(each[0, i], a)
        for a in of_k[i].reshape(-1):
            each[1, i] = _larger(each[1, i], a)
    return each[0, 0] * each[1, 1] + each[1, 0] * each[0, 1]


@counted
def values_spread(D, v, B, H, S, of_batch, of_head, of_token):
    """Return the largest noise of a head over its variance: D range^2 / 12 of `head_spread`."""
    found = _of_heads(v, D, B, H, S, of_batch, of_head, of_token)
    n = D + (B - 1) * of_batch + (H - 1) * of_head + (S - 1) * of_token
    values, most = array_at(v, n, f32), f64(0)
    means, squares = np.empty(D, f64), np.empty(D, f64)
    for b in range(B):
        for h in range(H):
            noise = f64(found[3, b, h]) * D / 12
            if noise == 0:
                continue
            if not noise > 0:
                return noise  # a NaN
            start = b * of_batch + h * of_head
            _spread_of_channels(values[start:], of_token, S, means, squares)
            most = max(most, noise * S / squares.sum())
    return most


@jit
def _spread_of_channels(x, step, S, means, squares):
    """Find the mean of each channel over S tokens, and the sum of squares of what differs."""
    D = means.shape[0]
    means[:], squares[:] = f64(0), f64(0)
    for s in range(S):
        _add(x[s * step : s * step + D], means)
    for o in range(D):
        means[o] /= f64(S)
    for s in range(S):
        _add_squares(x[s * step : s * step + D], means, squares)


@jit
def _add(row, sums):
    for o in range(sums.shape[0]):
        sums[o] += f64(row[o])


@jit
def _add_squares(row, means, squares):
    for o in range(squares.shape[0]):
        squares[o] += (f64(row[o]) - means[o]) * (f64(row[o]) - means[o])
