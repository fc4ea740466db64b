"""Recipes of activations, and of dropout."""

import weakref
from functools import partial

import torch
from torch import Tensor

from elbowroom.codecs import Affine
from elbowroom.runtime.consumers import Call, is_capped
from elbowroom.runtime.handles.rebuild import Op, Recipe
from elbowroom.runtime.producers.making import in_order, origin_of
from elbowroom.runtime.sources import Sources
from elbowroom.runtime.storage import Origin

_nn = torch._C._nn  # those of torch.nn.functional may be wrapped by the program


def relu(call: Call, out: Tensor, sources: Sources) -> Origin:
    """The recipe of a ReLU; of one behind a norm, of both."""
    source, seen = call.source(sources)
    if isinstance(source, Recipe) and source.op.is_norm and seen == source.made:
        norm = source
        below = norm.source() if isinstance(norm.source, weakref.ref) else norm.source
        op, slot = in_order(_relu_of_norm(norm.op), norm.seen, out), sources.slot(out)
        recipe = (
            None if below is None else Recipe.of(op, below, norm.seen, out, slot, norm.versions)
        )
        return Origin(call.name, has_zeros=True, recipe=recipe)
    device = out.device
    op = Op(
        torch.relu,
        in_place=torch.relu_,
        affine=lambda: Affine.identity(device),
        needs_bits=True,
        any_size=True,
    )
    return origin_of(call, out, sources, op, has_zeros=True)


def _relu_of_norm(norm: Op) -> Op:
    """ReLU after a norm: one op for both, so that a decoded tensor is read only once."""

    def exact(x: Tensor) -> Tensor:
        return norm.exact(x).relu_()

    bound, of_given = norm.bound, norm.of_given
    again = None if bound is None else lambda *given: _relu_of_norm(bound(*given))
    both = None if of_given is None else lambda *given: of_given(*given).relu_()
    return norm.changed(exact=exact, needs_bits=True, bound=again, of_given=both)


def leaky_relu(call: Call, out: Tensor, sources: Sources) -> Origin:
    """The recipe of a LeakyReLU."""
    slope = call.arg(1, "negative_slope", 0.01)
    op = Op(
        partial(_nn.leaky_relu, negative_slope=slope),
        lambda x: x,
        partial(_nn.leaky_relu_, negative_slope=slope),
        needs_bits=True,
        outside=lambda x: x * slope,
        any_size=True,
    )
    return _make_masked(call, out, sources, op)


def relu6(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """Returns a recipe of ReLU6.

    An element outside is 0 or 6: a decoded value shows which, unless its error exceeds 3.
    """
    if not is_capped(call):
        return None
    op = Op(
        _nn.relu6,
        lambda x: x,
        _nn.relu6_,
        needs_bits=True,
        outside=lambda x: (x > 3).to(x.dtype) * 6,
        any_size=True,
    )
    return _make_masked(call, out, sources, op, has_zeros=True)


def _make_masked(
    call: Call, out: Tensor, sources: Sources, op: Op, *, has_zeros: bool = False
) -> Origin:
    """Returns a recipe that takes bits from where the op has saved its input or its output."""
    source, seen = call.source(sources)
    if source is None:
        return Origin(call.name, has_zeros=has_zeros)
    masks = (slot for slot in call.saved if slot.bits is not None and slot.base == seen)
    mask, result = next(masks, None), sources.slot(out)
    recipe = Recipe.of(op, source, seen, out, mask, of_input=mask is not result)
    return Origin(call.name, has_zeros=has_zeros, recipe=recipe)


def gelu(call: Call, out: Tensor, sources: Sources) -> Origin:
    """The recipe of a GELU."""
    approximate = call.arg(1, "approximate", "none")

    def in_place(x: Tensor) -> Tensor:
        made: Tensor = torch.ops.aten.gelu.out(x, approximate=approximate, out=x)
        return made

    op = Op(partial(_nn.gelu, approximate=approximate), in_place, in_place, any_size=True)
    return origin_of(call, out, sources, op)


def silu(call: Call, out: Tensor, sources: Sources) -> Origin:
    """The recipe of a SiLU."""
    op = Op(_nn.silu, _nn.silu_, _nn.silu_, any_size=True)
    return origin_of(call, out, sources, op)


def dropout(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """The recipe of a dropout, which multiplies by the factors that it has saved."""
    noise = [
        slot
        for slot in call.saved
        if slot.base.shape == tuple(out.shape) and slot.dtype is out.dtype
    ]
    before = sources.origin(call.first, call.version)
    has_zeros = before is not None and before.has_zeros
    if len(noise) != 1:
        return Origin(call.name, has_zeros)
    op = Op(lambda x: x, lambda x: x, noise=weakref.ref(noise[0]), any_size=True)
    call.saved.remove(noise[0])
    return origin_of(call, out, sources, op, has_zeros=has_zeros)
