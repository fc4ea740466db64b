"""FP8 between layers: what a node reads is held once, in 8 bits, and the rest is made from it.

    codes   x8 = E4M3 of x, a bf16 scale for each run of 128 elements (stage one: what non-linear
            ops read and save)
    node    y = f(x~), x~ being what x8 stands for: x8 is saved, and no other tensor
    source  how y is rebuilt from what its node has saved: the same bits, for x~ is the same
    layer   y8 = E4M3 of y, one scale a tensor (stage two); saved is the source and that scale

So a norm, an activation, a product or attention's inputs are saved once, in 8 bits, by the node
that reads them; the linear layer behind has nothing to save but its scale, and both products of
its backward read the same codes as forward did. Since forward itself runs on x~, gradients are
those of the function that was computed, but for rounding, which they pass straight through.

What a node gives is an ordinary tensor, in which no code shows: `remember` and `source_of` tell a
layer where its input came from. In-place changes are told by its version.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from elbowroom.codecs import Cast, Codec, Encoded
from elbowroom.codecs.base import FLOATS, Buffers
from elbowroom.codecs.facts import NOTHING
from elbowroom.nn._autograd import apply, refuse_twice
from elbowroom.nn._probe import NormFacts
from elbowroom.runtime.storage import PLAIN

Make = Callable[[Sequence[Tensor]], Tensor]


class EncodedForm(NamedTuple):
    """All that an Encoded has but for its buffers, which autograd saves."""

    codec: Codec
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    raw: bool

    def decode(self, buffers: Sequence[Tensor]) -> Tensor:
        """x~, of the shape and strides that x had."""
        return Encoded(
            self.codec, tuple(buffers), self.shape, self.stride, self.dtype, 0, NOTHING, self.raw
        ).decode()


class Codes(NamedTuple):
    """x8: codes and scales, and what they stand for."""

    form: EncodedForm
    buffers: Buffers


class Source(NamedTuple):
    """Recipe that makes a tensor again, bit for bit, from tensors that are saved anyway."""

    make: Make
    tensors: tuple[Tensor, ...]


def in_flow(*tensors: Tensor) -> bool:
    """Returns whether a node takes these: plain floats of one dtype, with or without gradients.

    So an output has the same bits in training, in evaluation and inside a checkpoint.
    """
    dtype = tensors[0].dtype
    return (
        dtype in FLOATS
        and all(type(x) in PLAIN and x.dtype is dtype and x.numel() > 0 for x in tensors)
        and not is_traced()
    )


def is_traced() -> bool:
    """Returns whether a compiler or tracer records the call; then torch's own ops run."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


# --- what is known of a tensor ---

_known = WeakTensorKeyDictionary()


class _TensorFacts(NamedTuple):
    """Facts about a tensor: its version, its source, and the saved-tensor hooks that saved it."""

    version: int
    source: Source | None
    hooks: Any


def remember(y: Tensor, source: Source | None) -> None:
    """Records how y can be rebuilt; None: y itself is saved, and so is every view of it."""
    _known[y] = _TensorFacts(version_of(y), source, _hooks())


def version_of(x: Tensor) -> int:
    """The count of in-place changes; -1 for an inference tensor, which has none."""
    return -1 if x.is_inference() else x._version


def _hooks() -> Any:
    """The saved-tensor hook that is called now, if any: each checkpointed region has its own."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if top is None else top[0]


def _entry(x: Tensor) -> tuple[_TensorFacts, Tensor] | None:
    """Returns the entry of x, or of the tensor that it is a view of; and which of the two."""
    for y in (x, x._base):
        entry = None if y is None else _known.get(y)  # type: ignore[no-untyped-call]
        if y is not None and entry is not None and entry.version == version_of(x):
            return entry, y
    return None


def is_known(x: Tensor) -> bool:
    """Returns whether a node has given x, and x has not changed since."""
    found = _entry(x)
    return found is not None and found[1] is x


def source_of(x: Tensor) -> Source | None:
    """Returns how x can be rebuilt from what is saved here anyway; None if that is not known.

    It is not known of what autograd has not made: that may have changed unseen (`x.data`, a NumPy
    view). Nor is it known across the border of a checkpointed region: when that runs again, it is
    given x, not what x was made from, and has to save as many tensors as before.
    """
    found = _entry(x)
    if found is None or x.grad_fn is None or found[0].hooks is not _hooks():
        return None
    (_, source, _), y = found
    if source is None:
        return Source(_itself, (x.detach(),))
    if y is x:
        return source
    if x.numel() == y.numel() and x.is_contiguous() and y.is_contiguous():
        return Source(_Viewed(source.make, x.shape), source.tensors)
    return None


def _itself(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


@dataclass(frozen=True, eq=False)
class _Viewed:
    make: Make
    shape: torch.Size

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.make(tensors).view(self.shape)


class Last(threading.local):
    """Cache of what was computed of the last tensor that autograd has made, while it is unchanged.

    A tensor that autograd has not made may change unseen (`x.data`, a NumPy view), and without
    gradients there is nothing to share.
    """

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        self.compute = compute
        self.x: weakref.ref[Tensor] | None = None
        self.version = 0
        self.result: Any = None

    def of(self, x: Tensor) -> Any:
        """Returns the result for x."""
        if not torch.is_grad_enabled() or x.grad_fn is None:
            return self.compute(x)
        known = None if self.x is None else self.x()
        if self.result is None or known is not x or self.version != x._version:
            self.result = self.compute(x)
            self.x, self.version = weakref.ref(x, self._forget), x._version
        return self.result

    def _forget(self, died: weakref.ref[Tensor]) -> None:
        if died is self.x:
            self.x = self.result = None


def encode(x: Tensor) -> Codes:
    """x in E4M3: a scale for 128 elements, or for 64 or 32 where these divide its last dimension.

    So groups end where rows do; only where 32 does not divide it do they straddle rows.
    """
    last = x.shape[-1] if x.dim() else 1
    codec = Cast("fp8_e4m3", next((size for size in (128, 64, 32) if last % size == 0), 128))
    x = x.detach()
    if not torch.ops.aten.is_non_overlapping_and_dense(x):
        x = x.clone()  # which keeps the order of its dimensions in memory, on which kernels rely
    code = codec.encode(x)
    return Codes(EncodedForm(codec, code.shape, code.stride, code.dtype, code.raw), code.buffers)


_codes = Last(encode)


# --- norms ---


@dataclass(frozen=True, eq=False)
class _NormMake:
    facts: NormFacts
    form: EncodedForm
    n: int  # buffers; then weight, and bias
    dtype: torch.dtype

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        x = self.form.decode(tensors[: self.n]).float()
        weight, bias = (*tensors[self.n :], None)[:2]
        assert weight is not None
        y = self.facts(x, weight.float(), None if bias is None else bias.float())
        return y.to(self.dtype)


class _Norm(torch.autograd.Function):
    """x, weight [D], bias [D], buffers of x8 -> y."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, make: _NormMake, *buffers: Tensor
    ) -> Tensor:
        return make((*buffers, weight) if bias is None else (*buffers, weight, bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.make, *buffers = inputs
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(weight, *buffers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice("fp8")
        weight, *buffers = ctx.saved_tensors
        make, wants = ctx.make, ctx.needs_input_grad
        g = grads[0].float()
        n, rstd = make.facts.normalized(make.form.decode(buffers).float())
        rows = tuple(range(g.dim() - 1))
        dx = dw = db = None
        if wants[1]:
            dw = (_summed(g * n, rows)).to(ctx.dtypes[1])
        if wants[2]:
            db = _summed(g, rows).to(ctx.dtypes[2])
        if wants[0]:
            g = g * (weight.float() + make.facts.offset)
            dx = g - n * (g * n).mean(-1, keepdim=True)
            if make.facts.centered:
                dx -= g.mean(-1, keepdim=True)
            dx = (dx * rstd).to(ctx.dtypes[0])
        return dx, dw, db, None, *(None for _ in buffers)


def _summed(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.sum(dims) if dims else x


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, facts: NormFacts) -> Tensor:
    """The norm of x [..., D], of which x8 alone is saved."""
    codes = _codes.of(x)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    make = _NormMake(facts, codes.form, len(codes.buffers), dtype)
    y: Tensor = apply(_Norm, x, weight, bias, make, *codes.buffers)
    given = (weight,) if bias is None else (weight, bias)
    remember(y, Source(make, (*codes.buffers, *(each.detach() for each in given))))
    return y


# --- activations ---


@dataclass(frozen=True, eq=False)
class _ActMake:
    f: Callable[[Tensor], Tensor]
    form: EncodedForm

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        # A mode that is entered around us must not take f for one more node.
        with torch._C.DisableTorchFunction():
            return self.f(self.form.decode(tensors))


class _Elementwise(torch.autograd.Function):
    """x, buffers of x8 -> f(x~)."""

    @staticmethod
    def forward(x: Tensor, make: _ActMake, *buffers: Tensor) -> Tensor:
        return make(buffers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.make, *buffers = inputs
        ctx.save_for_backward(*buffers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice("fp8")
        buffers = ctx.saved_tensors
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            x = ctx.make.form.decode(buffers).requires_grad_()
            (dx,) = torch.autograd.grad(ctx.make.f(x), x, grads[0])
        return dx, None, *(None for _ in buffers)


def elementwise(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f(x~) for each element, of which x8 alone is saved."""
    codes = _codes.of(x)
    make = _ActMake(f, codes.form)
    y: Tensor = apply(_Elementwise, x, make, *codes.buffers)
    remember(y, Source(make, codes.buffers))
    return y


# --- products ---


@dataclass(frozen=True, eq=False)
class _Factors:
    a: Make
    b: Make
    n: int  # tensors of a
    known: tuple[bool, bool]  # whether a, b are what is rebuilt, bit for bit

    def each(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.a(tensors[: self.n]), self.b(tensors[self.n :])

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        a, b = self.each(tensors)
        return a * b


class _Product(torch.autograd.Function):
    """a, b, and what both are rebuilt from -> a~ * b~."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, make: _Factors, *tensors: Tensor) -> Tensor:
        a = a if make.known[0] else make.a(tensors[: make.n])
        return a * (b if make.known[1] else make.b(tensors[make.n :]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.make, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice("fp8")
        tensors = ctx.saved_tensors
        for_a, for_b = ctx.needs_input_grad[:2]
        a, b = ctx.make.each(tensors)
        da, db = grads[0] * b if for_a else None, grads[0] * a if for_b else None
        return da, db, None, *(None for _ in tensors)


def multiply(a: Tensor, b: Tensor) -> Tensor | None:
    """Returns the product of two tensors of one shape; None unless a node has made one of them.

    The other one is read in FP8. For the first, the tensors that it is rebuilt from are saved.
    """
    given = is_known(a), is_known(b)
    if not any(given):
        return None
    first, second = (
        (source_of(x) or Source(_itself, (x.detach(),))) if known else _decoded(_codes.of(x))
        for known, x in zip(given, (a, b), strict=True)
    )
    make = _Factors(first.make, second.make, len(first.tensors), given)
    tensors = *first.tensors, *second.tensors
    y: Tensor = apply(_Product, a, b, make, *tensors)
    remember(y, Source(make, tensors))
    return y


def _decoded(codes: Codes) -> Source:
    return Source(codes.form.decode, codes.buffers)
