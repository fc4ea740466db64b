"""Block means and a low-bit rest (specification: `reference/division.py`).

x is read twice: for means and extremes, by blocks, and for codes, by tiles. An element of 4 bytes
costs 8 bytes read and bits / 8 + 2 / block^2 written; back, bits / 8 + 2 / block^2 read, 4 written.
Kernels over blocks: `maps.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import tiles
from elbowroom.kernels.maps import Cells, blocks, ranges
from elbowroom.kernels.triton.device import (
    TILE,
    base,
    bf16_value,
    bytes_block,
    codes_nbytes,
    inverse,
    load_float,
    parts,
    per_byte,
    program_tiles,
    shift,
    store_restored,
    tile_key,
    uniform,
    unpack,
)
from elbowroom.kernels.triton.launch import launch, patterns, split_seed, words
from elbowroom.kernels.triton.maps import cells_of, elements, finish_ranges, sum_blocks

SHORT = 2**31 - 2**12  # elements whose places fit into 32 bits, a tile beyond the end included
LANES = 512  # elements of a row that a program sums side by side
BOTTOM, TOP = -(2**31), 2**31 - 1


def division_quantize(
    x: Tensor, seed: int | Tensor, levels: int, block: int, reach: int, maps: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    over, over_ranges = blocks(maps, block), ranges(maps, block, reach)
    n, count, device = x.numel(), over_ranges.entries, x.device
    codes, mean, scale, low = outputs.division(x, levels, block, reach, maps)
    if n == 0:
        return codes, mean, scale, low
    edges = torch.empty(2, count, dtype=torch.int32, device=device)
    edges[0], edges[1] = TOP, BOTTOM  # least and most of x - mean, by range
    source, kind = words(x)
    _launch_means(source, kind, patterns(mean), edges, over, over_ranges)
    table = edges, patterns(scale), patterns(low), count
    launch(finish_ranges, tiles(count), *table, LEVELS=levels)
    args = source, codes, patterns(mean), patterns(scale), patterns(low), n, *split_seed(seed)
    how: dict[str, Any] = {"LEVELS": levels, "SHORT": n < SHORT, "KIND": kind}
    launch(_quantize, tiles(n), *args, *_sizes(over, over_ranges), **how)
    return codes, mean, scale, low


def division_dequantize(
    codes: Tensor,
    mean: Tensor,
    scale: Tensor,
    low: Tensor,
    seed: int | Tensor,
    levels: int,
    block: int,
    reach: int,
    maps: list[int],
    dither: bool,
    out: Tensor,
) -> None:
    if out.numel() == 0:
        return
    (target, kind), n = words(out), out.numel()
    sizes = _sizes(blocks(maps, block), ranges(maps, block, reach))
    args = codes, patterns(mean), patterns(scale), patterns(low), target, n, *split_seed(seed)
    how: dict[str, Any] = {"LEVELS": levels, "DITHER": dither, "SHORT": n < SHORT, "KIND": kind}
    launch(_dequantize, tiles(n), *args, *sizes, **how)


def _sizes(over: Cells, over_ranges: Cells) -> tuple[int, ...]:
    """Returns the numbers by which an element's block and range are found: see `cells_of`."""
    _, down, across, inner = over.table
    _, lines, per, _ = over_ranges.table
    own = over.rows, over.columns, inner, over.high, over.wide, down, across
    return *own, over_ranges.high, over_ranges.wide, lines, per


def _launch_means(
    x: Tensor, kind: int, mean: Tensor, edges: Tensor, over: Cells, over_ranges: Cells
) -> None:
    """A program sums K blocks side by side, J channels of each, in R places."""
    outer, down, across, inner = over.table
    _, lines, per, _ = over_ranges.table
    J = min(64, triton.next_power_of_2(inner))
    K = min(max(1, LANES // (over.wide * J)), triton.next_power_of_2(across))
    spans = triton.cdiv(across, K), triton.cdiv(inner, J)
    items = outer * down * spans[0] * spans[1]
    tall, broad = (-(-a // b) for a, b in zip(over_ranges[4:], over[4:], strict=True))
    sizes: tuple[Any, ...] = over.rows, over.columns, inner, down, across, *spans, items
    args = x, mean, edges, over_ranges.entries, *sizes, tall, broad, lines, per
    R = max(1, LANES // (over.wide * K * J)) if x.is_cuda else None
    launch(sum_blocks, items, *args, R=R, HIGH=over.high, WIDE=over.wide, K=K, J=J, KIND=kind)


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _quantize(
    p_x, p_codes, p_mean, p_scale, p_low, N, seed_low, seed_high, rows, columns, inner, high, wide,
    down, across, tall, broad, lines, per,
    LEVELS: tl.constexpr, SHORT: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    i_t, n = program_tiles(N, R)
    b_key, i_t, n = tile_key(i_t, seed_low, seed_high)[:, None], i_t[:, None], n[:, None]
    p_codes += i_t * codes_nbytes(LEVELS, TILE)
    for part in tl.static_range(parts(LEVELS)):  # as `pack` in device.py
        n_bytes = (n + per_byte(LEVELS, part) - 1) // per_byte(LEVELS, part)
        o_b = tl.arange(0, bytes_block(LEVELS, part, TILE))[None, :]
        m_b = o_b < n_bytes
        b_byte = tl.zeros_like(m_b.to(tl.int32))
        for k in tl.static_range(per_byte(LEVELS, part)):
            o_e = o_b + k * n_bytes
            m_e = m_b & (o_e < n)
            o_x = elements(i_t, o_e, m_e, SHORT)
            o_block, o_range = cells_of(
                o_x, rows, columns, inner, high, wide, down, across, tall, broad, lines, per
            )
            b_mean = bf16_value(tl.load(p_mean + o_block, mask=m_e, other=0))
            b_low = bf16_value(tl.load(p_low + o_range, mask=m_e, other=0))
            b_scale = bf16_value(tl.load(p_scale + o_range, mask=m_e, other=0))
            b_v = (load_float(p_x + o_x, m_e, KIND) - b_mean) - b_low
            b_v = b_v * inverse(b_scale) + uniform(b_key, o_e)
            b_v = tl.where(m_e & (b_v == b_v), b_v, 0.0)
            b_code = tl.minimum(tl.maximum(b_v, 0.0), LEVELS - 1.0).to(tl.int32)
            b_digit = (b_code >> shift(LEVELS, part)) % base(LEVELS, part)
            b_byte += b_digit * base(LEVELS, part) ** k
        tl.store(p_codes + o_b, b_byte.to(tl.uint8), mask=m_b)
        p_codes += n_bytes


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _dequantize(
    p_codes, p_mean, p_scale, p_low, p_out, N, seed_low, seed_high, rows, columns, inner, high,
    wide, down, across, tall, broad, lines, per,
    LEVELS: tl.constexpr, DITHER: tl.constexpr, SHORT: tl.constexpr, KIND: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    i_t, n = program_tiles(N, R)
    b_key = tile_key(i_t, seed_low, seed_high)[:, None]
    i_t, n = i_t[:, None], n[:, None]
    o_e = tl.arange(0, TILE)[None, :]
    m_e = o_e < n
    o_x = elements(i_t, o_e, m_e, SHORT)
    o_block, o_range = cells_of(
        o_x, rows, columns, inner, high, wide, down, across, tall, broad, lines, per
    )
    b_mean = bf16_value(tl.load(p_mean + o_block, mask=m_e, other=0))
    b_base = bf16_value(tl.load(p_low + o_range, mask=m_e, other=0))
    b_step = bf16_value(tl.load(p_scale + o_range, mask=m_e, other=0))
    b_q = unpack(p_codes + i_t * codes_nbytes(LEVELS, TILE), n, o_e, m_e, LEVELS).to(tl.float32)
    if DITHER:
        b_q -= uniform(b_key, o_e)
        b_base += b_step * 0.5
    store_restored(p_out + i_t * TILE + o_e, b_mean + (b_base + b_step * b_q), m_e, KIND)
