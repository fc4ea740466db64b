"""Error-bounded codes (specification: `reference/comet.py`).

x is read twice, by `_measure` for headers and sizes and by `_encode` for the codes, each element
with three neighbors where a prediction asks for them; the host waits for the sum of the sizes, but
`comet_quantize_into` is given memory for the payload, and waits for nothing.
`_decode` reads the payload and writes x~; with a prediction it writes residuals, 5 bytes an
element, which `_restore` reads and writes again, a map a program.

Within a tile nothing is sequential: a header and the number of non-zeros give a block's bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels import outputs
from elbowroom.kernels.layout import TILE as TILE_SIZE
from elbowroom.kernels.layout import tiles
from elbowroom.kernels.triton.bits import pack_bits
from elbowroom.kernels.triton.blocks import (
    RAW,
    ZIGZAG,
    block_starts,
    element,
    is_filled,
    load_codes,
    load_words,
    measure,
    place_of,
    residual,
    store_codes,
    store_words,
    value_of,
)
from elbowroom.kernels.triton.device import TILE, store_restored, tile_payload
from elbowroom.kernels.triton.launch import launch, split_seed, words

_NOISE = {"dither": (True, True), "stochastic": (True, False), "nearest": (False, False)}


def comet_quantize(
    x: Tensor,
    grid: Tensor,
    seed: int | Tensor,
    rounding: str,
    aware: bool,
    rows: int,
    columns: int,
    inner: int,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """into: the payload, its spill and its size (`comet_quantize_into`); None: as it is needed."""
    n = x.numel()
    bits, headers, sizes = outputs.comet(x, aware=aware)
    if aware:
        bits = pack_bits(x)
    starts = torch.zeros(tiles(n) + 1, dtype=torch.int64, device=x.device)
    noise, back = _NOISE[rounding]
    source, kind = words(x)
    args = source, grid, headers, starts
    given = n, rows, columns, inner, *split_seed(seed)
    fixed = {"AWARE": aware, "NOISE": noise, "BACK": back, "PREDICT": rows > 0, "KIND": kind}
    launch(_measure, tiles(n), *args, *given, **fixed)
    sizes.copy_(starts[1:])
    starts.cumsum_(dim=0)
    if into is None:
        payload, spill = outputs.bytes_of(x, int(starts[-1])), None  # the host waits
    else:
        payload, spill, used = into
        used.copy_(starts[-1:])
    there = payload, spill, payload.numel(), TILE_SIZE * x.element_size()
    launch(_encode, tiles(n), *args, *there, *given, **fixed)
    return bits, headers, sizes, payload


def comet_quantize_into(
    x: Tensor,
    grid: Tensor,
    seed: int | Tensor,
    rounding: str,
    aware: bool,
    rows: int,
    columns: int,
    inner: int,
    payload: Tensor,
    spill: Tensor,
    used: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    given = grid, seed, rounding, aware, rows, columns, inner
    return comet_quantize(x, *given, (payload, spill, used))[:3]


def comet_dequantize(
    bits: Tensor,
    headers: Tensor,
    sizes: Tensor,
    payload: Tensor,
    grid: Tensor,
    seed: int | Tensor,
    rounding: str,
    rows: int,
    columns: int,
    inner: int,
    out: Tensor,
    spill: Tensor | None = None,
) -> None:
    n = out.numel()
    if n == 0:
        return
    starts = torch.zeros(tiles(n) + 1, dtype=torch.int64, device=out.device)
    torch.cumsum(sizes.clamp(min=0), dim=0, out=starts[1:])
    noise, back = _NOISE[rounding]
    target, kind = words(out)
    codes = torch.empty(n if rows else 0, dtype=torch.int32, device=out.device)
    kinds = torch.empty(n if rows else 0, dtype=torch.uint8, device=out.device)
    there = starts, payload, spill, payload.numel(), TILE_SIZE * out.element_size()
    args = bits, headers, *there, grid, target, codes, kinds
    given = n, *split_seed(seed)
    fixed = {"BACK": back, "KIND": kind}
    launch(_decode, tiles(n), *args, *given, AWARE=bits.numel() > 0, PREDICT=rows > 0, **fixed)
    if rows:
        BC = triton.next_power_of_2(columns)
        BI = min(triton.next_power_of_2(inner), max(1, 1024 // BC))
        parts = triton.cdiv(inner, BI)
        programs = triton.cdiv(n, rows * columns * inner) * parts
        sized = n, rows, columns, inner, parts, *split_seed(seed)
        launch(
            _restore, programs, codes, kinds, grid, target, *sized,
            NOISE=noise, BC=BC, BI=BI, R=1, **fixed,
        )  # fmt: skip


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _measure(
    p_x, p_grid, p_headers, p_starts, N, rows, columns, inner, seed_low, seed_high,
    AWARE: tl.constexpr, NOISE: tl.constexpr, BACK: tl.constexpr, PREDICT: tl.constexpr,
    KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    BB: tl.constexpr = R * TILE // 32
    ITEM: tl.constexpr = 4 if KIND == 0 else 2
    i_b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    o_x = i_b[:, None] * 32 + tl.arange(0, 32)[None, :]  # [BB, 32]
    each = tl.minimum(tl.maximum(N - i_b * 32, 0), 32).to(tl.int32)
    b_r, m_some, m_bad = residual(
        p_x, p_grid, o_x, N, rows, columns, inner, seed_low, seed_high, NOISE, BACK, PREDICT, KIND
    )
    b_header, b_size = measure(b_r, m_some, m_bad, each, ITEM, AWARE)
    tl.store(p_headers + i_b, b_header.to(tl.uint8), mask=each > 0)
    i_t = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    b_total = tl.sum(tl.reshape(b_size, [R, TILE // 32]), axis=1)
    tl.store(p_starts + 1 + i_t, b_total.to(tl.int64), mask=i_t * TILE < N)


@triton.jit(do_not_specialize=["N_PAYLOAD", "MOST", "seed_low", "seed_high"])
def _encode(
    p_x, p_grid, p_headers, p_starts, p_payload, p_spill, N_PAYLOAD, MOST,
    N, rows, columns, inner, seed_low, seed_high,
    AWARE: tl.constexpr, NOISE: tl.constexpr, BACK: tl.constexpr, PREDICT: tl.constexpr,
    KIND: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    BB: tl.constexpr = R * TILE // 32
    ITEM: tl.constexpr = 4 if KIND == 0 else 2
    i_b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    o_l = tl.arange(0, 32)[None, :]
    o_x = i_b[:, None] * 32 + o_l
    each = tl.minimum(tl.maximum(N - i_b * 32, 0), 32).to(tl.int32)
    b_r, m_some, _ = residual(
        p_x, p_grid, o_x, N, rows, columns, inner, seed_low, seed_high, NOISE, BACK, PREDICT, KIND
    )
    b_header = tl.load(p_headers + i_b, mask=each > 0, other=0).to(tl.int32)
    i_t = i_b // (TILE // 32)
    p_tile, _ = tile_payload(p_payload, p_spill, p_starts, i_t, each > 0, N_PAYLOAD, MOST)
    m_masked = (b_header & 64) != 0
    k = tl.where(m_masked, tl.sum(m_some.to(tl.int32), axis=1), each)
    b_bitmap, b_body = block_starts(b_header, k, each, ITEM, AWARE, R)
    p_bitmap, p_body = p_tile + b_bitmap, p_tile + b_body  # [BB]
    if not AWARE:
        b_word = tl.sum(m_some.to(tl.int64) << o_l, axis=1)
        for i in tl.static_range(4):
            tl.store(p_bitmap + i, ((b_word >> (8 * i)) & 255).to(tl.uint8), mask=m_masked)
    m_raw = b_header == RAW
    store_words(p_x, p_body, o_x, m_raw[:, None] & (o_x < N), m_some, ITEM, KIND)
    b_code = tl.where((b_header[:, None] & ZIGZAG) != 0, (b_r << 1) ^ (b_r >> 31), b_r)
    m_filled = is_filled(b_header)[:, None]
    b_code = tl.where(m_filled, tl.where(m_some, b_code + 1, 0), b_code)
    o_rank, m_coded = place_of(m_some, m_masked, each)
    width = tl.where(m_raw, 0, b_header & 31)
    store_codes(p_body, b_code, o_rank, m_coded & (width > 0)[:, None], k, width)


@triton.jit(do_not_specialize=["N_PAYLOAD", "MOST", "seed_low", "seed_high"])
def _decode(
    p_bits, p_headers, p_starts, p_payload, p_spill, N_PAYLOAD, MOST,
    p_grid, p_out, p_codes, p_kinds, N, seed_low, seed_high,
    AWARE: tl.constexpr, PREDICT: tl.constexpr, BACK: tl.constexpr, KIND: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    BB: tl.constexpr = R * TILE // 32
    ITEM: tl.constexpr = 4 if KIND == 0 else 2
    i_b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    o_l = tl.arange(0, 32)[None, :]
    o_x = i_b[:, None] * 32 + o_l
    m_x = o_x < N
    each = tl.minimum(tl.maximum(N - i_b * 32, 0), 32).to(tl.int32)
    b_header = tl.load(p_headers + i_b, mask=each > 0, other=0).to(tl.int32)
    i_t = i_b // (TILE // 32)
    p_tile, _ = tile_payload(p_payload, p_spill, p_starts, i_t, each > 0, N_PAYLOAD, MOST)
    P = N_PAYLOAD - tl.load(p_starts + i_t, mask=each > 0, other=0)  # a payload may be damaged
    if p_spill is not None:
        P = tl.where(tl.load(p_starts + i_t + 1, mask=each > 0, other=0) <= N_PAYLOAD, P, MOST)
    P = P[:, None]
    m_masked, m_filled, m_raw = (b_header & 64) != 0, is_filled(b_header), b_header == RAW
    if AWARE:
        b_byte = tl.load(p_bits + o_x // 8, mask=m_x, other=0).to(tl.int32)
        m_masked = (b_header < RAW) | m_masked
    else:  # where a block's bitmap lies depends on headers alone
        b_bitmap, _ = block_starts(b_header, each, each, ITEM, AWARE, R)
        o_byte = b_bitmap[:, None] + o_l // 8
        b_byte = tl.load(p_tile[:, None] + o_byte, mask=m_masked[:, None] & (o_byte < P), other=0)
    m_some = (((b_byte.to(tl.int32) >> (o_l % 8)) & 1) != 0) & m_x
    k = tl.where(m_masked, tl.sum(m_some.to(tl.int32), axis=1), each)
    _, b_body = block_starts(b_header, k, each, ITEM, AWARE, R)
    o_rank, m_coded = place_of(m_some, m_masked, each)
    m_coded = m_coded & ((b_header != 0) & ~m_raw)[:, None]
    b_code = load_codes(p_tile, b_body, o_rank, m_coded, k, b_header & 31, P)
    m_coded = m_coded & ((b_code != 0) | ~m_filled[:, None])
    b_code = tl.where(m_filled[:, None], b_code - 1, b_code)
    b_zag = (b_code >> 1) ^ -(b_code & 1)
    b_code = tl.where((b_header[:, None] & ZIGZAG) != 0, b_zag, b_code)
    if PREDICT:
        tl.store(p_codes + o_x, tl.where(m_coded, b_code, 0), mask=m_x)
        b_kind = tl.where(m_raw[:, None], 2, m_coded.to(tl.int32))
        tl.store(p_kinds + o_x, b_kind.to(tl.uint8), mask=m_x)
        store_restored(p_out + o_x, tl.zeros([BB, 32], tl.float32), m_x & ~m_raw[:, None], KIND)
    else:
        b_x = value_of(b_code, p_grid, o_x, seed_low, seed_high, BACK, KIND)
        m_fine = m_x & ~m_raw[:, None]
        store_restored(p_out + o_x, tl.where(m_coded, b_x, 0.0), m_fine, KIND)
    load_words(p_tile, b_body, p_out, o_x, m_raw[:, None] & m_x, P, ITEM, KIND)


@triton.jit
def _chain(b_a, m_a, b_b, m_b):
    """Sums that start anew where m is not 0."""
    return tl.where(m_b != 0, b_b, b_a + b_b), m_a | m_b


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _restore(
    p_codes, p_kinds, p_grid, p_out, N, rows, columns, inner, parts, seed_low, seed_high,
    NOISE: tl.constexpr, BACK: tl.constexpr, KIND: tl.constexpr, BC: tl.constexpr,
    BI: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A map, or a part of its channels, row by row; q replaces the residuals in p_codes."""
    i_p = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)[:, None]
    o_i = (i_p % parts) * BI + tl.arange(0, BI)[None, :]
    row = columns * inner
    o_x = (i_p // parts) * rows * row + o_c * inner + o_i  # [BC, BI]
    m_place = (o_c < columns) & (o_i < inner)
    for i_r in range(rows):
        m_x = m_place & (o_x < N)
        b_kind = tl.load(p_kinds + o_x, mask=m_x, other=0).to(tl.int32)
        b_q = tl.load(p_codes + o_x, mask=m_x, other=0)
        m_above = m_x & (i_r > 0)
        b_q += tl.load(p_codes + o_x - row, mask=m_above & (b_kind == 1), other=0)
        m_left = m_above & (o_c > 0) & (b_kind == 1)
        b_q -= tl.load(p_codes + o_x - row - inner, mask=m_left, other=0)
        m_raw = m_x & (b_kind == 2)
        b_known, _, _ = element(p_out, p_grid, o_x, m_raw, seed_low, seed_high, NOISE, BACK, KIND)
        b_q = tl.where(m_raw, b_known, b_q)
        b_q, _ = tl.associative_scan((b_q, (b_kind != 1).to(tl.int32)), 0, _chain)
        tl.store(p_codes + o_x, b_q, mask=m_x)
        b_x = value_of(b_q, p_grid, o_x, seed_low, seed_high, BACK, KIND)
        store_restored(p_out + o_x, b_x, m_x & (b_kind == 1), KIND)
        tl.debug_barrier()  # the next row reads this one
        o_x += row
