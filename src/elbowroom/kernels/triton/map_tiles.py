"""Tiles of maps to registers and back: a tile's numbers are B * B tensors [R, L], by row.

Lanes of a program lie side by side in x, and so a row of all its tiles is loaded at once.
"""

import triton
import triton.language as tl

from elbowroom.kernels.triton.device import load_float, store_restored
from elbowroom.kernels.triton.fdsr_tables import log2, power_of_two


@triton.jit
def locate(i_t, T, rows, columns, inner, B: tl.constexpr):
    """The first line of a tile's map, where the tile lies in it, and its channel: as i_t.

    i_t in 0..T-1; beyond, the last tile is repeated.
    """
    down, across = (rows + B - 1) // B, (columns + B - 1) // B
    i_t = tl.minimum(i_t, T - 1)
    i_line = i_t // across
    i_p = i_line // down
    o_row, o_column = (i_line % down) * B, (i_t % across) * B
    return (i_p // inner) * rows, o_row, o_column, i_p % inner


@triton.jit
def load_tiles(p_x, i_t, T, rows, columns, inner, B: tl.constexpr, KIND: tl.constexpr):
    """Tiles i_t [R, L]; at the edges of a map its last row and column are repeated."""
    W: tl.constexpr = power_of_two(B)
    o_line, o_row, o_column, o_i = locate(i_t[:, :, None], T, rows, columns, inner, B)
    o_w = tl.arange(0, W)[None, None, :]
    o_c = tl.minimum(o_column + o_w, columns - 1)  # [R, L, W]
    b_x = (load_first(p_x, i_t, T, rows, columns, inner, B, KIND),)
    for i in tl.static_range(B):
        o_r = o_line + tl.minimum(o_row + i, rows - 1)
        b_row = load_float(p_x + (o_r * columns + o_c) * inner + o_i, o_w < B, KIND)
        b_x = b_x + apart(b_row)[1 if i == 0 else 0 : B]
    return b_x


@triton.jit
def load_first(p_x, i_t, T, rows, columns, inner, B: tl.constexpr, KIND: tl.constexpr):
    """The first element of each tile.

    It might be taken from the first row; but only what is loaded a tile a thread makes the compiler
    lay out a tile a thread all that follows. Else every `join` of `beside` goes through shared
    memory: 211 barriers, not 31 (Triton 3.7).
    """
    o_line, o_row, o_column, o_i = locate(i_t, T, rows, columns, inner, B)
    o_x = ((o_line + o_row) * columns + o_column) * inner + o_i
    return load_float(p_x + o_x, i_t >= 0, KIND)


@triton.jit
def store_tiles(p_out, b_x, i_t, T, rows, columns, inner, B: tl.constexpr, KIND: tl.constexpr):
    """Inverse of `load_tiles`, for elements that exist."""
    W: tl.constexpr = power_of_two(B)
    o_line, o_row, o_column, o_i = locate(i_t[:, :, None], T, rows, columns, inner, B)
    o_w = tl.arange(0, W)[None, None, :]
    o_c = o_column + o_w
    m_c = (i_t < T)[:, :, None] & (o_w < B) & (o_c < columns)  # [R, L, W]
    for i in tl.static_range(B):
        b_row = beside(b_x[i * B : i * B + B], B)
        o_x = ((o_line + o_row + i) * columns + o_c) * inner + o_i
        store_restored(p_out + o_x, b_row, m_c & (o_row + i < rows), KIND)


@triton.jit
def apart(b_x):
    """[R, L, W], W a power of two -> W tensors [R, L]."""
    R: tl.constexpr = b_x.shape[0]
    L: tl.constexpr = b_x.shape[1]
    W: tl.constexpr = b_x.shape[2]
    b_parts = (b_x,)
    for k in tl.static_range(log2(W)):  # after k rounds, part i holds i, i + 2^k, ...
        b_even, b_odd = (), ()
        for i in tl.static_range(1 << k):
            b_a, b_b = tl.split(tl.reshape(b_parts[i], [R, L, W >> (k + 1), 2]))
            b_even, b_odd = b_even + (b_a,), b_odd + (b_b,)
        b_parts = b_even + b_odd
    b_flat = ()
    for i in tl.static_range(W):
        b_flat = b_flat + (tl.reshape(b_parts[i], [R, L]),)
    return b_flat


@triton.jit
def beside(b_parts, N: tl.constexpr):
    """The inverse of N tensors [R, L]: [R, L, W], filled up with the first one."""
    R: tl.constexpr = b_parts[0].shape[0]
    L: tl.constexpr = b_parts[0].shape[1]
    W: tl.constexpr = power_of_two(N)
    for _ in tl.static_range(W - N):
        b_parts = b_parts + (b_parts[0],)
    for k in tl.static_range(log2(W)):
        b_pairs = ()
        for i in tl.static_range(W >> (k + 1)):
            b_pair = tl.join(b_parts[i], b_parts[i + (W >> (k + 1))])
            b_pairs = b_pairs + (tl.reshape(b_pair, [R, L, 2 << k]),)
        b_parts = b_pairs
    return tl.reshape(b_parts[0], [R, L, W])
