"""How fine a code of q, k and v must be for attention that is recomputed from it.

By the error of a logit for q, k and the bias, by the spread over tokens for v
(`plan/precision_floor.py`). A bias is a mask that wants a gradient (relative positions). What is
below `MIN_BIAS` is encoded as that, where all of it has no weight then as before.
"""

from dataclasses import replace
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.codecs.base import FLOATS
from elbowroom.kernels import ops
from elbowroom.kernels.fakes import would_wait
from elbowroom.plan import Need, Site
from elbowroom.plan.precision_floor import (
    MAX_LEVELS,
    MIN_BIAS,
    MIN_LOG_PROBABILITY,
    UNSEEN_LEVELS,
    half_suffices,
    levels_for,
    levels_for_bias,
    levels_for_values,
)
from elbowroom.plan.site import HALF_LEVELS, Formula, Reads
from elbowroom.runtime.consumers import Call, Levels, Reading, tolerant_arguments
from elbowroom.runtime.direct.attention.node import given_to
from elbowroom.runtime.normal import var_mean
from elbowroom.runtime.slot import Slot
from elbowroom.runtime.storage import untouchable

_SPARE = 2.0  # times the spread of now that a code has to serve, where spreads have grown
_GROUP = 64  # elements that share a step of a code, at most (`plan/precision_floor.py`)
_CANCELS = 1e-3  # of v's square: below that, no difference of two sums is its variance
_LOGITS, _VALUES = frozenset((0, 1, "query", "key")), frozenset((2, "value"))
_BIAS = frozenset((3, "attn_mask"))


def attention_reading(
    x: Tensor,
    call: Call,
    slot: Slot,
    reading: Reading,
    *,
    looks: bool,
    takes_half: bool,
    finer: bool,
) -> Reading:
    """Returns how attention reads x.

    Also notes how many levels a code must have (`Call.levels`).

    reading  how it would be read otherwise
    looks    whether to read values, on a CPU: x may become a code
    takes_half  whether a code of half of its bits may stand for q and k
    finer    whether codes have to serve forwards whose values need more levels than these, too
    """
    roles = tolerant_arguments(x, call)
    if _BIAS.intersection(roles):
        return _bias_reading(roles, call, reading, looks=looks, finer=finer)
    call.levels = _levels_of(roles, call, looks=looks, finer=finer)
    is_logits = bool(roles) and _LOGITS.issuperset(roles)
    if call.levels is None and is_logits and takes_half:
        call.levels = HALF_LEVELS if levels_by_values(call, finer=finer).halves else None
    if reading.need is not Need.LOSSY:
        return reading
    if call.levels is None and _LOGITS.intersection(roles):
        why = "attention's logits are too sharp for any code of q and k"
    elif call.levels is None:
        why = "attention's v varies too little over its tokens for any code of it"
    elif looks and slot.waits:
        why = "its code waits for another op"
    else:
        return reading
    return Reading(Need.EXACT, Formula.DIFFERENCE, why)


def _bias_reading(
    roles: list[int | str], call: Call, reading: Reading, *, looks: bool, finer: bool
) -> Reading:
    """Returns how attention reads its mask."""
    call.levels = None
    mask = call.arg(3, "attn_mask")
    if not mask.requires_grad or not _BIAS.issuperset(roles):
        why = "a mask of attention"
        return Reading(Need.EXACT, Formula.STATISTIC, why)
    if not looks or would_wait(mask) or type(mask) is not Tensor:
        return Reading(Need.EXACT, Formula.DIFFERENCE, "a bias of attention that is not examined")
    call.levels = levels_by_values(call, finer=finer).bias
    if call.levels is None:
        why = "attention's bias is too wide for any code of it"
        return Reading(Need.EXACT, Formula.DIFFERENCE, why)
    return reading._replace(formula=Formula.LOG_PROBABILITY, width=0)


def as_node(site: Site, x: Tensor, call: Call) -> Site:
    """Returns the site as it will be with our node; this step is profiled without it.

    The output, which fused attention saves, is then saved by its reader alone, so that any code
    suffices.
    """
    if call.reruns or call.levels is None or site.need is not Need.EXACT:
        return site
    if x.grad_fn is not None and x.grad_fn.name().startswith("ScaledDotProduct"):
        return replace(
            site,
            need=Need.LOSSY,
            formula=Formula.SUMMED,
            why="",
            least_levels=2,
            reads=Reads.GRADIENT,
        )
    if not tolerant_arguments(x, call):
        return site
    return replace(site, need=Need.LOSSY, formula=Formula.SUMMED, why="")


def _levels_of(roles: list[int | str], call: Call, *, looks: bool, finer: bool) -> int | None:
    """The fewest levels for a code of what attention saves; None: no code is fine enough.

    On a CPU it reads values, which is cheap there. On a GPU, where the host would have to wait, and
    for stand-ins, q and k get the most levels: enough for a standard deviation of 5.5. v gets twice
    what it needs where no channel stands out: enough for one that is off by 14 standard deviations.

    roles  which arguments it is
    """
    logits, values = _LOGITS.intersection(roles), _VALUES.intersection(roles)
    q = call.arg(0, "query")
    if not looks or would_wait(q) or type(q) not in (Tensor, nn.Parameter):
        return MAX_LEVELS if logits else UNSEEN_LEVELS
    fewest = levels_by_values(call, finer=finer)
    asked = [*([fewest.logits] if logits else []), *([fewest.values] if values else [])]
    return None if None in asked else max((n for n in asked if n), default=levels_for(0.0))


def levels_by_values(call: Call, *, finer: bool = False) -> Levels:
    """The fewest levels for codes of this call's q and k, and of its v.

    finer: with some to spare. As a model begins to learn, what it needs grows for many steps, and
    around a bound from batch to batch.
    """
    if call.fewest is None:
        (q, k, v, mask), *_ = given_to(*call.args, **call.kwargs)
        scale = call.kwargs.get("scale")
        times = _SPARE if finer else 1.0
        of_logits, of_values = spread(q, k, scale), spread_of_values(v)
        logits = levels_for(times * of_logits) or levels_for(of_logits)
        halves = logits is None and half_suffices(spread(q, k, scale, of_half=True))
        values = levels_for_values(times * of_values, logits)
        values = values or levels_for_values(of_values, logits)
        bias = None
        if mask is not None and mask.requires_grad:
            wide, grouped = spread_of_bias(mask, q, k, scale)
            bias = levels_for_bias(times * wide, times * grouped)
            bias = bias or levels_for_bias(wide, grouped)
        call.fewest = Levels(logits, values, halves, bias)
    return call.fewest


def spread(q: Tensor, k: Tensor, scale: float | None = None, *, of_half: bool = False) -> float:
    """The variance of the error of a logit, times (levels - 1)^2, of the head where it is largest.

    q [..., T, D], k [..., S, D]. Of a code with step r / (levels - 1), r the range of the elements
    that share it, the error of an element has the variance step^2 / 12. So, on average over rows,

        scale^2 (mean(|q|^2) mean(r_k^2) + mean(|k|^2) mean(r_q^2)) / 12

    Softmax follows the longest rows, and so does the gradient: a key that is 15 times as long as
    the others has all of the weight of a query or none, and the queries in between make up most of
    q's gradient. Each mean is weighted by |row|^6: of rows alike it is the mean, and one row that
    is 4 times as long outweighs 4,000.

    of_half: of a float with a step of |x| 2^-10 at most, times 2^20: the largest |x| of each row in
    place of its range.

    Rows of a multiple of 64 elements hold whole groups. Others may share a step with those of
    another head, whose range counts for them then.
    """
    with torch._C.DisableTorchFunction():
        scale = 1 / sqrt(q.shape[-1]) if scale is None else scale
        kernels = None if of_half else _by_address(q, k)
        if kernels is not None:
            found = kernels.logits_spread(q.shape[-1], *_heads_at(q), *_heads_at(k))
            return float(found) * scale**2 / 12
        heads = _of_heads_in_half if of_half else _of_heads
        (q_length, q_range, *_), (k_length, k_range, *_) = heads(q), heads(k)
        if q_length.shape != k_length.shape:  # grouped queries, broadcast batches
            q_length, q_range, k_length, k_range = (
                x.amax() for x in (q_length, q_range, k_length, k_range)
            )
        return float((q_length * k_range + k_length * q_range).max()) * scale**2 / 12


def channel_spread(q: Tensor, k: Tensor, scale: float) -> float:
    """Returns what k adds to `spread` at most where the tokens of a channel share a step.

    k [..., D, S]
    """
    with torch._C.DisableTorchFunction():
        of_q, *_ = _of_heads(q)
        k = k.float()
        ranges = (k.amax(-1) - k.amin(-1)).square_().sum(-1)
        if of_q.numel() == ranges.numel():
            return float((of_q.flatten() * ranges.flatten()).max()) * scale**2 / 12 / k.shape[-2]
        return float(of_q.max() * ranges.max()) * scale**2 / 12 / k.shape[-2]


def spread_of_bias(
    bias: Tensor, q: Tensor, k: Tensor, scale: float | None = None
) -> tuple[float, float]:
    """The largest variance of an element's error, times (levels - 1)^2; infinity: no code serves.

    First where all elements share a step, then where `_GROUP` in a row do. bias [..., T, S]

    What is below `MIN_BIAS` is encoded as that. It has less than e^-24 of the weight of its row
    before and after if the row has an element, of all rows alike, that is larger by 24 and by what
    q k^T can differ in. In a row without one (all of it masked) the weights are those of q k^T.
    """
    with torch._C.DisableTorchFunction():
        x = bias.detach()
        for dim, stride in enumerate(x.stride()):
            if stride == 0 and x.shape[dim] > 1:
                x = x.narrow(dim, 0, 1)
        least, most = (float(end) for end in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
        is_whole = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
        if x.dtype not in FLOATS or not is_whole or not most < inf or least != least:
            return inf, inf
        if least < MIN_BIAS:
            rows = float(x.amax(-1).amin()) if bias.stride(-1) or bias.shape[-1] == 1 else least
            if not rows >= MIN_BIAS - MIN_LOG_PROBABILITY + 2 * _largest_logit(q, k, scale):
                return inf, inf
            x, least = x.clamp_min(MIN_BIAS), MIN_BIAS
        flat = x.reshape(-1)
        whole = len(flat) // _GROUP * _GROUP
        parts = [flat[:whole].view(-1, _GROUP)] if whole else []
        parts += [flat[whole:].view(1, -1)] if whole < len(flat) else []
        ranges = [float((part.amax(1).float() - part.amin(1).float()).amax()) for part in parts]
        return (most - least) ** 2 / 12, max(ranges, default=0.0) ** 2 / 12


def _largest_logit(q: Tensor, k: Tensor, scale: float | None) -> float:
    """At least as large as any |logit|: the longest rows of q and k, as if they were parallel."""
    scale = 1 / sqrt(q.shape[-1]) if scale is None else abs(scale)
    longest = [float(x.detach().float().square().sum(-1).amax()) for x in (q, k)]
    return scale * sqrt(longest[0] * longest[1])


def _by_address(*tensors: Tensor) -> Any:
    """Returns kernels that take such q, k or v by their addresses; None: ops must serve them."""
    for x in tensors:
        if untouchable(x) or x.dim() != 4 or x.stride(-1) != 1 or not x.numel():
            return None
        kernels = ops.by_address(x)
        if kernels is None or x.numel() > kernels.SERIAL:  # a launch takes no time beside that
            return None
    return kernels


def _heads_at(x: Tensor) -> tuple[int, ...]:
    """The address of x [B, H, T, D], B, H and T, and their strides."""
    return x.data_ptr(), *x.shape[:3], *x.stride()[:3]


def _of_heads(x: Tensor) -> Tensor:
    """The means of |row|^2 and range^2 of each head, in which long rows weigh most, and the plain.

    x [..., H, T, D] -> [4, B, H], float32. A range is that of the elements that share a step with
    those of a row.
    """
    x = x.detach() if x.dim() == 4 else x.detach().reshape(-1, *x.shape[-3:])
    if x.dtype not in FLOATS or x.stride(-1) != 1:
        x = x.float().contiguous()
    (*sizes, width), (*strides, _) = x.shape, x.stride()
    n = width + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    flat = x.as_strided((n,), (1,))
    return ops.head_spread(flat, width, sizes, strides, width % _GROUP != 0)


def _of_heads_in_half(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first two of `_of_heads` for a 16-bit code, with the largest |element| for the range."""
    x = x.detach().float()
    norms, largest = x.square().sum(-1), x.abs().amax(-1)
    # 0 / 0 of a head of zeros: any weights do.
    weights = (norms / norms.amax(-1, keepdim=True)).pow_(3).nan_to_num_(1.0)
    weights /= weights.sum(-1, keepdim=True)
    return (norms * weights).sum(-1), (largest.square() * weights).sum(-1)


def spread_of_values(v: Tensor) -> float:
    """The variance of v's error over that of v, times (levels - 1)^2, of the worst head.

    v [..., S, D]. A logit's gradient is grad . (v_j - the weighted mean of v): what all tokens have
    in common cancels, but it widens the range that sets the step. So it is

        D mean(r_v^2) / 12 / (the sum over channels of the variance over tokens)
    """
    with torch._C.DisableTorchFunction():
        if v.shape[-2] == 1:
            return 0.0  # the only weight is 1, whatever v is
        kernels = _by_address(v)
        if kernels is not None:
            return float(kernels.values_spread(v.shape[-1], *_heads_at(v)))
        *_, norm, ranges = _of_heads(v)
        wide = torch.promote_types(v.dtype, torch.float32)
        mean = v.detach().mean(-2, dtype=wide).float().square().sum(-1)
        varies = norm - mean.view(norm.shape)
        if not bool((varies > _CANCELS * norm).all()):  # too little of it is left
            varies = var_mean(v.detach(), dim=-2)[0].sum((-2, -1)).float().view(norm.shape)
        noise = ranges * v.shape[-1] / 12
        return float((noise / varies).where(noise > 0, noise).max())
