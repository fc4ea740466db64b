"""One step of an optimizer over encoded states, in one pass (specification: `reference/step.py`).

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

from elbowroom.kernels.numba.compiled import f32, i32, leaf, u32, u64
from elbowroom.kernels.numba.launch import array, parallel, split_seed, words
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
from elbowroom.kernels.numba.weights import NEAREST, floats_load, weights_load, weights_store
from elbowroom.kernels.reference.step import WEIGHT_STREAM
from elbowroom.kernels.states import BOUNDS, GROUP, KINDS, RULES, WEIGHTS, code_shape, rows_of

ADAMW, LION, SGD = range(len(RULES))
RUN = 4  # groups that are worked on together: their scratch, 20 KiB, stays in the nearest cache
ITEM = 64  # groups of a work item of the parallel loop
_EMPTY, _BYTES, _FLOATS = (np.empty(0, dtype) for dtype in (np.int8, np.uint8, np.float32))


def optimizer_step(
    param: Tensor,
    residual: Tensor | None,
    grad: Tensor,
    m_codes: Tensor,
    m_bounds: Tensor,
    v_codes: Tensor,
    v_bounds: Tensor,
    rule: str,
    weights: str,
    m_kind: str,
    v_kind: str,
    row: int,
    factors: list[float],
    seed: int,
) -> None:
    n = param.numel()
    if n == 0:
        return
    D, R, G = rows_of(n, row)
    _step(
        *words(param),
        _floats(param),
        _EMPTY if residual is None else array(residual.view(-1)),
        *words(grad),
        _floats(grad),
        *_state(m_codes, m_bounds, m_kind, n, row),
        *_state(v_codes, v_bounds, v_kind, n, row),
        RULES.index(rule),
        WEIGHTS.index(weights),
        *(D, R, G),
        np.array(factors, np.float32),
        *split_seed(seed),
        split_seed(seed ^ WEIGHT_STREAM)[0],
    )


def _floats(x: Tensor):
    return array(x) if x.dtype is torch.float32 else _FLOATS


def _state(codes: Tensor, bounds: Tensor, kind: str, n: int, row: int):
    """Codes, or floats; bounds; the kind, codes of a row and bounds of a group."""
    flat = codes.view(-1)
    held = (_BYTES, array(flat)) if kind == "fp32" else (array(flat.view(torch.uint8)), _FLOATS)
    return (
        *held,
        array(bounds.view(-1)),
        KINDS.index(kind),
        code_shape(kind, n, row)[1],
        BOUNDS[kind],
    )


@leaf
def adamw(w, at_w, g, at_g, m, at_m, v, at_v, f, n):
    decay, lr, b1, b1_rest, b2, b2_rest, root, eps = f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]
    for o in range(n):
        gradient = g[at_g + o]
        first = m[at_m + o] * b1 + gradient * b1_rest
        second = v[at_v + o] * b2 + (gradient * gradient) * b2_rest
        m[at_m + o], v[at_v + o] = first, second
        w[at_w + o] = w[at_w + o] * decay - (first * lr) / (np.sqrt(second) * root + eps)


@leaf
def lion(w, at_w, g, at_g, m, at_m, f, n):
    decay, lr, b1, b1_rest, b2, b2_rest = f[0], f[1], f[2], f[3], f[4], f[5]
    for o in range(n):
        gradient, before = g[at_g + o], m[at_m + o]
        c = before * b1 + gradient * b1_rest
        sign = f32(i32(c > f32(0)) - i32(c < f32(0)))
        w[at_w + o] = w[at_w + o] * decay - sign * lr
        m[at_m + o] = before * b2 + gradient * b2_rest


@leaf
def sgd(w, at_w, g, at_g, m, at_m, f, n):
    decay, lr, momentum, look, keep = f[0], f[1], f[2], f[3], f[4]
    for o in range(n):
        weight = w[at_w + o]
        d = g[at_g + o] + weight * decay
        first = m[at_m + o] * momentum + d
        m[at_m + o] = first
        w[at_w + o] = weight - (first * look + d * keep) * lr


@leaf
def update(rule, w, at_w, g, at_g, m, at_m, v, at_v, f, n):
    """`n` elements of each, from its own place on."""
    if rule == ADAMW:
        adamw(w, at_w, g, at_g, m, at_m, v, at_v, f, n)
    elif rule == LION:
        lion(w, at_w, g, at_g, m, at_m, f, n)
    else:
        sgd(w, at_w, g, at_g, m, at_m, f, n)


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
    """Where each group begins: in scratch, in m's codes, in v's; its size."""
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
    rule, weights, D, R, G, f, seed_low, seed_high, weight_seed_low,
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
        floats_load(grad, g_kind, at, g, n)
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
    update(rule, w, at_w, g, at_g, m, at_m, v, at_v, f, n)
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
def item_of_groups(
    i_c, b, spare, places,
    param, p_kind, param_floats, residual, grad, g_kind, grad_floats,
    m_codes, m_floats, m_bounds, m_kind, m_width, m_held,
    v_codes, v_floats, v_bounds, v_kind, v_width, v_held,
    rule, weights, D, R, G, f, seed_low, seed_high, weight_seed_low,
):  # fmt: skip
    """One step of a work item."""
    last = min(i_c * ITEM + ITEM, D * G)
    for first in range(i_c * ITEM, last, RUN):
        run_of_groups(
            first, min(first + RUN, last), b[0], b[1], b[2], b[3], b[4], b[5], b[6], spare, places,
            param, p_kind, param_floats, residual, grad, g_kind, grad_floats,
            m_codes, m_floats, m_bounds, m_kind, m_width, m_held,
            v_codes, v_floats, v_bounds, v_kind, v_width, v_held,
            rule, weights, D, R, G, f, seed_low, seed_high, weight_seed_low,
        )  # fmt: skip


# The loop does nothing but call: what it assigned, it would count references of.
@parallel
def _step(
    param, p_kind, param_floats, residual, grad, g_kind, grad_floats,
    m_codes, m_floats, m_bounds, m_kind, m_width, m_held,
    v_codes, v_floats, v_bounds, v_kind, v_width, v_held,
    rule, weights, D, R, G, f, seed_low, seed_high, weight_seed_low,
):  # fmt: skip
    for i_c in prange((D * G + ITEM - 1) // ITEM):
        b = np.empty((7, (RUN + 1) * GROUP), f32)
        spare, places = np.empty(RUN * GROUP, np.int32), np.empty((RUN, 4), np.uint64)
        item_of_groups(
            i_c, b, spare, places,
            param, p_kind, param_floats, residual, grad, g_kind, grad_floats,
            m_codes, m_floats, m_bounds, m_kind, m_width, m_held,
            v_codes, v_floats, v_bounds, v_kind, v_width, v_held,
            rule, weights, D, R, G, f, seed_low, seed_high, weight_seed_low,
        )  # fmt: skip
