"""Gradients of attention from q, k and v alone (specification: `reference/attention_backward.py`).

Some rows of the weights at once, whole, which takes five products of matrices (`register_tile.py`):

    p = softmax(f q k^T + mask)    dp = g v^T    ds = p (dp - sum(p dp))
    dv += p^T g                    dk += ds^T (f q)    dq = f ds k

k^T and v^T lie in panels of sixteen keys, so that a tile of p reads what is in the first cache.
Widths and keys are filled up with zeros to whole tiles. Each head of k and v is one work item's.
"""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from elbowroom.kernels.numba.addresses import array_at
from elbowroom.kernels.numba.compiled import f32, i32, jit, summing
from elbowroom.kernels.numba.lanes import left32
from elbowroom.kernels.numba.lanes import most as higher
from elbowroom.kernels.numba.launch import parallel
from elbowroom.kernels.numba.register_tile import COLUMNS, multiply, whole_columns, whole_rows
from elbowroom.kernels.numba.rounding import BOTTOM, as_bits, as_float, order

_QUERIES = 32  # rows of the weights at once
_LEAST = f32(-80)  # exp of less is 0 here: 2e-35 of the largest weight of its row
_LOG2_E, _MAGIC = f32(1.4426950408889634), f32(12582912.0)  # 1.5 * 2^23: a sum with it is rounded
_LN2_HIGH, _LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)
_EXPONENT = i32(127 - 0x4B400000)  # the bias of an exponent, less the bits of _MAGIC
_INF, _HIDES = f32(np.inf), f32(np.finfo(f32).min / 2)
_NONE, _BOOL, _FLOAT = range(3)  # kinds of a mask
# One rounding of a product and its sum; no other order, which would undo `_MAGIC`.
_exact = njit(cache=True, error_model="numpy", nogil=True, _nrt=False, fastmath={"contract", "nsz"})


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    factor: float,
    of_q: Tensor,
    of_k: Tensor,
    of_v: Tensor,
) -> None:
    (B, H, T, E), (_, G, S, F) = q.shape, v.shape
    q, k, v, grad = map(_in_rows, (q, k, v, grad))
    made = of_q, of_k, of_v
    results = tuple(x if x.stride(3) == 1 else x.new_empty(x.shape) for x in made)
    items = min(B * G, torch.get_num_threads())
    scratch = q.new_empty(items, scratch_size(S, E, F))
    kind, of_mask = _NONE, 0
    by_mask: tuple[int, ...] = 0, 0, 0, 0
    if mask is not None:
        kind = _BOOL if mask.dtype is torch.bool else _FLOAT
        mask = mask.expand(B, H, T, S)
        of_mask, by_mask = mask.data_ptr(), mask.stride()
    tensors = q, k, v, grad, *results
    _gradients(
        *(x.data_ptr() for x in tensors),
        *(x.stride()[:3] for x in tensors),
        *(of_mask, by_mask, kind),
        *((B, H, G), (T, S, E, F), is_causal, f32(factor)),
        *(scratch.data_ptr(), scratch.stride(0), items),
        size=B * H * T * S,
    )
    for x, result in zip(made, results, strict=True):
        if x is not result:
            x.copy_(result)


def _in_rows(x: Tensor) -> Tensor:
    """Returns x, whose elements of a row lie side by side, or a copy."""
    return x if x.stride(3) == 1 else x.contiguous()


@jit
def scratch_size(S, E, F):
    """Return the floats that a work item takes: k, k^T, v^T, dk, dv, and rows of all others."""
    keys, of_k, of_v = whole_columns(S), whole_columns(E), whole_columns(F)
    return keys * (3 * of_k + 2 * of_v) + _QUERIES * (2 * keys + 2 * of_k + of_v)


@jit
def _clear(x):
    """Fill x [n] with zeros: a loop with its own function, which numba leaves where it stands.

    It drops an assignment to a whole array that it sees no reader of, as of an address.
    """
    for o in range(x.shape[0]):
        x[o] = f32(0)


@jit
def _most(x):
    """The largest of x [n]; NaN if one is."""
    found = BOTTOM
    bits = x.view(np.int32)
    for o in range(bits.shape[0]):
        found = higher(found, order(bits[o]))
    return as_float(order(found))


@_exact
def _exponentials(x, most):
    """x [n] becomes exp(x - most)."""
    for o in range(x.shape[0]):
        given = x[o] - most
        z = _LEAST if given < _LEAST else given
        shifted = z * _LOG2_E + _MAGIC
        whole = shifted - _MAGIC
        r = z - whole * _LN2_HIGH - whole * _LN2_LOW
        y = f32(1.9875691500e-4) * r + f32(1.3981999507e-3)
        y = y * r + f32(8.3334519073e-3)
        y = y * r + f32(4.1665795894e-2)
        y = y * r + f32(1.6666665459e-1)
        y = y * r + f32(5.0000001201e-1)
        y = y * r * r + r + f32(1)
        power = as_float(left32(as_bits(shifted) + _EXPONENT, i32(23)))
        x[o] = f32(0) if given < _LEAST else y * power


@summing
def _sums(p, dp):
    total, product = f32(0), f32(0)
    for o in range(p.shape[0]):
        total += p[o]
        product += p[o] * dp[o]
    return total, product


@_exact
def _weigh(p, dp, share, mean):
    """p becomes a share of itself, and dp the gradient of the logits."""
    for o in range(p.shape[0]):
        weight = p[o] * share
        p[o] = weight
        dp[o] = weight * (dp[o] - mean)


@jit
def _row(p, dp):
    """Logits and the gradients of weights of a query [n] become weights and gradients of logits."""
    most = _most(p)
    if most == -_INF:  # nothing is left of it
        _clear(p)
        _clear(dp)
        return
    _exponentials(p, most)
    total, product = _sums(p, dp)
    share = f32(1) / total
    _weigh(p, dp, share, product * share)


@jit
def _add_mask(p, at, step, kind):
    """Adds a row of a mask to the logits [n] of a query."""
    n = p.shape[0]
    if kind == _BOOL:
        seen = array_at(at, (n - 1) * step + 1, np.uint8)
        for o in range(n):
            p[o] = p[o] if seen[o * step] else -_INF
    else:
        added = array_at(at, (n - 1) * step + 1, f32)
        for o in range(n):
            p[o] += added[o * step]


@jit
def _last_seen(at, step, S, kind):
    """Return how many keys of a row come before those that are hidden at its end.

    The largest negative number hides as infinity does, but for rows that it fills.
    """
    if kind == _BOOL:
        seen = array_at(at, (S - 1) * step + 1, np.uint8)
        for o in range(S - 1, -1, -1):
            if seen[o * step]:
                return o + 1
        return 0
    added = array_at(at, (S - 1) * step + 1, f32)
    for o in range(S - 1, -1, -1):
        if not added[o * step] <= _HIDES:
            return o + 1
    for o in range(S - 1, -1, -1):
        if added[o * step] > -_INF:
            return o + 1
    return 0


@jit
def _load(x, step, n, width, factor, out):
    """x [n, width] times a factor -> the first columns of out [n, whole width]."""
    padded = whole_columns(width)
    for s in range(n):
        row, made = array_at(x + 4 * s * step, width, f32), out[s * padded : s * padded + width]
        for o in range(width):
            made[o] = factor * row[o]


@jit
def _load_panels(x, step, n, width, out):
    """x [n, width] -> its transpose in panels: out [n / 16, whole width, 16]."""
    padded = whole_columns(width)
    for s in range(n):
        row = array_at(x + 4 * s * step, width, f32)
        first = s // COLUMNS * COLUMNS * padded + s % COLUMNS
        for o in range(width):
            out[first + o * COLUMNS] = row[o]


@jit
def _store(x, step, n, width, factor, out):
    """x [n, whole width] times a factor -> out [n, width], whose rows begin `step` apart."""
    padded = whole_columns(width)
    for s in range(n):
        row, made = x[s * padded : s * padded + width], array_at(out + 4 * s * step, width, f32)
        for o in range(width):
            made[o] = factor * row[o]


@jit
def _place(x, of_batch, b, h):
    """Return the address of head h of sample b."""
    return x + 4 * (b * of_batch[0] + h * of_batch[1])


@parallel
def _gradients(
    q, k, v, g, of_q, of_k, of_v,
    by_q, by_k, by_v, by_g, by_of_q, by_of_k, by_of_v,
    mask, by_mask, kind, heads, sizes, is_causal, factor, scratch, scratch_step, items,
):  # fmt: skip
    B, H, G = heads
    T, S, E, F = sizes
    keys, wide_k, wide_v = whole_columns(S), whole_columns(E), whole_columns(F)
    one, width = f32(1), 4 if kind == _FLOAT else 1
    each = (B * G + items - 1) // items
    for item in prange(items):
        at_k = scratch + 4 * item * scratch_step
        at_kt = at_k + 4 * keys * wide_k
        at_vt = at_kt + 4 * keys * wide_k
        at_dk = at_vt + 4 * keys * wide_v
        at_dv = at_dk + 4 * keys * wide_k
        at_p = at_dv + 4 * keys * wide_v
        at_ds = at_p + 4 * _QUERIES * keys
        at_q = at_ds + 4 * _QUERIES * keys
        at_dq = at_q + 4 * _QUERIES * wide_k
        at_g = at_dq + 4 * _QUERIES * wide_k
        _clear(array_at(at_k, scratch_step, f32))
        k_rows, k_panels = array_at(at_k, keys * wide_k, f32), array_at(at_kt, keys * wide_k, f32)
        v_panels = array_at(at_vt, keys * wide_v, f32)
        dk, dv = array_at(at_dk, keys * wide_k, f32), array_at(at_dv, keys * wide_v, f32)
        p, ds = array_at(at_p, _QUERIES * keys, f32), array_at(at_ds, _QUERIES * keys, f32)
        rows_q, rows_dq = (
            array_at(at_q, _QUERIES * wide_k, f32),
            array_at(at_dq, _QUERIES * wide_k, f32),
        )
        rows_g = array_at(at_g, _QUERIES * wide_v, f32)
        for pair in range(item * each, min(item * each + each, B * G)):
            b, group = pair // G, pair % G
            _load(_place(k, by_k, b, group), by_k[2], S, E, one, k_rows)
            _load_panels(_place(k, by_k, b, group), by_k[2], S, E, k_panels)
            _load_panels(_place(v, by_v, b, group), by_v[2], S, F, v_panels)
            _clear(dk)
            _clear(dv)
            for h in range(group * (H // G), (group + 1) * (H // G)):
                of_mask = mask + width * (b * by_mask[0] + h * by_mask[1])
                for first in range(0, T, _QUERIES):
                    n = min(_QUERIES, T - first)
                    rows = whole_rows(n)
                    if n < rows:
                        _clear(rows_q)
                        _clear(rows_g)
                    _load(
                        _place(q, by_q, b, h) + 4 * first * by_q[2], by_q[2], n, E, factor, rows_q
                    )
                    _load(_place(g, by_g, b, h) + 4 * first * by_g[2], by_g[2], n, F, one, rows_g)
                    seen = min(S, first + n) if is_causal else S
                    if kind != _NONE:
                        last = 0
                        for r in range(n):
                            at = of_mask + width * (first + r) * by_mask[2]
                            last = max(last, _last_seen(at, by_mask[3], seen, kind))
                        seen = last
                    wide = whole_columns(seen)
                    panel = COLUMNS * wide_k
                    multiply(
                        at_p, keys, at_q, wide_k, 1, at_kt,
                        panel, COLUMNS, rows, wide, wide_k, 0,
                    )  # fmt: skip
                    panel = COLUMNS * wide_v
                    multiply(
                        at_ds, keys, at_g, wide_v, 1, at_vt,
                        panel, COLUMNS, rows, wide, wide_v, 0,
                    )  # fmt: skip
                    for r in range(rows):
                        end = 0
                        if r < n:
                            end = min(seen, first + r + 1) if is_causal else seen
                        start = r * keys
                        if end:
                            row = p[start : start + end]
                            if kind != _NONE:
                                at = of_mask + width * (first + r) * by_mask[2]
                                _add_mask(row, at, by_mask[3], kind)
                            _row(row, ds[start : start + end])
                        _clear(p[start + end : start + wide])
                        _clear(ds[start + end : start + wide])
                    if wide:
                        multiply(
                            at_dv, wide_v, at_p, 1, keys, at_g,
                            COLUMNS, wide_v, wide, wide_v, rows, 1,
                        )  # fmt: skip
                        multiply(
                            at_dk, wide_k, at_ds, 1, keys, at_q,
                            COLUMNS, wide_k, wide, wide_k, rows, 1,
                        )  # fmt: skip
                        multiply(
                            at_dq, wide_k, at_ds, keys, 1, at_k,
                            COLUMNS, wide_k, rows, wide_k, wide, 0,
                        )  # fmt: skip
                    else:
                        _clear(rows_dq)
                    made = _place(of_q, by_of_q, b, h) + 4 * first * by_of_q[2]
                    _store(rows_dq, by_of_q[2], n, E, factor, made)
            _store(dk, by_of_k[2], S, E, one, _place(of_k, by_of_k, b, group))
            _store(dv, by_of_v[2], S, F, one, _place(of_v, by_of_v, b, group))
