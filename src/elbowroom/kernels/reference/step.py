"""One step of an optimizer over encoded states: load, update in float32, store.

The update knows nothing of bits, and moves the weight by the moments before they are encoded again.
`factors` are the numbers of a rule, float32 in the order that its function names them.

    adamw   m, v = b1 m + (1-b1) g, b2 v + (1-b2) g^2;  w = decay w - lr m / (sqrt(v) root + eps)
    lion    w = decay w - lr sign(b1 m + (1-b1) g);     m = b2 m + (1-b2) g
    sgd     m = momentum m + (g + decay w);             w = w - lr (look m + keep (g + decay w))

Noise is a hash of (seed, group, element of the group), one for the weight and one for v. m takes
that of the v 64 places away: the noise of its own would bias it, as it is held relative to v.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from elbowroom.kernels.reference.moments import flat, grouped, load, store
from elbowroom.kernels.reference.noise import uniform
from elbowroom.kernels.reference.rounding import square_root
from elbowroom.kernels.reference.weights import weights_load, weights_store
from elbowroom.kernels.states import GROUP

STEP_MASK = (1 << 31) - 1  # of a step's number, as the upper half of a seed
WEIGHT_STREAM = 0x5851F42D  # the seed of weights is that of v, but for these bits
States = tuple[Tensor, Tensor, Tensor, Tensor]  # codes and bounds of m, then of v
Kinds = tuple[str, str]  # of m and v


def adamw(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Decoupled weight decay (arXiv 1711.05101); lr and root hold the corrections of the biases."""
    decay, lr, b1, b1_rest, b2, b2_rest, root, eps = factors
    m = m * b1 + g * b1_rest
    v = v * b2 + (g * g) * b2_rest
    return w * decay - (m * lr) / (square_root(v) * root + eps), m, v


def lion(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """The sign of an average (arXiv 2302.06675)."""
    decay, lr, b1, b1_rest, b2, b2_rest = factors
    update = (m * b1 + g * b1_rest).sign()
    return w * decay - update * lr, m * b2 + g * b2_rest, v


def sgd(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Momentum; (look, keep) = (1, 0), or (momentum, 1) for Nesterov's."""
    decay, lr, momentum, look, keep = factors
    g = g + w * decay
    m = m * momentum + g
    return w - (m * look + g * keep) * lr, m, v


_RULES: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]]
_RULES = {"adamw": adamw, "lion": lion, "sgd": sgd}
_FACTORS = {"adamw": 8, "lion": 6, "sgd": 5}


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
    """One step of many parameters: params, residuals and states are written.

    All of one dtype, their gradients of one dtype, dense, and taken in the order in which they lie
    in memory; float32 states, residuals and gradients lie as their parameter does. Codes and bounds
    have the shapes of `kernels/states.py`. An empty list: there are no such tensors. rows [P] are
    the elements of a row; factors [P, up to 8] float32 and seeds [P] are of one parameter each.
    `skip` (int32 []) on the device of the parameters: if it is not 0, nothing is written. `steps`
    (int64 [P]), too, there with `factors`: the upper halves of seeds, which hold none themselves.
    """
    if steps is not None:
        uppers = ((steps & STEP_MASK) << 32).tolist()
        seeds = [seed | upper for seed, upper in zip(seeds, uppers, strict=True)]
    for i, p in enumerate(params):
        lists = residuals, m_codes, m_bounds, v_codes, v_bounds
        held = [some[i] if some else None for some in lists]
        written = [x for x in (p, *held) if x is not None]
        before = [] if skip is None else [x.clone() for x in written]
        few = factors[i].tolist()[: _FACTORS[rule]]
        _step(p, grads[i], held, rule, weights, (m_kind, v_kind), rows[i], few, seeds[i])
        if skip is not None:
            for x, old in zip(written, before, strict=True):
                x.copy_(torch.where(skip == 0, x, old))


def advance(counters: list[Tensor], by: int) -> Tensor:
    """Adds `by` to counters (float32 []); what they are then [N], float32 in host memory."""
    torch._foreach_add_(counters, by)
    return torch.tensor([x.item() for x in counters])


def _step(
    param: Tensor,
    grad: Tensor,
    held: list[Tensor | None],
    rule: str,
    weights: str,
    kinds: Kinds,
    row: int,
    factors: list[float],
    seed: int,
) -> None:
    n = param.numel()
    if n == 0:
        return
    param, grad = in_memory(param), in_memory(grad)
    residual = None if held[0] is None else in_memory(held[0])
    nothing = param.new_empty(0)
    m_codes, m_bounds, v_codes, v_bounds = (
        nothing if x is None else in_memory(x) if x.is_floating_point() else x for x in held[1:]
    )
    states = m_codes, m_bounds, v_codes, v_bounds
    w, g = (grouped(x, row) for x in (weights_load(param, residual), grad.float()))
    m, v = states_load(states, kinds, row, n)
    w, m, v = _RULES[rule](w, g, m, v, factors)
    states_store(m, v, states, kinds, row, n, seed)
    u = None
    if weights != "nearest" and param.dtype is torch.bfloat16:
        u = flat(uniform(seed ^ WEIGHT_STREAM, 0, w.shape[0], w.device, GROUP), row, n)
    weights_store(flat(w, row, n), param, residual, weights, u)


def in_memory(x: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie in memory: a view [N]."""
    return x.detach().as_strided((x.numel(),), (1,))


def states_load(states: States, kinds: Kinds, row: int, n: int) -> tuple[Tensor, Tensor]:
    """m, v [groups, 128] float32."""
    (m_codes, m_bounds, v_codes, v_bounds), (m_kind, v_kind) = states, kinds
    v, root = None, None
    if v_kind != "none":
        v, root = load(v_kind, v_codes, v_bounds, row, n, None)
    m, _ = load(m_kind, m_codes, m_bounds, row, n, root)
    return m, torch.zeros_like(m) if v is None else v


def states_store(
    m: Tensor, v: Tensor, states: States, kinds: Kinds, row: int, n: int, seed: int
) -> None:
    """Inverse of `states_load`."""
    (m_codes, m_bounds, v_codes, v_bounds), (m_kind, v_kind) = states, kinds
    root = None

    def drawn(shift: int) -> Tensor:
        return uniform(seed, 0, m.shape[0], m.device, GROUP).roll(shift, dims=1)

    if v_kind != "none":
        root = store(v_kind, v, v_codes, v_bounds, row, n, None, partial(drawn, 0))
    store(m_kind, m, m_codes, m_bounds, row, n, root, partial(drawn, GROUP // 2))


def moments_dequantize(
    m_codes: Tensor,
    m_bounds: Tensor,
    v_codes: Tensor,
    v_bounds: Tensor,
    m_kind: str,
    v_kind: str,
    row: int,
    n: int,
) -> tuple[Tensor, Tensor]:
    """m, v [N] float32; v is 0 where there is none."""
    if n == 0:
        empty = m_codes.new_empty(0, dtype=torch.float32)
        return empty, empty.clone()
    m, v = states_load((m_codes, m_bounds, v_codes, v_bounds), (m_kind, v_kind), row, n)
    return flat(m, row, n), flat(v, row, n)


def moments_quantize(
    m: Tensor,
    v: Tensor,
    m_codes: Tensor,
    m_bounds: Tensor,
    v_codes: Tensor,
    v_bounds: Tensor,
    m_kind: str,
    v_kind: str,
    row: int,
    seed: int,
) -> None:
    """The states are written <- m, v [N] float32."""
    if m.numel() == 0:
        return
    n = m.numel()
    states = m_codes, m_bounds, v_codes, v_bounds
    states_store(grouped(m, row), grouped(v, row), states, (m_kind, v_kind), row, n, seed)
