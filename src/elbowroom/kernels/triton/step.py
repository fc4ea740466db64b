"""One step of an optimizer over encoded states, in one pass (specification: `reference/step.py`).

A program loads a few groups of 128 of one parameter, updates them in float32, and stores them. Rule
and kinds are constants of the compiler: a kernel for each combination that is used. A launch does
up to 1024 parameters: a table says where their tensors lie, and a program finds its parameter by
halving. A large parameter has a launch of its own, and no search.

The table stays on the device as long as tensors lie where they did. What changes from step to step
lies in tensors, so that a CUDA graph may launch a step again.
"""

from collections import OrderedDict
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels.reference import step as reference
from elbowroom.kernels.states import KINDS, RULES, WEIGHTS, code_width, rows_of
from elbowroom.kernels.triton.device import load_float, tile_key, uniform
from elbowroom.kernels.triton.launch import float_kind, launch
from elbowroom.kernels.triton.moments import (
    EXPANDED8,
    FP32,
    GROUP,
    LOG4,
    LOG8,
    SOFTSIGN4,
    SOFTSIGN8,
    load_first,
    load_second,
    store_first,
    store_second,
)
from elbowroom.kernels.triton.weights import NEAREST, weights_load, weights_store

ADAMW, LION, SGD = (tl.constexpr(rule) for rule in range(len(RULES)))
WEIGHT_STREAM = tl.constexpr(reference.WEIGHT_STREAM)
_GROUPS = 8  # of a program on a GPU: 8 elements a thread
_FACTORS = 8
_ALONE = 1 << 20  # elements from which on a parameter has a launch of its own
_HALVINGS = 10  # of the search for a parameter: up to 1024 in a launch
# Columns of the table (int64), whose rows are parameters: seven addresses, then numbers, the first
# program of a launch that works on it, and its place in the lists.
COLUMNS = tl.constexpr(15)
STEP_MASK = tl.constexpr(reference.STEP_MASK)
_MOST_TABLES = 64


def optimizer_step(
    params: list[Tensor],
    residuals: list[Tensor],
    grads: list[Tensor],
    m_codes: list[Tensor],
    m_bounds: list[Tensor],
    v_codes: list[Tensor],
    v_bounds: list[Tensor],
    rule: str,
    weights: str,
    m_kind: str,
    v_kind: str,
    rows: list[int],
    factors: Tensor,
    seeds: list[int],
    skip: Tensor | None,
    steps: Tensor | None = None,
) -> None:
    tensors = params, residuals, grads, m_codes, m_bounds, v_codes, v_bounds
    made = []
    for i, (p, row, seed) in enumerate(zip(params, rows, seeds, strict=True)):
        D, R, G = rows_of(p.numel(), row)
        widths = code_width(m_kind, row), code_width(v_kind, row)
        addresses = [some[i].data_ptr() if some else 0 for some in tensors]
        aligned = all(x % 16 == 0 for x in (*addresses, row, *widths))
        alone = i if p.numel() >= _ALONE else -1
        if D:
            made.append((alone, aligned, i, [*addresses, R, G, *widths, seed, D * G]))
    if not made:
        return
    made.sort(key=lambda one: one[:2])
    device = params[0].device
    is_gpu = params[0].is_cuda
    # The interpreter takes as long for a program, whatever is in it.
    R = _GROUPS if is_gpu else triton.next_power_of_2(max(one[-1][-1] for one in made))
    launches: list[tuple[int, int, int, bool]] = []
    table: list[list[int]] = []
    for (_, aligned), same in groupby(made, key=lambda one: one[:2]):
        found = list(same)
        for first in range(0, len(found), 1 << _HALVINGS):
            some, programs = found[first : first + (1 << _HALVINGS)], 0
            begin = len(table)
            for *_, place, numbers in some:
                table.append([*numbers, programs, place])
                programs += triton.cdiv(numbers[-1], R)
            launches.append((begin, len(some), programs, aligned))
    held = torch.tensor(table)
    if is_gpu:
        held = _held_there(held, device)
    factors = torch.nn.functional.pad(factors, (0, _FACTORS - factors.shape[1])).contiguous()
    if factors.device != device:
        factors = _sent(factors, device)
    for first, count, programs, aligned in launches:
        part = held[first : first + count]
        launch(
            _step,
            programs * R,
            *(part, factors, steps, skip, count),
            R=R,
            RULE=RULES.index(rule),
            WAY=WEIGHTS.index(weights),
            M_KIND=KINDS.index(m_kind),
            V_KIND=KINDS.index(v_kind),
            KIND=float_kind(params[0]),
            G_KIND=float_kind(grads[0]),
            RESIDUAL=bool(residuals),
            ALIGNED=aligned,
            HALVINGS=_HALVINGS if count > 1 else 0,
            FUSED=is_gpu,
        )


_tables: OrderedDict[tuple[object, ...], tuple[Tensor, Tensor]] = OrderedDict()
_captured: list[tuple[Tensor, Tensor]] = []  # a graph copies from the host's at each launch


def _held_there(table: Tensor, device: torch.device) -> Tensor:
    """Returns the table on the device; the one that is there already, if it is the same."""
    capturing = torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(device).cuda_stream
    key = device, stream, len(table), int(table[0, 0])
    known = _tables.pop(key, None)
    if known is None or not torch.equal(known[0], table):
        pinned = table.pin_memory()
        known = pinned, pinned.to(device, non_blocking=True)
        if capturing:
            _captured.append(known)
    _tables[key] = known
    while len(_tables) > _MOST_TABLES:
        _tables.popitem(last=False)
    return known[1]


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Copies from pinned memory, which torch keeps until it is copied: nothing waits."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@triton.jit
def adamw(b_w, b_g, b_m, b_v, decay, lr, b1, b1_rest, b2, b2_rest, root, eps):
    b_m = b_m * b1 + b_g * b1_rest
    b_v = b_v * b2 + (b_g * b_g) * b2_rest
    return b_w * decay - tl.div_rn(b_m * lr, tl.sqrt_rn(b_v) * root + eps), b_m, b_v


@triton.jit
def lion(b_w, b_g, b_m, decay, lr, b1, b1_rest, b2, b2_rest):
    b_c = b_m * b1 + b_g * b1_rest
    b_sign = (b_c > 0).to(tl.float32) - (b_c < 0).to(tl.float32)
    return b_w * decay - b_sign * lr, b_m * b2 + b_g * b2_rest


@triton.jit
def sgd(b_w, b_g, b_m, decay, lr, momentum, look, keep):
    b_d = b_g + b_w * decay
    b_m = b_m * momentum + b_d
    return b_w - (b_m * look + b_d * keep) * lr, b_m


@triton.jit
def floats_at(p_row, COLUMN: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a column: of float32 (KIND 0), bfloat16 (1, as int16) or float16 (2)."""
    if KIND == 0:
        p = tl.load(p_row + COLUMN).to(tl.pointer_type(tl.float32))
    elif KIND == 1:
        p = tl.load(p_row + COLUMN).to(tl.pointer_type(tl.int16))
    else:
        p = tl.load(p_row + COLUMN).to(tl.pointer_type(tl.float16))
    return tl.multiple_of(p, 16) if ALIGNED else p


@triton.jit
def codes_at(p_row, COLUMN: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a column: of a state's codes."""
    if KIND == FP32:
        p = tl.load(p_row + COLUMN).to(tl.pointer_type(tl.float32))
    elif KIND == SOFTSIGN8:
        p = tl.load(p_row + COLUMN).to(tl.pointer_type(tl.int8))
    else:
        p = tl.load(p_row + COLUMN).to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(p, 16) if ALIGNED else p


@triton.jit
def size_at(p_row, COLUMN: tl.constexpr, ALIGNED: tl.constexpr):
    n = tl.load(p_row + COLUMN)
    return tl.multiple_of(n, 16) if ALIGNED else n


@triton.jit
def parameter_of(i, p_table, count, HALVINGS: tl.constexpr):
    """The last parameter whose first program is not after program i."""
    i_p = i * 0
    for k in tl.static_range(HALVINGS):
        i_next = i_p + (1 << (HALVINGS - 1 - k))
        there = i_next < count
        first = tl.load(p_table + i_next * COLUMNS + 13, mask=there, other=0)
        i_p = tl.where(there & (first <= i), i_next, i_p)
    return i_p


@triton.jit
def _step(
    p_table, p_factors, p_steps, p_skip, count,
    RULE: tl.constexpr, WAY: tl.constexpr, M_KIND: tl.constexpr, V_KIND: tl.constexpr,
    KIND: tl.constexpr, G_KIND: tl.constexpr, RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr,
    HALVINGS: tl.constexpr, FUSED: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    ROOTED: tl.constexpr = V_KIND == LOG8 or V_KIND == LOG4
    M_SHIFT: tl.constexpr = 1 if M_KIND == SOFTSIGN4 else 0
    V_SHIFT: tl.constexpr = 1 if V_KIND == LOG4 else 0
    i = tl.program_id(0).to(tl.int64)
    i_p = parameter_of(i, p_table, count, HALVINGS)
    p_row = p_table + i_p * COLUMNS
    i_f = tl.load(p_row + 14)
    p_f = p_factors + i_f * 8
    p_w, p_g = floats_at(p_row, 0, KIND, ALIGNED), floats_at(p_row, 2, G_KIND, ALIGNED)
    p_residual = None
    if RESIDUAL:
        p_residual = tl.load(p_row + 1).to(tl.pointer_type(tl.int8))
        p_residual = tl.multiple_of(p_residual, 16) if ALIGNED else p_residual
    p_m, p_v = codes_at(p_row, 3, M_KIND, ALIGNED), codes_at(p_row, 5, V_KIND, ALIGNED)
    p_m_bounds = tl.load(p_row + 4).to(tl.pointer_type(tl.int16))
    p_v_bounds = tl.load(p_row + 6).to(tl.pointer_type(tl.int16))
    row, G = size_at(p_row, 7, ALIGNED), tl.load(p_row + 8)
    m_width, v_width = size_at(p_row, 9, ALIGNED), size_at(p_row, 10, ALIGNED)
    seed, groups = tl.load(p_row + 11), tl.load(p_row + 12)
    if p_steps is not None:
        seed = seed | ((tl.load(p_steps + i_f) & STEP_MASK) << 32)
    low, high = seed.to(tl.int32), (seed >> 32).to(tl.int32)

    i_g = ((i - tl.load(p_row + 13)) * R + tl.arange(0, R))[:, None]
    i_r, o_g = i_g // G, (i_g % G) * GROUP  # its row, where it begins there
    o_e = tl.arange(0, GROUP)[None, :]
    m_e = (i_g < groups) & (o_g + o_e < row)
    if p_skip is not None:
        m_e = tl.where(tl.load(p_skip) == 0, m_e, False)
    o_x = i_r * row + o_g + o_e
    o_m, o_v = i_r * m_width + (o_g >> M_SHIFT), i_r * v_width + (o_g >> V_SHIFT)

    b_w = weights_load(p_w, p_residual, o_x, m_e, KIND)
    b_g = load_float(p_g + o_x, m_e, G_KIND)
    b_v, b_root = load_second(p_v, p_v_bounds, o_v, o_x, i_g, o_e, m_e, V_KIND, FUSED)
    b_m = load_first(p_m, p_m_bounds, o_m, o_x, i_g, o_e, m_e, b_root, M_KIND, ROOTED, FUSED)

    f0, f1, f2, f3 = tl.load(p_f), tl.load(p_f + 1), tl.load(p_f + 2), tl.load(p_f + 3)
    f4, f5, f6, f7 = tl.load(p_f + 4), tl.load(p_f + 5), tl.load(p_f + 6), tl.load(p_f + 7)
    if RULE == ADAMW:
        b_w, b_m, b_v = adamw(b_w, b_g, b_m, b_v, f0, f1, f2, f3, f4, f5, f6, f7)
    elif RULE == LION:
        b_w, b_m = lion(b_w, b_g, b_m, f0, f1, f2, f3, f4, f5)
    else:
        b_w, b_m = sgd(b_w, b_g, b_m, f0, f1, f2, f3, f4)

    b_u = b_w
    if WAY != NEAREST and KIND == 1:
        b_u = uniform(tile_key(i_g, low ^ WEIGHT_STREAM, high), o_e, GROUP)
    weights_store(b_w, b_u, p_w, p_residual, o_x, m_e, WAY, KIND)
    if ROOTED or V_KIND == EXPANDED8:
        b_u = uniform(tile_key(i_g, low, high), o_e, GROUP)
    b_root = store_second(b_v, p_v, p_v_bounds, o_v, o_x, i_g, o_e, m_e, b_u, V_KIND, FUSED)
    if M_KIND != FP32:
        b_u = uniform(tile_key(i_g, low, high), o_e ^ (GROUP // 2), GROUP)
    store_first(b_m, p_m, p_m_bounds, o_m, o_x, i_g, o_e, m_e, b_root, b_u, M_KIND, ROOTED, FUSED)
