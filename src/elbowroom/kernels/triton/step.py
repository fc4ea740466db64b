"""One step of an optimizer over encoded states, in one pass (specification: `reference/step.py`).

A program loads a few groups of 128, updates them in float32, and stores them. Rule and kinds are
constants of the compiler: a kernel for each combination that is used.
"""

import triton
import triton.language as tl
from torch import Tensor

from elbowroom.kernels.reference.step import WEIGHT_STREAM
from elbowroom.kernels.states import KINDS, RULES, WEIGHTS, code_shape, rows_of
from elbowroom.kernels.triton.device import load_float, tile_key, uniform
from elbowroom.kernels.triton.launch import launch, split_seed, words
from elbowroom.kernels.triton.moments import (
    EXPANDED8,
    FP32,
    GROUP,
    LOG4,
    LOG8,
    SOFTSIGN4,
    load_first,
    load_second,
    store_first,
    store_second,
)
from elbowroom.kernels.triton.weights import NEAREST, weights_load, weights_store

ADAMW, LION, SGD = (tl.constexpr(rule) for rule in range(len(RULES)))
_GROUPS = 8  # of a program on a GPU: 8 elements a thread
_FACTORS = 8


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
    (p_w, kind), (p_g, g_kind) = words(param), words(grad)
    low, high = split_seed(seed)
    launch(
        _step,
        D * G,
        *(p_w, residual, p_g, m_codes, m_bounds, v_codes, v_bounds),
        *(D * G, R, G, code_shape(m_kind, n, row)[1], code_shape(v_kind, n, row)[1]),
        *(factors + [0.0] * (_FACTORS - len(factors))),
        *(low, high, split_seed(seed ^ WEIGHT_STREAM)[0]),
        R=_GROUPS if param.is_cuda else None,
        RULE=RULES.index(rule),
        WAY=WEIGHTS.index(weights),
        M_KIND=KINDS.index(m_kind),
        V_KIND=KINDS.index(v_kind),
        KIND=kind,
        G_KIND=g_kind,
        FUSED=param.is_cuda,
    )


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


@triton.jit(do_not_specialize=["low", "high", "w_low"])
def _step(
    p_w, p_residual, p_g, p_m, p_m_bounds, p_v, p_v_bounds,
    groups, row, G, m_width, v_width, f0, f1, f2, f3, f4, f5, f6, f7, low, high, w_low,
    RULE: tl.constexpr, WAY: tl.constexpr, M_KIND: tl.constexpr, V_KIND: tl.constexpr,
    KIND: tl.constexpr, G_KIND: tl.constexpr, FUSED: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    ROOTED: tl.constexpr = V_KIND == LOG8 or V_KIND == LOG4
    M_SHIFT: tl.constexpr = 1 if M_KIND == SOFTSIGN4 else 0
    V_SHIFT: tl.constexpr = 1 if V_KIND == LOG4 else 0
    i_g = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    i_r, o_g = i_g // G, (i_g % G) * GROUP  # its row, where it begins there
    o_e = tl.arange(0, GROUP)[None, :]
    m_e = (i_g < groups) & (o_g + o_e < row)
    o_x = i_r * row + o_g + o_e
    o_m, o_v = i_r * m_width + (o_g >> M_SHIFT), i_r * v_width + (o_g >> V_SHIFT)

    b_w = weights_load(p_w, p_residual, o_x, m_e, KIND)
    b_g = load_float(p_g + o_x, m_e, G_KIND)
    b_v, b_root = load_second(p_v, p_v_bounds, o_v, o_x, i_g, o_e, m_e, V_KIND, FUSED)
    b_m = load_first(p_m, p_m_bounds, o_m, o_x, i_g, o_e, m_e, b_root, M_KIND, ROOTED, FUSED)

    if RULE == ADAMW:
        b_w, b_m, b_v = adamw(b_w, b_g, b_m, b_v, f0, f1, f2, f3, f4, f5, f6, f7)
    elif RULE == LION:
        b_w, b_m = lion(b_w, b_g, b_m, f0, f1, f2, f3, f4, f5)
    else:
        b_w, b_m = sgd(b_w, b_g, b_m, f0, f1, f2, f3, f4)

    b_u = b_w
    if WAY != NEAREST and KIND == 1:
        b_u = uniform(tile_key(i_g, w_low, high), o_e, GROUP)
    weights_store(b_w, b_u, p_w, p_residual, o_x, m_e, WAY, KIND)
    if ROOTED or V_KIND == EXPANDED8:
        b_u = uniform(tile_key(i_g, low, high), o_e, GROUP)
    b_root = store_second(b_v, p_v, p_v_bounds, o_v, o_x, i_g, o_e, m_e, b_u, V_KIND, FUSED)
    if M_KIND != FP32:
        b_u = uniform(tile_key(i_g, low, high), o_e ^ (GROUP // 2), GROUP)
    store_first(b_m, p_m, p_m_bounds, o_m, o_x, i_g, o_e, m_e, b_root, b_u, M_KIND, ROOTED, FUSED)
