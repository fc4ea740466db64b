"""Recipes of ops, read off their calls (formulas and why they are right: `recipes.py`)."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elbowroom.codecs import Affine
from elbowroom.runtime.consumers import Call, is_capped
from elbowroom.runtime.handles.keep import KeepHandle, storage_nbytes, version_of
from elbowroom.runtime.identity import Identity, Origin, is_dense, is_touchable, untouchable
from elbowroom.runtime.masks import CAPPED
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.recipes import Op, Recipe, same_order
from elbowroom.runtime.slot import Deferred, Geometry, Slot, View
from elbowroom.runtime.statistics import logical_statistics, statistics_of


def note_origin(call: Call, out: Any, identity: Identity) -> None:
    """Records how to run an op again that has just ended, under its output's identity.

    Of an output that wants no gradient it records that an op made it, so that no owner of an input
    holds it.
    """
    maker = _MAKERS.get(call.name)
    if not isinstance(out, Tensor) or not out.numel():
        return
    if not out.requires_grad:
        _note_data(call, out, identity)
        return
    if maker is None:
        return
    x = call.arg(0, "input")
    if untouchable(out) or not isinstance(x, Tensor) or untouchable(x):
        return
    if out.numel() * out.element_size() != storage_nbytes(out) or not is_dense(out):
        return
    if (
        version_of(out) == call.version
        and out.untyped_storage()._cdata == x.untyped_storage()._cdata
    ):
        return  # nothing was done: dropout in eval mode gives its input back
    origin = maker(call, out, identity)
    if origin is not None:
        identity.made(out, origin)


def _note_data(call: Call, out: Tensor, identity: Identity) -> None:
    """Remember that the op has made `out` of its arguments, in memory of its own.

    Its zeros are exact whatever its code: it may be a mask, or a word in one place of many.
    """
    if out.numel() < _LEAST_DATA or not is_touchable(out):
        return
    given = [*tensors_in(call.args), *tensors_in(call.kwargs)]
    if not given or not all(map(is_touchable, given)):
        return  # memory may come from elsewhere: an array, a buffer, a file
    at = out.untyped_storage()._cdata
    if all(x.untyped_storage()._cdata != at for x in given):
        identity.made(out, Origin(call.name, has_zeros=True))


def note_copy(x: Tensor, call: Call, identity: Identity) -> None:
    """Remember how a copy of an op's input is made again that the op itself has made, and saves.

    One that works in place saves its input as it was; under autocast the input is cast first.
    """
    of, copy = call.arg(0, "input"), x if x._base is None else x._base
    if copy.grad_fn is None or not isinstance(of, Tensor) or untouchable(of):
        return
    if copy.grad_fn._sequence_nr() < call.began:
        return  # a copy of the user's, who may have changed it since without autograd's knowing
    kind, alike = copy.grad_fn.name(), copy.shape == of.shape and copy.stride() == of.stride()
    if not alike or identity.origin(x) is not None or not _is_made_of(copy, of, call):
        return
    if kind == "CloneBackward0":
        origin = identity.origin(of, call.version)
    elif kind == "ToCopyBackward0" and copy.dtype is not of.dtype and is_dense(copy):
        origin = _cast(call, copy, identity)
    else:
        return
    if origin is not None:
        identity.made(copy, origin)


def _is_made_of(copy: Tensor, of: Tensor, call: Call) -> bool:
    """Returns whether the node of `copy` reads `of`, as it is or was before the call changed it."""
    if copy.grad_fn is None or of.grad_fn is None:
        return False
    if version_of(of) == call.version:
        return copy.grad_fn.next_functions[:1] == ((of.grad_fn, of.output_nr),)
    return copy.grad_fn.next_functions[:1] == of.grad_fn.next_functions[:1]


def _source(call: Call, identity: Identity) -> tuple[Slot | Recipe | None, Geometry]:
    """Returns what the op can be run on again, and where in it the op's input lies.

    It is the input as the op saved it, the recipe of its input, or what an earlier op saved.
    """
    x = call.arg(0, "input")
    seen = Geometry.of(x)
    held = identity.slot(x) if version_of(x) == call.version else None
    if held is not None and held.value is not None and (held in call.saved or held.is_shared_now):
        return held, seen
    for slot in call.saved:  # a cast that autocast made
        if (
            slot.dtype is not x.dtype
            and slot.dtype.is_floating_point
            and slot.base.shape == seen.shape
            and torch.is_autocast_enabled(x.device.type)
        ):
            return slot, slot.base
    origin = identity.origin(x, call.version)
    if origin is not None and origin.recipe is not None:
        return origin.recipe, seen
    return (held if held is not None and held.value is not None else None), seen


def _make(
    call: Call, out: Tensor, identity: Identity, op: Op | None, *, has_zeros: bool = False
) -> Origin:
    recipe = None
    if op is not None:
        source, seen = _source(call, identity)
        if source is not None:
            recipe = Recipe.of(_in_order(op, seen, out), source, seen, out, identity.slot(out))
    return Origin(call.name, has_zeros, recipe)


def _in_order(op: Op, seen: Geometry, out: Tensor) -> Op:
    """Returns the op without its lossy form if the output lies in another order than the input.

    Only a lossy form that goes by memory order is dropped.
    """
    if op.affine is None or same_order(seen.shape, seen.stride, out.stride()):
        return op
    bound = op.bound
    again = None if bound is None else lambda *given: replace(bound(*given), affine=None)
    return replace(op, affine=None, bound=again)


def _relu(call: Call, out: Tensor, identity: Identity) -> Origin:
    source, seen = _source(call, identity)
    if isinstance(source, Recipe) and source.op.is_norm and seen == source.made:
        norm = source
        below = norm.source() if isinstance(norm.source, weakref.ref) else norm.source
        op, slot = _in_order(_relu_of_norm(norm.op), norm.seen, out), identity.slot(out)
        recipe = (
            None if below is None else Recipe.of(op, below, norm.seen, out, slot, norm.versions)
        )
        return Origin(call.name, has_zeros=True, recipe=recipe)
    device = out.device
    op = Op(
        lambda x, private: x.relu_() if private else x.relu(),
        affine=lambda: Affine.identity(device),
        needs_bits=True,
    )
    return _make(call, out, identity, op, has_zeros=True)


def _relu_of_norm(norm: Op) -> Op:
    """ReLU after a norm: one op of both, so that a decoded tensor is passed over once."""

    def exact(x: Tensor, private: bool) -> Tensor:
        return norm.exact(x, private).relu_()

    bound = norm.bound
    again = None if bound is None else lambda *given: _relu_of_norm(bound(*given))
    return replace(norm, exact=exact, needs_bits=True, bound=again)


def _leaky_relu(call: Call, out: Tensor, identity: Identity) -> Origin:
    slope = call.arg(1, "negative_slope", 0.01)
    op = Op(
        lambda x, private: F.leaky_relu(x, slope, private),
        lambda x: x,
        needs_bits=True,
        outside=lambda x: x * slope,
    )
    return _make_masked(call, out, identity, op)


def _relu6(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """Returns a recipe of ReLU6.

    An element outside is 0 or 6: a decoded value tells which, unless it is off by 3.
    """
    if not is_capped(call):
        return None
    op = Op(
        lambda x, private: F.relu6(x, private),
        lambda x: x,
        needs_bits=True,
        outside=lambda x: (x > 3).to(x.dtype) * 6,
    )
    return _make_masked(call, out, identity, op, has_zeros=True)


def _make_masked(
    call: Call, out: Tensor, identity: Identity, op: Op, *, has_zeros: bool = False
) -> Origin:
    """Returns a recipe that takes bits from where the op has saved its input or its output."""
    source, seen = _source(call, identity)
    if source is None:
        return Origin(call.name, has_zeros=has_zeros)
    masks = (slot for slot in call.saved if slot.bits is not None and slot.base == seen)
    recipe = Recipe.of(op, source, seen, out, next(masks, None))
    return Origin(call.name, has_zeros=has_zeros, recipe=recipe)


def _gelu(call: Call, out: Tensor, identity: Identity) -> Origin:
    approximate = call.arg(1, "approximate", "none")
    op = Op(
        lambda x, _: F.gelu(x, approximate=approximate),
        # Over what was decoded: elementwise, so in place is the same.
        lambda x: torch.ops.aten.gelu.out(x, approximate=approximate, out=x),
    )
    return _make(call, out, identity, op)


def _silu(call: Call, out: Tensor, identity: Identity) -> Origin:
    op = Op(lambda x, _: F.silu(x), lambda x: F.silu(x, inplace=True))
    return _make(call, out, identity, op)


def _dropout(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    noise = [
        slot
        for slot in call.saved
        if slot.base.shape == tuple(out.shape) and slot.dtype is out.dtype
    ]
    before = identity.origin(call.arg(0, "input"), call.version)
    has_zeros = before is not None and before.has_zeros
    if len(noise) != 1:
        return Origin(call.name, has_zeros)
    op = Op(lambda x, _: x, lambda x: x, noise=weakref.ref(noise[0]))
    call.saved.remove(noise[0])
    return _make(call, out, identity, op, has_zeros=has_zeros)


def _elementwise(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """A function of one tensor, and of numbers: from its input as anybody has saved it."""
    x, rest, named, func = call.arg(0, "input"), call.args[1:], dict(call.kwargs), call.func
    named.pop("input", None)
    if any(isinstance(one, Tensor) for one in (*rest, *named.values())) or out.dtype != x.dtype:
        return None
    op = Op(lambda x, _: func(x, *rest, **named), lambda x: func(x, *rest, **named))
    return _make(call, out, identity, op)


def _binary(
    combine: Callable[..., Tensor], call: Call, out: Tensor, identity: Identity
) -> Origin | None:
    """Returns a recipe of an op with two operands.

    One is saved or made again, the other is saved, a parameter or a number.
    """
    x, y = call.arg(0, "input"), call.arg(1, "other")
    if not isinstance(y, Tensor):
        return _elementwise(call, out, identity)
    named = {key: value for key, value in call.kwargs.items() if key not in ("input", "other")}

    def forward(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        return combine(x, y, out=out, **named)

    def backward(y: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        return combine(x, y, out=out, **named)

    run: Callable[..., Tensor] = forward
    is_there = type(x) is not nn.Parameter and _is_there(y, identity)
    if not is_there and _is_there(x, identity):
        x, y, run, is_there = y, x, backward, True
    if untouchable(x) or torch.result_type(x, y) is not out.dtype:
        return None
    source = _operand(x, call, identity) or _spare(x, call, out, identity)
    if source is None:
        return None
    held = identity.slot(y)
    if not is_there:
        if untouchable(y) or storage_nbytes(y) * _MUCH_LARGER > storage_nbytes(out):
            return None
        made_of = source.ready() if isinstance(source, Recipe) else source
        held = identity.constant(y, call.name) if made_of is not None and made_of.exact else None
        if held is None:
            return None
    if type(y) is nn.Parameter or held is None:
        factor = y.detach()
        op = Op(lambda x, _: run(x, factor), lambda x: run(x, factor), fixed=(factor,))
    else:  # `Ready` combines
        op = Op(lambda x, _: x, lambda x: x, other=(weakref.ref(held), Geometry.of(y)), combine=run)
    recipe = Recipe.of(op, source, Geometry.of(x), out, identity.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def _contraction(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """The recipe of a matrix product from both of its operands, as its node has saved them.

    Only products that sum at most `_FEW` elements are made again: attention's logits, which cost
    little beside the memory they take. Only exact operands serve, because softmax turns an error in
    a logit into a factor.
    """
    node = out.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    run = None if node is None else _CONTRACTIONS.get(node.name())
    if run is None:
        return None
    x, y = (_view_of(getattr(node, f"_raw_saved_{field}")) for field in ("self", "mat2"))
    if x is None or y is None or not x.slot.dtype is y.slot.dtype is out.dtype:
        return None
    if x.geometry.shape[-1] > _FEW or not (x.slot.exact and y.slot.exact):
        return None
    made = Geometry.of(out)

    def combine(x: Tensor, y: Tensor, _: Tensor | None = None) -> Tensor:
        return made.on(run(x, y))

    op = Op(lambda x, _: x, other=(weakref.ref(y.slot), y.geometry), combine=combine)
    recipe = Recipe.of(op, x.slot, x.geometry, out, identity.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def _moved(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """The recipe of a copy in another order of what an op holds as its own result.

    Backward reads that on the way from the copy, so that a change of it in place is an error in
    plain autograd, too; of what is held for another reader it is not. And it is one pass: what is
    itself made again would be made for the copy, too.
    """
    x, rest, named, func = call.arg(0, "input"), call.args[1:], dict(call.kwargs), call.func
    named.pop("input", None)
    held, before = identity.slot(x), identity.origin(x, call.version)
    if held is None or version_of(x) != call.version or not _is_own_result(x, held):
        return None
    op = Op(lambda x, _: func(x, *rest, **named))
    recipe = Recipe.of(op, held, Geometry.of(x), out, identity.slot(out))
    has_zeros = before is not None and before.has_zeros
    return None if recipe is None else Origin(call.name, has_zeros, recipe)


def _is_own_result(x: Tensor, held: Slot) -> bool:
    """Returns whether x is a view of its op's own result, which that op has saved."""
    node = x.grad_fn
    while node is not None and node.name() in _REORDERED:
        node = node.next_functions[0][0]
    saved = (getattr(node, f"_raw_saved_{field}", None) for field in ("result", "output"))
    views = (view for one in saved if (view := _view_of(one)) is not None)
    return isinstance(held.value, KeepHandle) and any(view.slot is held for view in views)


def _view_of(saved: Any) -> View | None:
    """The view that a node holds under one of its names; None for a parameter, or for nothing."""
    packed = getattr(saved, "data", None)
    held = packed.held if isinstance(packed, Deferred) else packed
    return held if isinstance(held, View) else None


def _softmax(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """The recipe of a softmax, from an exact input: `_elementwise` for a function of rows."""
    x, rest, named, func = call.arg(0, "input"), call.args[1:], dict(call.kwargs), call.func
    named.pop("input", None)
    if out.dtype is not x.dtype and torch.is_autocast_enabled(x.device.type):
        return None
    return _make(call, out, identity, Op(lambda x, _: func(x, *rest, **named)))


def _gather(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """The recipe of `x[index]` and `x.index_select(dim, index)`, whose index is saved."""
    x, by_dim = call.arg(0, "input"), call.name == "index_select"
    dim = call.arg(1, "dim") if by_dim else 0
    index = call.arg(2, "index") if by_dim else call.arg(1, "index")
    if not isinstance(index, Tensor) or index.dtype is not torch.int64 or index.dim() != 1:
        return None
    held = identity.slot(index)
    if held is None or held.value is None:
        return None
    source = _operand(x, call, identity) or _spare(x, call, out, identity)
    if source is None:
        return None

    def combine(x: Tensor, index: Tensor, _: Tensor | None = None) -> Tensor:
        return x.index_select(dim, index) if by_dim else x[index]  # which counts from the end, too

    other = weakref.ref(held), Geometry.of(index)
    op = Op(lambda x, _: x, lambda x: x, other=other, combine=combine)
    recipe = Recipe.of(op, source, Geometry.of(x), out, identity.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def _is_there(y: Tensor, identity: Identity) -> bool:
    """Returns whether y is held as a saved tensor, or is a parameter."""
    if type(y) is nn.Parameter:
        return True
    held = None if untouchable(y) else identity.slot(y)
    return held is not None and held.value is not None


def _cast(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """x in another floating dtype."""
    x = call.arg(0, "input")
    source = _operand(x, call, identity)
    if source is None or not x.is_floating_point() or x.device != out.device:
        return None
    dtype = out.dtype
    op = Op(lambda x, _: x.to(dtype, copy=True), lambda x: x.to(dtype))  # x stays its holder's
    recipe = Recipe.of(op, source, Geometry.of(x), out, identity.slot(out))
    before = identity.origin(x)
    has_zeros = before is not None and before.has_zeros
    return None if recipe is None else Origin(call.name, has_zeros, recipe)


def _operand(x: Tensor, call: Call, identity: Identity) -> Slot | Recipe | None:
    """Returns what x can be made from: its slot, if this op saved it, else a recipe, or a slot."""
    held = identity.slot(x)
    if held is not None and held.value is None:
        held = None
    if held is not None and (held in call.saved or held.is_shared_now):
        return held
    origin = identity.origin(x)
    return held if origin is None or origin.recipe is None else origin.recipe


def _spare(x: Tensor, call: Call, out: Tensor, identity: Identity) -> Slot | None:
    """A copy of x, which no op has saved: rows that are gathered many times, a bias of two parts.

    It takes no more than a code of the result would.
    """
    if untouchable(x) or storage_nbytes(x) * _EXPANDED > storage_nbytes(out):
        return None
    return identity.spare(x, call.name, out)


def _rms_norm(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    """Returns a recipe of RMSNorm.

    On a CPU the op is made of others, which save x as fp32 first of all.
    """
    x, shape, eps = call.arg(0, "input"), call.arg(1, "normalized_shape"), call.arg(3, "eps")
    weight, dtype = _as_now(call.arg(2, "weight")), x.dtype
    held = next((slot for slot in call.saved if slot.base.shape == tuple(x.shape)), None)
    if held is None or held.value is None or not x.is_contiguous():
        return None

    def run(x: Tensor, private: bool = False) -> Tensor:
        return F.rms_norm(x.to(dtype), shape, weight, eps)

    op = Op(run, run, fixed=_given(weight))
    # Of a square transposed the base has the same shape, in another order.
    seen = Geometry.of(x) if held.dtype is dtype else held.base
    recipe = Recipe.of(op, held, seen, out, identity.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def _layer_norm(call: Call, out: Tensor, identity: Identity) -> Origin:
    shape, eps = call.arg(1, "normalized_shape"), call.arg(4, "eps", 1e-5)
    weight, bias = _as_now(call.arg(2, "weight")), _as_now(call.arg(3, "bias"))

    def exact(x: Tensor, private: bool) -> Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)

    def bound(mean: Tensor, rstd: Tensor) -> Op:
        def lossy(x: Tensor) -> Tensor:
            x.sub_(mean).mul_(rstd)
            if weight is not None:
                x.mul_(weight)
            return x if bias is None else x.add_(bias)

        return Op(exact, lossy, fixed=_given(weight, bias))

    statistics = logical_statistics(call, call.arg(0, "input"))
    op = Op(exact, fixed=_given(weight, bias))
    if statistics is not None:
        op = _of_statistics(bound, *statistics[1:])
    return _make(call, out, identity, op)


def _of_statistics(bound: Callable[..., Op], *given: Tensor) -> Op:
    """An op that reads statistics of this forward."""
    return replace(bound(*given), given=given, bound=bound)


def _group_norm(call: Call, out: Tensor, identity: Identity) -> Origin:
    x, groups, eps = call.arg(0, "input"), call.arg(1, "num_groups"), call.arg(4, "eps", 1e-5)
    weight, bias = _as_now(call.arg(2, "weight")), _as_now(call.arg(3, "bias"))
    op = Op(lambda x, _: F.group_norm(x, groups, weight, bias, eps), fixed=_given(weight, bias))
    return _make(call, out, identity, _of_groups(op, call, x, groups, weight, bias))


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

        return replace(op, affine=affine)

    return _of_statistics(bound, *statistics[1:])


def _batch_norm(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    if call.func is not F.batch_norm:
        return None
    weight, bias = _as_now(call.arg(3, "weight")), _as_now(call.arg(4, "bias"))
    training, eps = call.arg(5, "training", False), call.arg(7, "eps", 1e-5)
    used: tuple[Tensor | None, Tensor | None] = (None, None)
    if not training:  # else its own statistics; the running ones are not updated
        used = call.arg(1, "running_mean").clone(), call.arg(2, "running_var").clone()
    cudnn = torch.backends.cudnn.enabled
    plain = Op(
        lambda x, _: torch.batch_norm(x, weight, bias, *used, training, 0.0, eps, cudnn),
        fixed=_given(weight, bias),
        given=_given(*used),
    )
    statistics = statistics_of(call, call.arg(0, "input"))
    if statistics is None:
        return _make(call, out, identity, plain)
    inner, of_batch = (
        statistics.inner,
        training and _is_one_pass(call.arg(0, "input"), weight, bias),
    )

    def bound(mean: Tensor, rstd: Tensor, *_: Tensor) -> Op:
        mean, rstd = (part.flatten() for part in (mean, rstd))
        op = _batch_norm_of(mean, rstd, weight, bias, plain.fixed) if of_batch else plain
        mean, rstd = (part.float() for part in (mean, rstd))

        def affine() -> Affine:
            scale = rstd if weight is None else rstd * weight.float()
            shift = -mean * scale if bias is None else bias.float() - mean * scale
            return Affine(scale, shift, inner)

        return replace(op, affine=affine)

    op = _of_statistics(bound, statistics.mean, statistics.rstd, *plain.given)
    return _make(call, out, identity, op)


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
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    fixed: tuple[Tensor, ...],
) -> Op:
    """A batch norm by the statistics that it had: the same kernel, told not to count them again.

    It is given a variance of 1 and no eps, and so divides by 1; what it multiplies by is rounded as
    in forward, and the shift is made by its own code. To count again takes most of the time: 0.40
    ms of 0.44 for 4 maps of 96 x 24 x 24 (AMD EPYC, one thread, torch 2.13).
    """

    def exact(x: Tensor, private: bool) -> Tensor:
        scale = rstd if weight is None else rstd * weight
        one = torch.ones_like(mean)
        return torch.batch_norm(x, scale, bias, mean, one, False, 0.0, 0.0, False)

    return Op(exact, fixed=fixed, is_of_given=True)


def _instance_norm(call: Call, out: Tensor, identity: Identity) -> Origin | None:
    x, eps = call.arg(0, "input"), call.arg(7, "eps", 1e-5)
    if call.func is not F.instance_norm or not call.arg(5, "use_input_stats", True):
        return None
    weight, bias = _as_now(call.arg(3, "weight")), _as_now(call.arg(4, "bias"))
    cudnn = torch.backends.cudnn.enabled
    op = Op(  # its own statistics; the running ones are not updated again
        lambda x, _: torch.instance_norm(x, weight, bias, None, None, True, 0.0, eps, cudnn),
        fixed=_given(weight, bias),
    )
    return _make(call, out, identity, _of_groups(op, call, x, x.shape[1], weight, bias))


def _as_now(parameter: Tensor | None) -> Tensor | None:
    """A parameter's memory of this moment: `p.data = other` before backward does not reach it."""
    return None if parameter is None else parameter.detach()


def _given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


_LEAST_DATA = 1024  # elements; smaller ones are left alone in any case
_MUCH_LARGER = 4  # a result is at least so many times as large as a constant copied to remake it
_EXPANDED = 8  # ... and so many times as large as a copy of what it is made of
_FEW = 256  # the most elements that a product may sum: the columns of an attention head
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
_REORDERED = (*_VIEWS, "TransposeBackward0", "PermuteBackward0", "TBackward0")
_CONTRACTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "BmmBackward0": torch.bmm,
    "MmBackward0": torch.mm,
}
_ELEMENTWISE = (
    *("tanh", "sigmoid", "exp", "expm1", "exp2", "log", "log1p", "sqrt", "rsqrt", "reciprocal"),
    *("square", "pow", "__pow__", "abs", "neg", "__neg__", "sin", "cos", "erf", "softplus", "elu"),
    *(
        "celu",
        "selu",
        "mish",
        "logsigmoid",
        "hardswish",
        "hardsigmoid",
        "clamp",
        "__rsub__",
        "rsub",
    ),
)
_BINARY: dict[Callable[..., Tensor], tuple[str, ...]] = {
    torch.mul: ("mul", "__mul__", "__rmul__"),
    torch.add: ("add", "__add__", "__radd__"),
    torch.sub: ("sub", "__sub__"),
    torch.div: ("div", "__truediv__"),
}
_MAKERS: dict[str, Callable[[Call, Tensor, Identity], Origin | None]] = {
    "relu": _relu,
    "relu_": _relu,
    "leaky_relu": _leaky_relu,
    **dict.fromkeys(CAPPED, _relu6),
    "gelu": _gelu,
    "silu": _silu,
    "dropout": _dropout,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "rms_norm": _rms_norm,
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **{name: partial(_binary, op) for op, names in _BINARY.items() for name in names},
    **dict.fromkeys(("to", "float", "bfloat16", "half", "type_as"), _cast),
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), _contraction),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("index_select", "__getitem__"), _gather),
    **dict.fromkeys(("contiguous", "clone", "reshape", "flatten", "roll"), _moved),
}
