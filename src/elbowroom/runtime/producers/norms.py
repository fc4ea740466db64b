"""Recipes of norms, which read the statistics that forward has saved."""

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from elbowroom.codecs import Affine
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.handles.rebuild import Op, Recipe
from elbowroom.runtime.normal import OfNormal, weight_and_bias
from elbowroom.runtime.producers.making import as_now, of_statistics, origin_of, present
from elbowroom.runtime.slot import Geometry, is_in_order
from elbowroom.runtime.sources import Sources
from elbowroom.runtime.statistics import logical_statistics, statistics_of
from elbowroom.runtime.storage import Origin


def rms_norm(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """Returns a recipe of RMSNorm.

    On a CPU the op is made of others, which save x as fp32 first of all. Where x wants no gradient
    they do not: the first that they save of its shape is x already normalized. So it is, too, where
    x is a part of a larger storage, whose slot has another shape.
    """
    x, shape, eps = call.first, call.arg(1, "normalized_shape"), call.arg(3, "eps")
    weight, dtype = as_now(call.arg(2, "weight")), x.dtype
    held = next((slot for slot in call.saved if slot.base.shape == tuple(x.shape)), None)
    if held is None or held.dtype is dtype:
        held = next((slot for slot in call.saved if slot is sources.slot(x)), None)
    if held is None or held.value is None or not (x.is_contiguous() and x.requires_grad):
        return None

    def run(x: Tensor) -> Tensor:
        return torch.rms_norm(x.to(dtype), shape, weight, eps)

    op = Op(run, run, fixed=present(weight), any_size=True)
    # Of a square transposed the base has the same shape, in another order.
    seen = Geometry.of(x) if held.dtype is dtype else held.base
    recipe = Recipe.of(op, held, seen, out, sources.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def layer_norm(call: Call, out: Tensor, sources: Sources) -> Origin:
    """The recipe of a LayerNorm."""
    shape, eps = call.arg(1, "normalized_shape"), call.arg(4, "eps", 1e-5)
    weight, bias = as_now(call.arg(2, "weight")), as_now(call.arg(3, "bias"))

    def exact(x: Tensor) -> Tensor:
        return torch.layer_norm(x, shape, weight, bias, eps)

    def bound(mean: Tensor, rstd: Tensor) -> Op:
        def lossy(x: Tensor) -> Tensor:
            x.sub_(mean).mul_(rstd)
            if weight is not None:
                x.mul_(weight)
            return x if bias is None else x.add_(bias)

        again = OfNormal(mean, rstd, inner, affine) if in_rows else None
        return plain.changed(lossy=lossy, of_normal=again)

    def affine() -> Affine:
        return weight_and_bias(weight, bias, inner, device, 1)

    x = call.first
    inner, device, of_row = prod(shape), x.device, -len(shape)
    in_rows = is_in_order(x.shape[of_row:], x.stride()[of_row:])
    statistics = logical_statistics(call, call.first)
    op = plain = Op(exact, fixed=present(weight, bias), any_size=True)
    if statistics is not None:
        op = of_statistics(bound, *statistics[1:])
    return origin_of(call, out, sources, op)


def group_norm(call: Call, out: Tensor, sources: Sources) -> Origin:
    """The recipe of a GroupNorm."""
    x, groups, eps = call.first, call.arg(1, "num_groups"), call.arg(4, "eps", 1e-5)
    weight, bias = as_now(call.arg(2, "weight")), as_now(call.arg(3, "bias"))
    op = Op(lambda x: torch.group_norm(x, groups, weight, bias, eps), fixed=present(weight, bias))
    return origin_of(call, out, sources, _of_groups(op, call, x, groups, weight, bias))


def _of_groups(
    op: Op, call: Call, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None
) -> Op:
    """A norm over the groups of each sample, with what it does to a channel if that is one pass."""
    statistics = logical_statistics(call, x)
    if statistics is None or not x.is_contiguous():
        return op
    each, inner = (x.shape[0], groups, x.shape[1] // groups), x[0, 0].numel()

    def bound(mean: Tensor, rstd: Tensor) -> Op:
        mean, rstd = (part.float().view(*each[:2], 1).expand(each) for part in (mean, rstd))

        def affine() -> Affine:
            scale = rstd.flatten(1)
            scale = scale if weight is None else scale * weight.float()
            shift = -mean.flatten(1) * scale
            shift = shift if bias is None else shift + bias.float()
            return Affine(scale.flatten(), shift.flatten(), inner)

        return op.changed(affine=affine)

    return of_statistics(bound, *statistics[1:])


def batch_norm(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of a BatchNorm."""
    if call.func is not F.batch_norm:
        return None
    weight, bias = as_now(call.arg(3, "weight")), as_now(call.arg(4, "bias"))
    training, eps = call.arg(5, "training", False), call.arg(7, "eps", 1e-5)
    used: tuple[Tensor | None, Tensor | None] = (None, None)
    if not training:  # else its own statistics; the running ones are not updated
        used = call.arg(1, "running_mean").clone(), call.arg(2, "running_var").clone()
    cudnn = torch.backends.cudnn.enabled
    plain = Op(
        lambda x: torch.batch_norm(x, weight, bias, *used, training, 0.0, eps, cudnn),
        fixed=present(weight, bias),
        given=present(*used),
    )
    statistics = statistics_of(call, call.first)
    if statistics is None:
        return origin_of(call, out, sources, plain)
    inner, of_batch = (statistics.inner, training and _is_one_pass(call.first, weight, bias))

    def of_given(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        return _batch_norm_of(x, mean, rstd, weight, bias)

    again = plain.changed(given=(), of_given=of_given) if of_batch else plain

    def bound(mean: Tensor, rstd: Tensor, *_: Tensor) -> Op:
        def affine() -> Affine:
            factor, center = rstd.float(), mean.float()
            scale = factor if weight is None else factor * weight.float()
            shift = -center * scale if bias is None else bias.float() - center * scale
            return Affine(scale, shift, inner)

        of_normal = OfNormal(mean, rstd, inner, of_normalized)
        if not of_batch:
            return again.changed(affine=affine, of_normal=of_normal)
        own = {"affine": affine, "of_normal": of_normal}
        return again.changed(exact=lambda x: of_given(x, mean, rstd), **own)

    def of_normalized() -> Affine:
        return weight_and_bias(weight, bias, channels, device, inner)

    channels, device = statistics.mean.numel(), statistics.mean.device

    given = statistics.mean.flatten(), statistics.rstd.flatten(), *plain.given
    op = of_statistics(bound, *given)
    return origin_of(call, out, sources, op)


def _is_one_pass(x: Tensor, *given: Tensor | None) -> bool:
    """Returns whether torch's kernel makes a batch norm of known statistics by x * scale + shift.

    A CPU's does, of a tensor in order; of another it subtracts the mean first.
    """
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    orders = [torch.contiguous_format, *([] if last is None else [last])]
    serves = x.device.type == "cpu" and x.dtype is torch.float32
    in_order = all(one is None or one.is_contiguous() for one in given)
    return serves and in_order and any(x.is_contiguous(memory_format=order) for order in orders)


def _batch_norm_of(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """A batch norm with its saved statistics: the same kernel, which does not compute them again.

    It is given a variance of 1 and no eps, and so divides by 1; what it multiplies by is rounded as
    in forward, and the shift is made by its own code. Computing them again takes most of the time:
    0.40 ms of 0.44 for 4 maps of 96 x 24 x 24 (AMD EPYC, one thread, torch 2.13).
    """
    scale = rstd if weight is None else rstd * weight
    one = torch.ones_like(mean)
    return torch.batch_norm(x, scale, bias, mean, one, False, 0.0, 0.0, False)


def instance_norm(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of an InstanceNorm."""
    x, eps = call.first, call.arg(7, "eps", 1e-5)
    if call.func is not F.instance_norm or not call.arg(5, "use_input_stats", True):
        return None
    weight, bias = as_now(call.arg(3, "weight")), as_now(call.arg(4, "bias"))
    cudnn = torch.backends.cudnn.enabled
    op = Op(  # its own statistics; the running ones are not updated again
        lambda x: torch.instance_norm(x, weight, bias, None, None, True, 0.0, eps, cudnn),
        fixed=present(weight, bias),
    )
    return origin_of(call, out, sources, _of_groups(op, call, x, x.shape[1], weight, bias))
