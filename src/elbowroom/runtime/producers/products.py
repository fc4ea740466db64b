"""Recipes of arithmetic: functions of one tensor, sums and products of two, small matmuls."""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.handles.rebuild import ExpectedSlot, Op, Recipe, link_to
from elbowroom.runtime.logits import SOFTMAXES, are_logits, may_be_logits, product_of
from elbowroom.runtime.producers.copies import reordered_slot
from elbowroom.runtime.producers.making import REORDERED, origin_of, view_of
from elbowroom.runtime.slot import Geometry, Slot
from elbowroom.runtime.sources import EXPANDED, Source, Sources, can_follow
from elbowroom.runtime.storage import Origin, is_dense, storage_nbytes, untouchable

_MUCH_LARGER = 4  # least size of a result relative to a constant that is copied to rebuild it
# Likewise, where a code may take as little, and a copy of which no use is made is one too many.
_MORE_EXPANDED = 16
_FEW = 256  # the most elements that a product may sum: the columns of an attention head
_MAX_PARTS = 8  # that are joined
# Functions that take as long on a CPU, for each element, as so many multiplications of a linear
# layer: 2.05 ns (tanh) and 0.02 ns with AVX2; exp takes 0.6 ns, GELU 0.2 ns, a product 0.08 ns.
_LONG = {
    **dict.fromkeys(("tanh", "atan", "arctan"), 100),
    **dict.fromkeys(("asin", "arcsin", "acos", "arccos", "tan"), 60),
    **dict.fromkeys(("mish", "lgamma", "digamma"), 150),
}
_EXPONENTIAL = ("exp", "exp2", "expm1")
# Functions by which an error does not grow; of two arguments; products; quotients.
_EVEN, _SUMS = ("tanh", "neg", "clamp"), ("add", "radd", "sub", "rsub")
_SCALED, _DIVIDED = ("mul", "rmul"), ("div", "truediv")
_LOG_PROBABILITIES = ("_LogProbabilitiesBackward", "LogSoftmaxBackward0")
_CONTRACTIONS: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "BmmBackward0": (torch.bmm, "self", "mat2"),
    "MmBackward0": (torch.mm, "self", "mat2"),
    "BaddbmmBackward0": (torch.baddbmm, "batch1", "batch2"),
}


def elementwise(
    call: Call,
    out: Tensor,
    sources: Sources,
    *,
    source: Source | None = None,
    of_codes: bool = True,
) -> Origin | None:
    """A function of one tensor, and of numbers, from its input as any op has saved it.

    source: of the input; None: what is known of it
    of_codes: the input may have a code
    """
    x, rest, named, func = call.first, call.args[1:], dict(call.kwargs), call.func
    named.pop("input", None)
    if any(isinstance(one, Tensor) for one in (*rest, *named.values())) or out.dtype != x.dtype:
        return None

    def run(x: Tensor) -> Tensor:
        y: Tensor = func(x, *rest, **named)
        return y

    def on_copy(x: Tensor) -> Tensor:
        return run(x.clone())

    exact, in_place = (on_copy, run) if call.changes_first else (run, None)
    products = out.numel() * _LONG.get(call.name, 0) if x.device.type == "cpu" else 0
    op = Op(
        exact,
        run if of_codes else None,
        in_place,
        any_size=True,
        is_exponential=call.name in _EXPONENTIAL,
        products=products,
        slope=_slope(call),
    )
    return origin_of(call, out, sources, op, source=source)


def enlarged(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """A function of one tensor whose result may be much larger: then a copy of that may be held.

    The logits of a segmentation are interpolated, and only the loss saves them. Its exponentials
    make a factor of an error, and several results have that of one element: so where codes add
    errors, nothing is made of one.
    """
    times = EXPANDED if sources.is_exact else _MORE_EXPANDED
    source = sources.operand_or_spare(call.first, call, out, times)
    return elementwise(call, out, sources, source=source, of_codes=sources.is_exact)


def _slope(call: Call) -> float | None:
    """Returns the largest factor by which an error of the first argument grows, if it is known."""
    y = call.arg(1, "other")  # a number: the value of a tensor may be another in the next step
    name = call.name.strip("_")
    if name in _EVEN or (name in _SUMS and "alpha" not in call.kwargs):
        return 1.0
    if not isinstance(y, int | float):
        return None
    return abs(y) if name in _SCALED else 1 / abs(y) if name in _DIVIDED and y else None


def binary(
    combine: Callable[..., Tensor], call: Call, out: Tensor, sources: Sources
) -> Origin | None:
    """Returns a recipe of an op with two operands.

    One is saved or rebuilt, the other is saved, a parameter or a number.
    """
    x, y = call.first, call.arg(1, "other")
    if not isinstance(y, Tensor):
        return elementwise(call, out, sources)
    named = {key: value for key, value in call.kwargs.items() if key not in ("input", "other")}

    def forward(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        return combine(x, y, out=out, **named)

    def backward(y: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        return combine(x, y, out=out, **named)

    run: Callable[..., Tensor] = forward
    is_there = type(x) is not nn.Parameter and sources.is_held(y)
    if not is_there and sources.is_held(x):
        x, y, run, is_there = y, x, backward, True
    if untouchable(x) or torch.result_type(x, y) is not out.dtype:
        return None
    source = sources.operand_or_spare(x, call, out)
    if source is None:
        is_open = sources.is_exact and not is_there
        return _of_later(run, x, y, call, out, sources) if is_open else None
    held = sources.slot(y)
    if not is_there:
        if untouchable(y):
            return None
        if storage_nbytes(y) * _MUCH_LARGER > storage_nbytes(out):
            return _of_later(run, x, y, call, out, sources) if sources.is_exact else None
        held = sources.constant(y, call.name) if _may_be_exact(source) else None
        if held is None:
            return None
    if type(y) is nn.Parameter or held is None:
        factor = y.detach()

        def alone(x: Tensor) -> Tensor:
            return run(x, factor)

        op = Op(alone, alone, fixed=(factor,), any_size=True, slope=_slope(call))
    else:  # `Ready` combines
        others = ((weakref.ref(held), Geometry.of(y)),)
        slope = _slope(call)
        op = Op(lambda x: x, lambda x: x, others=others, combine=run, any_size=True, slope=slope)
    recipe = Recipe.of(op, source, Geometry.of(x), out, sources.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def _may_be_exact(source: Source) -> bool:
    if isinstance(source, ExpectedSlot):
        return True
    made_of = source.ready() if isinstance(source, Recipe) else source
    return made_of is not None and made_of.exact


def _of_later(
    run: Callable[..., Tensor], x: Tensor, y: Tensor, call: Call, out: Tensor, sources: Sources
) -> Origin | None:
    """The recipe of an op whose operands are not saved yet: one may be later, or be rebuilt."""
    if type(x) is nn.Parameter or type(y) is nn.Parameter or untouchable(y):
        return None
    operands = [
        sources.operand(one, call) or sources.expected(one, call.version if one is x else None)
        for one in (x, y)
    ]
    one, other = operands
    if one is None or other is None:
        return None
    others = ((link_to(other), Geometry.of(y)),)
    op = Op(lambda x: x, others=others, combine=run, any_size=True)
    recipe = Recipe.of(op, one, Geometry.of(x), out, sources.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def contraction(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of a matrix product from both of its operands, as its node has saved them.

    Only products that sum at most `_FEW` elements are recomputed: attention's logits, which cost
    little for the memory that they use. Only exact operands serve, because softmax turns an error
    in a logit into a factor.
    """
    if call.first.__class__ is Tensor and call.first.dim():
        sources.products += out.numel() * call.first.shape[-1]
    node = out.grad_fn
    while node is not None and node.name() in REORDERED:
        node = node.next_functions[0][0]
    known = None if node is None else _CONTRACTIONS.get(node.name())
    if known is None:
        return None
    run, *fields = known
    x, y = (view_of(getattr(node, f"_raw_saved_{field}")) for field in fields)
    if x is None or y is None or not x.slot.dtype is y.slot.dtype is out.dtype:
        return None
    if x.geometry.shape[-1] > _FEW or not (x.slot.exact and y.slot.exact):
        return None
    product = product_of(call) if sources.codes_logits and may_be_logits(call) else None
    others: tuple[tuple[weakref.ref[Slot], Geometry], ...]
    others, made, scales = ((weakref.ref(y.slot), y.geometry),), Geometry.of(out), {}
    # Its batch is folded, if it is anything else (`laid_out`).
    is_folded = out.dim() != (2 if run is torch.mm else 3) or node is out.grad_fn
    in_order = is_folded and out.is_contiguous()
    if call.name == "baddbmm":
        added = call.first
        if storage_nbytes(added) * _MUCH_LARGER > storage_nbytes(out) or "out" in call.kwargs:
            return None
        if not sources.is_exact and product is None:
            return None
        held = sources.constant(added, call.name)
        if held is None:
            return None
        others = (*others, (weakref.ref(held), Geometry.of(added)))
        scales = {name: call.kwargs[name] for name in ("beta", "alpha") if name in call.kwargs}

    def combine(x: Tensor, y: Tensor, *added: Tensor, out: Tensor | None = None) -> Tensor:
        y = run(*(one.to(x.dtype) for one in added), x, y, **scales)  # autocast's cast
        return y if in_order else made.on(y)

    is_extra = call.name in ("baddbmm", "einsum")
    op = Op(
        lambda x: x,
        None if product is None else lambda x: x,
        others=others,
        combine=combine,
        is_extra=is_extra,
        any_size=in_order,
        is_exponential=product is not None,
        product=product,
    )
    recipe = Recipe.of(op, x.slot, x.geometry, out, sources.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def softmax(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of a softmax, from an exact input: `elementwise` for a function of rows."""
    x, rest, named, func = call.first, call.args[1:], dict(call.kwargs), call.func
    named.pop("input", None)
    if out.dtype is not x.dtype and torch.is_autocast_enabled(x.device.type):
        return None

    def run(x: Tensor) -> Tensor:
        y: Tensor = func(x, *rest, **named)
        return y

    lossy = run if sources.codes_logits and call.name in SOFTMAXES else None
    op = Op(run, lossy, any_size=True, is_exponential=lossy is not None)
    return origin_of(call, out, sources, op)


def linear(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of a linear layer, in exact contexts, and under plans that may have it run again.

    `Serving` decides whether it is worth its multiplications where a tensor would be rebuilt by it:
    not if its result, or a result of that, is saved anyway.
    """
    x, weight, bias = call.first, call.arg(1, "weight"), call.arg(2, "bias")
    products = out.numel() * x.shape[-1]
    sources.products += products
    if type(weight) is not nn.Parameter or not (bias is None or type(bias) is nn.Parameter):
        return None
    source, seen = call.source(sources)
    if not sources.is_exact and _is_of_product(source):
        return None  # a chain would run from its beginning for each of its tensors
    w, b = weight.detach(), None if bias is None else bias.detach()
    dtype, given, learns = out.dtype, seen, weight.requires_grad
    if isinstance(source, ExpectedSlot) and source.recipe is None:  # its own copy may be held
        copy = reordered_slot(call, dtype, sources)
        source, given = (source, seen) if copy is None else (copy, copy.base)
    if source is None:
        return None

    def exact(x: Tensor) -> Tensor:
        if given is not seen:  # torch runs other kernels on another memory order
            x = torch.empty_strided(seen.shape, seen.stride, dtype=dtype, device=x.device).copy_(
                x.view(seen.shape)
            )
        # Of an x that is not in order torch runs another kernel where the weight wants a gradient.
        factor = w.to(dtype).detach().requires_grad_(learns)
        bias = None if b is None else b.to(dtype)
        return torch._C._nn.linear(x.to(dtype), factor, bias)  # F.linear may be wrapped

    fixed, any_size = (w,) if b is None else (w, b), given is seen
    op = Op(exact, fixed=fixed, products=products, any_size=any_size)
    recipe = Recipe.of(op, source, given, out, sources.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def _is_of_product(source: Source | None) -> bool:
    return isinstance(source, Slot | Recipe) and source.of_product


def convolution(call: Call, out: Tensor, sources: Sources) -> None:
    """Counts the multiplications of a convolution, which is not recomputed."""
    weight = call.arg(1, "weight")
    is_transposed = "transpose" in call.name
    each = (call.first.numel() if is_transposed else out.numel()) if weight.dim() else 0
    sources.products += each * weight[0].numel()


def added_product(call: Call, out: Tensor, sources: Sources) -> None:
    """Counts the multiplications of a linear layer that is written as `addmm`."""
    factor = call.arg(1, "mat1")
    sources.products += out.numel() * factor.shape[-1]


def joined(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of `cat` and `stack`, of parts that are held or rebuilt, all of them exactly."""
    parts, named = call.first, {k: v for k, v in call.kwargs.items() if k != "tensors"}
    rest, run = call.args[1:], torch.stack if call.name == "stack" else torch.cat
    if not 2 <= len(parts) <= _MAX_PARTS or "out" in named:
        return None
    if any(untouchable(x) or x.dtype is not out.dtype for x in parts):
        return None
    found = [None if type(x) is nn.Parameter else sources.operand(x, call) for x in parts]
    links = tuple(link_to(one) for one in found if one is not None)
    if len(links) < len(parts) or not (sources.is_exact or all(map(can_follow, links))):
        return None

    def combine(*parts: Tensor, out: Tensor | None = None) -> Tensor:
        return run(parts, *rest, **named)

    seen = [Geometry.of(x) for x in parts]
    others = tuple(zip(links[1:], seen[1:], strict=True))
    op = Op(lambda x: x, others=others, combine=combine, is_extra=True, any_size=True)
    assert found[0] is not None
    recipe = Recipe.of(op, found[0], seen[0], out, sources.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def selected(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of `where(mask, x, y)` and `x.masked_fill(mask, y)`: in exact contexts, of logits.

    The mask is held, or is data that is much smaller than the result; y is a number, or a tensor of
    one element.
    """
    is_where = call.name == "where"
    mask, x, y = call.arg(0, "condition"), call.arg(1, "input"), call.arg(2, "other")
    if not is_where:
        x, mask, y = call.first, call.arg(1, "mask"), call.arg(2, "value")
    given = [mask, x] if not isinstance(y, Tensor) else [mask, x, y]
    if any(not isinstance(one, Tensor) for one in given):
        return None
    if any(type(one) is nn.Parameter or untouchable(one) for one in given):
        return None
    if x.dtype is not out.dtype or (isinstance(y, Tensor) and (y.numel() > 1 or y.requires_grad)):
        return None
    source = sources.operand(x, call)
    if source is None or not (_may_be_exact(source) if sources.is_exact else are_logits(source)):
        return None
    held = []
    for one in given[:1] + given[2:]:
        slot = sources.slot(one)
        if slot is None or slot.value is None:
            if storage_nbytes(one) * _MUCH_LARGER > storage_nbytes(out):
                return None
            slot = sources.constant(one, call.name)
        if slot is None:
            return None
        held.append((weakref.ref(slot), Geometry.of(one)))

    def combine(x: Tensor, mask: Tensor, *one: Tensor, out: Tensor | None = None) -> Tensor:
        other = one[0] if one else y
        return torch.where(mask, x, other) if is_where else x.masked_fill(mask, other)

    given_too = tuple(held)
    op = Op(
        lambda x: x,
        None if sources.is_exact else lambda x: x,
        others=given_too,
        combine=combine,
        is_extra=True,
        any_size=True,
        slope=1.0,
    )
    recipe = Recipe.of(op, source, Geometry.of(x), out, sources.slot(out))
    return None if recipe is None else Origin(call.name, recipe=recipe)


def log_probabilities(call: Call, x: Tensor, sources: Sources) -> Origin | None:
    """The recipe of the log-probabilities that cross entropy saves, from its logits."""
    logits = call.first
    if not isinstance(logits, Tensor) or untouchable(logits) or x.grad_fn is None:
        return None
    if x.grad_fn.name() not in _LOG_PROBABILITIES or sources.origin(x) is not None:
        return None
    if x.shape != logits.shape or x.dtype is not logits.dtype or not is_dense(x):
        return None
    dim = 1 if logits.dim() > 1 else 0
    op = Op(partial(torch.log_softmax, dim=dim), any_size=True)
    origin = origin_of(call, x, sources, op)
    sources.made(x, origin)
    return origin
