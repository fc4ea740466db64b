"""One step of an optimizer over encoded states, in one pass (specification: `reference/step.py`).

All parameters of a call are one row of groups of 128, cut into work items of 64 groups: a hundred
small parameters keep all cores as busy as one large one does. A table says where the tensors of a
parameter lie; a work item looks up the parameter of its first group, and walks on from there.

Weight, gradient and states are read once and written once. What is float32 already is updated where
it lies; all else is loaded, a group of 128 at a time, into scratch that stays in the nearest cache.
(To copy floats there and back took three times as long as the update itself.) Rule and kinds are
integers; which loop serves is a branch a group, so that all formats share one compiled function and
one update.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.compiled import f32, i32, jit, leaf, u32, u64
from elbowroom.kernels.numba.launch import array, float_kind, parallel
from elbowroom.kernels.numba.moments import (
    FP32,
    LOG4,
    LOG8,
    SOFTSIGN4,
    load_first,
    load_second,
    store_first,
    store_second,
)
from elbowroom.kernels.numba.noise import high_uniform, low_uniform, tile_key, word_at
from elbowroom.kernels.numba.weights import NEAREST, halves_load, weights_load, weights_store
from elbowroom.kernels.reference.step import STEP_MASK, WEIGHT_STREAM
from elbowroom.kernels.states import BOUNDS, GROUP, KINDS, RULES, WEIGHTS, code_width

ADAMW, LION, SGD = range(len(RULES))
RUN = 4  # groups that are worked on together: their scratch, 20 KiB, stays in the nearest cache
ITEM = 64  # groups of a work item of the parallel loop
# Columns of the table, whose rows are parameters: seven addresses, then numbers.
P, RESIDUAL, G, M, M_BOUNDS, V, V_BOUNDS = range(7)
SIZE, ROW, GROUPS, M_WIDTH, V_WIDTH, SEED = range(7, 13)
COLUMNS = 13


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
    if not params or (skip is not None and array(skip)[()]):
        return
    table = np.zeros((len(params), COLUMNS), np.int64)
    tensors = params, residuals, grads, m_codes, m_bounds, v_codes, v_bounds
    for column, some in enumerate(tensors):
        if some:
            table[:, column] = [x.data_ptr() for x in some]
    size = table[:, SIZE] = np.array([p.numel() for p in params])
    p_kind, g_kind = float_kind(params[0]), float_kind(grads[0])
    noisy = (
        m_kind != "fp32" or v_kind not in ("fp32", "none") or (weights != "nearest" and p_kind == 1)
    )
    # Without noise nothing depends on rows, and short ones would make short groups.
    row = table[:, ROW] = np.maximum(rows if noisy else size, 1)
    table[:, GROUPS] = -(-row // GROUP)
    table[:, M_WIDTH], table[:, V_WIDTH] = code_width(m_kind, row), code_width(v_kind, row)
    table[:, SEED] = seeds
    if steps is not None:
        table[:, SEED] |= (array(steps) & STEP_MASK) << 32
    starts = np.zeros(len(params) + 1, np.int64)
    np.cumsum(size // row * table[:, GROUPS], out=starts[1:])
    _step(
        *(table, starts, array(factors), p_kind, g_kind),
        *(KINDS.index(m_kind), BOUNDS[m_kind], KINDS.index(v_kind), BOUNDS[v_kind]),
        *(RULES.index(rule), WEIGHTS.index(weights)),
        size=int(size.sum()),
    )


def advance(counters: list[Tensor], by: int) -> Tensor:
    made = torch.empty(len(counters), dtype=torch.float32)
    _advance(np.array([x.data_ptr() for x in counters], np.int64), np.float32(by), array(made))
    return made


@jit
def _advance(addresses, by, out):
    for i in range(addresses.shape[0]):
        counter = array_at(addresses[i], 1, np.float32)
        counter[0] += by
        out[i] = counter[0]


@leaf
def adamw(w, at_w, g, at_g, m, at_m, v, at_v, f, i_p, n):
    decay, lr, b1, b1_rest = f[i_p, 0], f[i_p, 1], f[i_p, 2], f[i_p, 3]
    b2, b2_rest, root, eps = f[i_p, 4], f[i_p, 5], f[i_p, 6], f[i_p, 7]
    for o in range(n):
        gradient = g[at_g + o]
        first = m[at_m + o] * b1 + gradient * b1_rest
        second = v[at_v + o] * b2 + (gradient * gradient) * b2_rest
        m[at_m + o], v[at_v + o] = first, second
        w[at_w + o] = w[at_w + o] * decay - (first * lr) / (np.sqrt(second) * root + eps)


@leaf
def lion(w, at_w, g, at_g, m, at_m, f, i_p, n):
    decay, lr, b1, b1_rest = f[i_p, 0], f[i_p, 1], f[i_p, 2], f[i_p, 3]
    b2, b2_rest = f[i_p, 4], f[i_p, 5]
    for o in range(n):
        gradient, before = g[at_g + o], m[at_m + o]
        c = before * b1 + gradient * b1_rest
        sign = f32(i32(c > f32(0)) - i32(c < f32(0)))
        w[at_w + o] = w[at_w + o] * decay - sign * lr
        m[at_m + o] = before * b2 + gradient * b2_rest


@leaf
def sgd(w, at_w, g, at_g, m, at_m, f, i_p, n):
    decay, lr, momentum, look, keep = f[i_p, 0], f[i_p, 1], f[i_p, 2], f[i_p, 3], f[i_p, 4]
    for o in range(n):
        weight = w[at_w + o]
        d = g[at_g + o] + weight * decay
        first = m[at_m + o] * momentum + d
        m[at_m + o] = first
        w[at_w + o] = weight - (first * look + d * keep) * lr


@leaf
def update(rule, w, at_w, g, at_g, m, at_m, v, at_v, f, i_p, n):
    """`n` elements of each, from its own place on, by the factors in row `i_p` of f."""
    if rule == ADAMW:
        adamw(w, at_w, g, at_g, m, at_m, v, at_v, f, i_p, n)
    elif rule == LION:
        lion(w, at_w, g, at_g, m, at_m, f, i_p, n)
    else:
        sgd(w, at_w, g, at_g, m, at_m, f, i_p, n)


@leaf
def draw(first, seed_low, seed_high, places, count, u, far):
    """u <- uniform numbers of a run, far <- those of the elements 64 places away.

    What a short group has too much, the next writes over.
    """
    for i in range(count):
        key = tile_key(u32(first + i), seed_low, seed_high)
        s = places[i, 0]
        for o in range(u64(GROUP // 2)):
            word = word_at(key, o)
            low, high = low_uniform(word), high_uniform(word)
            u[s + o], u[s + o + u64(GROUP // 2)] = low, high
            far[s + o], far[s + o + u64(GROUP // 2)] = high, low


@leaf
def find_places(first, count, R, G, m_width, m_kind, v_width, v_kind, places):
    """Finds where each group begins in scratch, in m's codes and in v's, and its size."""
    i_r, i_s = first // G, first % G
    start = i_r * R + i_s * u64(GROUP)
    for i in range(count):
        o = i_s * u64(GROUP)
        places[i, 0] = i_r * R + o - start
        places[i, 1] = i_r * m_width + (o >> u64(1) if m_kind == SOFTSIGN4 else o)
        places[i, 2] = i_r * v_width + (o >> u64(1) if v_kind == LOG4 else o)
        places[i, 3] = min(u64(GROUP), R - o)
        i_s += u64(1)
        if i_s == G:
            i_r, i_s = i_r + u64(1), u64(0)
    return start


@leaf
def run_of_groups(
    first, last, w, g, m, v, root, u, far, spare, places,
    param, p_kind, param_floats, residual, grad, g_kind, grad_floats,
    m_codes, m_floats, m_bounds, m_kind, m_width, m_held,
    v_codes, v_floats, v_bounds, v_kind, v_width, v_held,
    rule, weights, R, G, f, i_p, seed_low, seed_high, weight_seed_low,
):  # fmt: skip
    """One step of the groups from `first` to `last`; the arrays before `param` are scratch."""
    rooted = v_kind in (LOG8, LOG4)
    i_g, count = u64(first), u64(last - first)
    at = find_places(i_g, count, u64(R), u64(G), u64(m_width), m_kind, u64(v_width), v_kind, places)
    n = places[count - u64(1), 0] + places[count - u64(1), 3]
    b_m, b_v = i_g * u64(m_held), i_g * u64(v_held)
    at_w, at_g, at_m, at_v = at, at, at, at  # where they are updated: in place, or in scratch
    if p_kind:
        weights_load(param, p_kind, residual, at, w, n)
        at_w = u64(0)
    else:
        w = param_floats
    if g_kind:
        halves_load(grad, g_kind, at, g, n)
        at_g = u64(0)
    else:
        g = grad_floats
    if v_kind == FP32:
        v = v_floats
    else:
        load_second(v_kind, v_codes, v_bounds, b_v, places, count, v, root, spare)
        at_v = u64(0)
    if m_kind == FP32:
        m = m_floats
    else:
        load_first(m_kind, m_codes, m_bounds, b_m, places, count, root, rooted, m, spare)
        at_m = u64(0)
    update(rule, w, at_w, g, at_g, m, at_m, v, at_v, f, i_p, n)
    if weights != NEAREST and p_kind == 1:
        draw(i_g, weight_seed_low, seed_high, places, count, u, far)
    if p_kind:
        weights_store(w, u, weights, param, p_kind, residual, at, n)
    if m_kind != FP32:
        draw(i_g, seed_low, seed_high, places, count, u, far)
    if v_kind != FP32:
        store_second(v_kind, v, u, v_codes, v_bounds, b_v, places, count, root, spare)
    if m_kind != FP32:
        store_first(m_kind, m, far, root, rooted, m_codes, m_bounds, b_m, places, count, spare)


@leaf
def groups_of_parameter(
    first, last, b, spare, places, table, i_p, f, p_kind, g_kind,
    m_kind, m_held, v_kind, v_held, rule, weights,
):  # fmt: skip
    """One step of the groups from `first` to `last` of a parameter."""
    n, seed = table[i_p, SIZE], table[i_p, SEED]
    param = array_at(table[i_p, P], n, np.int16)
    param_floats = array_at(table[i_p, P], n, np.float32)
    residual = array_at(table[i_p, RESIDUAL], n if table[i_p, RESIDUAL] else 0, np.int8)
    grad = array_at(table[i_p, G], n, np.int16)
    grad_floats = array_at(table[i_p, G], n, np.float32)
    m_codes, m_floats = array_at(table[i_p, M], n, np.uint8), array_at(table[i_p, M], n, np.float32)
    v_codes, v_floats = array_at(table[i_p, V], n, np.uint8), array_at(table[i_p, V], n, np.float32)
    m_bounds = array_at(table[i_p, M_BOUNDS], n, np.int16)
    v_bounds = array_at(table[i_p, V_BOUNDS], n, np.int16)
    seed_low, seed_high = u32(seed & 0xFFFFFFFF), u32((seed >> 32) & 0xFFFFFFFF)
    for start in range(first, last, RUN):
        run_of_groups(
            start, min(start + RUN, last), b[0], b[1], b[2], b[3], b[4], b[5], b[6], spare, places,
            param, p_kind, param_floats, residual, grad, g_kind, grad_floats,
            m_codes, m_floats, m_bounds, m_kind, table[i_p, M_WIDTH], m_held,
            v_codes, v_floats, v_bounds, v_kind, table[i_p, V_WIDTH], v_held,
            rule, weights, table[i_p, ROW], table[i_p, GROUPS], f, i_p,
            seed_low, seed_high, u32(seed_low ^ u32(WEIGHT_STREAM)),
        )  # fmt: skip


@leaf
def parameter_at(starts, group):
    """The parameter that has this group of all; starts [parameters + 1]: the first of each."""
    low, high = 0, starts.shape[0] - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if starts[middle] <= group:
            low = middle
        else:
            high = middle
    return low


@leaf
def item_of_groups(
    i_c, b, spare, places, table, starts, f, p_kind, g_kind,
    m_kind, m_held, v_kind, v_held, rule, weights,
):  # fmt: skip
    """One step of a work item, which may be of several parameters."""
    first = i_c * ITEM
    last = min(first + ITEM, starts[starts.shape[0] - 1])
    i_p = parameter_at(starts, first)
    while first < last:
        stop = min(last, starts[i_p + 1])
        groups_of_parameter(
            first - starts[i_p], stop - starts[i_p], b, spare, places, table, i_p, f,
            p_kind, g_kind, m_kind, m_held, v_kind, v_held, rule, weights,
        )  # fmt: skip
        first = stop
        i_p += 1


# The loop does nothing but call: what it assigned, it would count references of.
@parallel
def _step(
    table, starts, f, p_kind, g_kind, m_kind, m_held, v_kind, v_held, rule, weights
):  # fmt: skip
    for i_c in prange((starts[starts.shape[0] - 1] + ITEM - 1) // ITEM):
        b = np.empty((7, (RUN + 1) * GROUP), f32)
        spare, places = np.empty(RUN * GROUP, np.int32), np.empty((RUN, 4), np.uint64)
        item_of_groups(
            i_c, b, spare, places, table, starts, f, p_kind, g_kind,
            m_kind, m_held, v_kind, v_held, rule, weights,
        )  # fmt: skip
