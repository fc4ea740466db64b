"""Producers: which op computed a tensor, and the recipe by which it can be rebuilt.

Formulas, and why they are right: `handles/rebuild.py`. By family:

    activations  ReLU and similar functions, GELU, SiLU; dropout
    norms        which read the statistics that forward has saved
    products     functions of one tensor; sums and products of two; small matrix products
    copies       in another order, in another dtype, of some rows
    making       the helpers that all of these share

`_MAKERS`, at the end of this file, maps the names of ops to these. `_OF_EXACT` has those for exact
contexts alone. Of all other ops, only results without a gradient have an origin (`RECORDED`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.masks import CAPPED, MASKED_INPUT
from elbowroom.runtime.nested import tensors_in
from elbowroom.runtime.producers.activations import dropout, gelu, leaky_relu, relu, relu6, silu
from elbowroom.runtime.producers.copies import cast, computed, gather, is_copy, moved, reordered
from elbowroom.runtime.producers.making import REORDERED
from elbowroom.runtime.producers.norms import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)
from elbowroom.runtime.producers.products import (
    added_product,
    binary,
    contraction,
    convolution,
    elementwise,
    enlarged,
    joined,
    linear,
    log_probabilities,
    selected,
    softmax,
)
from elbowroom.runtime.sources import Sources
from elbowroom.runtime.storage import (
    Origin,
    is_dense,
    is_touchable,
    storage_nbytes,
    untouchable,
    version_of,
)

_MIN_DATA = 1024  # elements; smaller ones are left alone in any case


def note_origin(call: Call, out: Any, sources: Sources) -> Origin | None:
    """Records under its output's sources how to recompute an op that has just ended.

    For an output that requires no gradient it records that an op computed it, so that it does not
    count as held by the owner of an input. Returns the record.
    """
    if not isinstance(out, Tensor) or not out.numel():
        return None
    maker = _maker_of(call, sources)
    if not out.requires_grad:
        data = _note_data(call, out, sources)
        return _inside_of_function(call, out, sources) or data
    origin = None if maker is None else _note_made(maker, call, out, sources)
    if origin is None and call.name in _KEEP_ZEROS and not sources.is_exact:
        return _note_zeros(call, out, sources)
    return origin


def _note_zeros(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """Records that exact zeros matter in `out`, as they do in what it was copied from.

    Attention without a softmax divides by a product with copies of ReLU's results: an error in
    place of a zero would be divided by zero.
    """
    if not any(_has_zeros(x, sources) for x in tensors_in(call.args)):
        return None
    if untouchable(out) or not is_dense(out) or sources.origin(out) is not None:
        return None
    origin = Origin(call.name, has_zeros=True)
    sources.made(out, origin)
    return origin


def _has_zeros(x: Tensor, sources: Sources) -> bool:
    origin = None if untouchable(x) else sources.origin(x)
    return origin is not None and origin.has_zeros


def _inside_of_function(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """Records how the forward of a user's `autograd.Function` has made `out`, in exact contexts.

    Its results are saved by the ops that read them. A kernel of the user may have changed one
    without a change of its version, so the recipe is tested before a tensor is dropped.
    """
    if not sources.is_exact or torch.is_grad_enabled():
        return None
    maker = _maker_of(call, sources)
    if maker is None:
        return None
    given = [x for x in tensors_in(call.args) if is_touchable(x)]
    if not any(x.requires_grad or _has_recipe(x, sources) for x in given):
        return None
    origin = _note_made(maker, call, out, sources)
    if origin is None or origin.recipe is None:
        return None
    recipe = replace(origin.recipe, op=replace(origin.recipe.op, is_unsure=True))
    origin = replace(origin, has_zeros=True, recipe=recipe)
    sources.made(out, origin)
    return origin


def _maker_of(call: Call, sources: Sources) -> "_Maker | None":
    maker = _MAKERS.get(call.name)
    if call.name == "linear" and sources.products_again:
        return linear
    if maker is None and (sources.is_exact or (sources.codes_logits and call.name in _OF_LOGITS)):
        return _OF_EXACT.get(call.name)
    return maker


def _has_recipe(x: Tensor, sources: Sources) -> bool:
    origin = sources.origin(x)
    return origin is not None and origin.recipe is not None


def _note_made(maker: "_Maker", call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """Records the recipe that `maker` returns for the call, if `out` has memory of its own."""
    x = call.first
    if call.name in _JOINS and isinstance(x, tuple | list) and x:
        x = x[0]
    if untouchable(out) or not isinstance(x, Tensor) or untouchable(x):
        return None
    if out.numel() * out.element_size() != storage_nbytes(out) or not is_dense(out):
        return None
    if (
        version_of(out) == call.version
        and out.untyped_storage()._cdata == x.untyped_storage()._cdata
    ):
        return None  # no operation: dropout in eval mode returns its input
    origin = maker(call, out, sources)
    if origin is not None:
        if call.name in _BINARY[torch.mul] and not origin.has_zeros and not sources.is_exact:
            zeros = any(_has_zeros(y, sources) for y in tensors_in(call.args))
            origin = replace(origin, has_zeros=zeros)
        sources.made(out, origin)
    return origin


def _note_data(call: Call, out: Tensor, sources: Sources) -> Origin | None:
    """Records that the op has computed `out` from its arguments, in memory of its own.

    Its zeros stay exact whatever its code: it may be a mask, or a one-hot vector.
    """
    if out.numel() < _MIN_DATA or not is_touchable(out):
        return None
    given = call.tensors
    if not given or not all(map(is_touchable, given)):
        return None  # memory may come from elsewhere: an array, a buffer, a file
    at = out.untyped_storage()._cdata
    if any(x.untyped_storage()._cdata == at for x in given):
        return None
    origin = Origin(call.name, has_zeros=True)
    sources.made(out, origin)
    return origin


def note_copy(x: Tensor, call: Call, sources: Sources) -> Origin | None:
    """Records how to rebuild a copy of an op's input that the op itself has made, and saves.

    An op that works in place saves its input as it was; under autocast the input is cast first.
    Returns the record.
    """
    if call.name == "cross_entropy":
        return log_probabilities(call, x, sources)
    of, copy = call.first, x if x._base is None else x._base
    if of is copy or not isinstance(of, Tensor) or copy.grad_fn is None or untouchable(of):
        return None
    if copy.grad_fn._sequence_nr() < call.began:
        return None  # a copy of the user, who may have changed it since, unknown to autograd
    if sources.is_exact and copy.grad_fn.name() in REORDERED:
        return reordered(call, copy, sources)
    if sources.origin(x) is not None:
        return None
    kind, alike = copy.grad_fn.name(), copy.shape == of.shape and copy.stride() == of.stride()
    if not alike or not _is_made_of(copy, of, call):
        return None if sources.is_exact else _note_copied_zeros(call, copy, sources)
    origin: Origin | None
    if kind == "CloneBackward0":
        origin = sources.origin(of, call.version)
    elif kind == "ToCopyBackward0" and copy.dtype is not of.dtype and is_dense(copy):
        origin = cast(call, copy, sources)
    else:
        return None
    if origin is not None:
        sources.made(copy, origin)
    return origin


def _note_copied_zeros(call: Call, copy: Tensor, sources: Sources) -> Origin | None:
    """Records that exact zeros matter in what an op has copied of any of its inputs."""
    if not any(is_copy(copy, x) and _has_zeros(x, sources) for x in tensors_in(call.args)):
        return None
    origin = Origin(call.name, has_zeros=True)
    sources.made(copy, origin)
    return origin


def _is_made_of(copy: Tensor, of: Tensor, call: Call) -> bool:
    """Returns whether the node of `copy` reads `of`, as it is or was before the call changed it."""
    if copy.grad_fn is None or of.grad_fn is None:
        return False
    if version_of(of) == call.version:
        return copy.grad_fn.next_functions[:1] == ((of.grad_fn, of.output_nr),)
    return copy.grad_fn.next_functions[:1] == of.grad_fn.next_functions[:1]


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
_JOINS = ("cat", "concat", "stack")
_KEEP_ZEROS = (  # copies, in part or in another order, and what lies beside them
    *("contiguous", "clone", "reshape", "flatten", "roll", "to", "float", "bfloat16", "half"),
    *(
        "mul",
        "__mul__",
        "__rmul__",
        "type_as",
        "pad",
        "repeat",
        "repeat_interleave",
        "index_select",
        "gather",
        "__getitem__",
    ),
    *_JOINS,
)
_Maker: TypeAlias = Callable[[Call, Tensor, Sources], Origin | None]
_MAKERS: dict[str, _Maker] = {
    "relu": relu,
    "relu_": relu,
    **dict.fromkeys(MASKED_INPUT, leaky_relu),
    **dict.fromkeys(CAPPED, relu6),
    "gelu": gelu,
    "silu": silu,
    "dropout": dropout,
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "rms_norm": rms_norm,
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **{name: partial(binary, op) for op, names in _BINARY.items() for name in names},
    **dict.fromkeys(("to", "float", "bfloat16", "half", "type_as"), cast),
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), contraction),
    **dict.fromkeys(("softmax", "log_softmax"), softmax),
    **dict.fromkeys(("index_select", "__getitem__"), gather),
    "computed_rows": computed,
    "interpolate": enlarged,
    **dict.fromkeys(_JOINS, joined),
    **dict.fromkeys(("contiguous", "clone", "reshape", "flatten", "roll"), moved),
}
_OF_EXACT: dict[str, _Maker] = {
    "linear": linear,
    "addmm": added_product,
    **dict.fromkeys((f"conv{n}d" for n in (1, 2, 3)), convolution),
    **dict.fromkeys((f"conv_transpose{n}d" for n in (1, 2, 3)), convolution),
    **dict.fromkeys(("where", "masked_fill"), selected),
    **dict.fromkeys(("baddbmm", "einsum"), contraction),
    "pad": elementwise,
}
# Of these, the ones that make attention's logits, of which codes of q and k can make a softmax.
_OF_LOGITS = ("where", "masked_fill", "baddbmm")
# Ops of whose results with a gradient something is recorded.
RECORDED = frozenset((*_MAKERS, *_KEEP_ZEROS, *_OF_LOGITS))
RECORDED_WITH_PRODUCTS = RECORDED | {"linear"}
RECORDED_IN_EXACT = frozenset((*_MAKERS, *_OF_EXACT))
