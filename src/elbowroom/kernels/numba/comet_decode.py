"""The loops that decode error-bounded codes: tile by tile, or map by map where q is predicted."""

import numpy as np
from numba import prange

from elbowroom.kernels.numba.blocks import BLOCKS, RAW, SCRATCH, read_tile
from elbowroom.kernels.numba.bounded import integers, restore_values
from elbowroom.kernels.numba.compiled import CHUNK, TILE, f32, i32, jit, u8, u32
from elbowroom.kernels.numba.launch import parallel
from elbowroom.kernels.numba.predict import lines_of, restore
from elbowroom.kernels.numba.rounding import from_restored, target, to_float
from elbowroom.kernels.numba.widths import ROOM


@parallel
def decode(bits, headers, starts, payload, grid, key, back, out, kind, raw, wrong):
    N = out.shape[0]
    T = (N + TILE - 1) // TILE
    itemsize = 4 if kind == 0 else 2
    for i_c in prange((T + CHUNK - 1) // CHUNK):
        b_x, b_u, b_code = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, i32)
        b_spare, b_part = np.empty(32, u8), np.empty(SCRATCH, u8)
        b_mask, b_flag = np.empty(BLOCKS, u32), np.empty(TILE, np.int8)
        b_block = b_code.reshape(BLOCKS, 32)
        b_raw = np.empty(TILE * itemsize, u8)
        for i_t in range(i_c * CHUNK, min(i_c * CHUNK + CHUNK, T)):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            n = last - first
            part = payload[starts[i_t] : starts[i_t + 1]]
            length = min(part.shape[0], SCRATCH - ROOM)  # damaged sizes may be anything
            b_part[:length] = part[:length]
            each, own = headers[first // 32 : (last + 31) // 32], bits[first // 8 : (last + 7) // 8]
            if not read_tile(
                b_part, part.shape[0], each, own, n, itemsize,
                b_spare, b_mask, b_flag, b_block, b_raw,
            ):  # fmt: skip
                wrong[0] = i_t
                break
            values = target(out[first:last], kind, b_x[:n])
            restore_values(b_code, b_flag, i_t, key, back, grid[1], kind, b_u, values)
            from_restored(values, kind, out[first:last])
            copy_raw(each, b_raw, raw[first * itemsize : last * itemsize], itemsize)


@jit
def copy_raw(headers, source, out, itemsize):
    """The raw blocks of a tile, as bytes."""
    size = 32 * itemsize
    for i_b in range(headers.shape[0]):
        if headers[i_b] == RAW:
            end = min(i_b * size + size, out.shape[0])
            to, at = out[i_b * size : end], source[i_b * size : end]
            for o in range(to.shape[0]):
                to[o] = at[o]


@parallel
def decode_maps(
    bits, headers, starts, payload, grid, rows, columns, inner, key, back, out, kind, raw, wrong
):
    """Maps are restored one after the other: a work item takes whole ones.

    A tile that two items share is read by both.
    """
    N = out.shape[0]
    size = rows * columns * inner
    M = (N + size - 1) // size
    each_item = max(CHUNK * TILE // size, 1)
    itemsize = 4 if kind == 0 else 2
    for i_c in prange((M + each_item - 1) // each_item):
        b_x, b_u, b_code = np.empty(TILE, f32), np.empty(TILE, f32), np.empty(TILE, i32)
        b_spare, b_part = np.empty(32, u8), np.empty(SCRATCH, u8)
        b_mask, b_flag = np.empty(BLOCKS, u32), np.empty(TILE, np.int8)
        b_block = b_code.reshape(BLOCKS, 32)
        b_raw, b_word = np.empty(TILE * itemsize, u8), np.empty(TILE, out.dtype)
        b_q, b_some, b_bad = np.empty(TILE, i32), np.empty(TILE, u8), np.empty(TILE, u8)
        b_back, b_line = np.empty(TILE, f32), lines_of(columns, inner)
        start, stop = i_c * each_item * size, min((i_c + 1) * each_item * size, N)
        for i_t in range(start // TILE, (stop + TILE - 1) // TILE):
            first, last = i_t * TILE, min(i_t * TILE + TILE, N)
            n = last - first
            part = payload[starts[i_t] : starts[i_t + 1]]
            length = min(part.shape[0], SCRATCH - ROOM)  # damaged sizes may be anything
            b_part[:length] = part[:length]
            each, own = headers[first // 32 : (last + 31) // 32], bits[first // 8 : (last + 7) // 8]
            if not read_tile(
                b_part, part.shape[0], each, own, n, itemsize,
                b_spare, b_mask, b_flag, b_block, b_raw,
            ):  # fmt: skip
                wrong[0] = i_t
                break
            for o in range(n):
                b_code[o] &= i32(b_flag[o])
            if has_raw(each):
                values = to_float(b_raw.view(out.dtype)[:n], kind, b_x[:n])
                integers(values, kind, i_t, key, back, grid, b_u, b_back, b_q[:n], b_some, b_bad)
                for i_b in range(each.shape[0]):
                    if each[i_b] == RAW:
                        for o in range(32 * i_b, min(32 * i_b + 32, n)):
                            b_code[o] = b_q[o]
            a, b = max(start, first), min(stop, last)
            o_a, o_b = a - first, b - first
            restore(b_code[o_a:o_b], b_flag[o_a:o_b], a % size, rows, columns, inner, b_line)
            word = out[a:b] if b - a == n else b_word[:n]
            values = target(word, kind, b_x[:n])
            restore_values(b_code, b_flag, i_t, key, back, grid[1], kind, b_u, values)
            from_restored(values, kind, word)
            copy_raw(each, b_raw, word.view(u8), itemsize)
            if b - a < n:
                out[a:b] = b_word[o_a:o_b]


@jit
def has_raw(headers):
    found = False
    for i_b in range(headers.shape[0]):
        found |= headers[i_b] == RAW
    return found
