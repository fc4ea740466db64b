"""Attention whose q, k and v are saved in FP8.

    q8, k8, v8 = E4M3 of q, k, v, a scale for each group
    y, statistics = attention(q~, k~, v~)         saved: q8, k8, v8, y, statistics

It runs on q~, k~, v~, and its backward gets these very values again: y and the statistics belong to
them, so that gradients are those of what was computed, however sharp attention is. (Codes of q and
k beside statistics of the exact ones give gradients wrong by factors.)

Which kernel computes is torch's choice, and so is what that saves. So the call is recorded as a
graph of its own inside the node: what it saves is compared with q~, k~, v~ and y by the memory it
lies in, and handed to the node's own `save_for_backward`, the first three as codes.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from elbowroom.nn._autograd import apply, autocast_dtype, refuse_twice, without_autocast
from elbowroom.nn._flow import Codes, EncodedForm, encode, in_flow, remember

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _ViewOf(NamedTuple):
    """A saved tensor as a view of one of the tensors that are there again in backward.

    owner   which of them
    offset  from its first element
    """

    owner: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _CallSaves:
    """Tensors that the recorded call has saved.

    They are tensors while the call runs, then places, and in backward views. A graph has one of
    these; two threads that run its backward at once take turns.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.places: list[_ViewOf] = []
        self.now: Sequence[Tensor] = ()
        self.turn = threading.Lock()

    def pack(self, x: Tensor) -> int:
        self.tensors.append(x.detach())
        return len(self.tensors) - 1

    def unpack(self, index: int) -> Tensor:
        place = self.places[index]
        whole = self.now[place.owner]
        return whole.as_strided(place.shape, place.stride, whole.storage_offset() + place.offset)

    def settle(self, known: Sequence[Tensor]) -> list[Tensor]:
        """Turn tensors into places, in `known` or in the rest, which is returned."""
        wholes = list(known)
        owners = {x.untyped_storage()._cdata: i for i, x in enumerate(wholes)}
        for x in self.tensors:
            owner = x.untyped_storage()._cdata
            if owner not in owners:
                owners[owner] = len(wholes)
                wholes.append(x)
            whole = wholes[owners[owner]]
            inside = int(x.storage_offset()) - int(whole.storage_offset())
            if inside < 0 or _end_in_storage(x) > _end_in_storage(
                whole
            ):  # more of this memory than the view we have
                owners[owner] = len(wholes)
                wholes.append(x)
                inside = 0
            self.places.append(_ViewOf(owners[owner], tuple(x.shape), x.stride(), inside))
        self.tensors = []
        return wholes[len(known) :]

    @contextmanager
    def filled(self, wholes: Sequence[Tensor]) -> Iterator[None]:
        with self.turn:
            self.now = wholes
            try:
                yield
            finally:
                self.now = ()


def _end_in_storage(x: Tensor) -> int:
    """The index in its storage behind the last element."""
    reach = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset()) + (reach + 1 if x.numel() else 0)


class _Born(torch.autograd.Function):
    """Identity that gives a tensor a graph of one node. Unlike a leaf's, it does not hold x."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None


class _Attention(torch.autograd.Function):
    """q, k, v, the call, forms and buffers of their codes -> y."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Attend,
        forms: tuple[EncodedForm, ...],
        *buffers: Tensor,
    ) -> Tensor:
        values, saved = _decoded(forms, buffers), _CallSaves()
        # Modes and hooks that others have installed must not see what happens inside a node.
        with torch.enable_grad(), without_autocast(q), torch._C.DisableTorchFunction():
            seed = torch.empty(0, requires_grad=True)
            born = [apply(_Born, seed, x) for x in values]
            with saved_tensors_hooks(saved.pack, saved.unpack):
                y = call(*born)
        assert y.grad_fn is not None
        ctx.inner = GradientEdge(y.grad_fn, y.output_nr)
        ctx.born = [GradientEdge(x.grad_fn, 0) for x in born]
        ctx.recorded, ctx.forms = saved, forms
        y = y.detach()
        rest = saved.settle([*values, y])
        ctx.save_for_backward(*buffers, y, *rest)
        ctx.n = len(buffers)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_twice("fp8")
        saved = ctx.saved_tensors  # once: a checkpoint gives each tensor one time
        buffers, rest = saved[: ctx.n], saved[ctx.n :]
        wanted = [i for i, each in enumerate(ctx.needs_input_grad[:3]) if each]
        with ctx.recorded.filled([*_decoded(ctx.forms, buffers), *rest]):
            found = torch.autograd.grad(
                [ctx.inner], [ctx.born[i] for i in wanted], [grads[0]], retain_graph=True
            )
        made: list[Tensor | None] = [None, None, None]
        for i, each in zip(wanted, found, strict=True):
            made[i] = each
        return *made, None, None, *(None for _ in buffers)


def _decoded(forms: Sequence[EncodedForm], buffers: Sequence[Tensor]) -> list[Tensor]:
    made, at = [], 0
    for form in forms:
        n = 1 if form.raw else 2
        made.append(form.decode(buffers[at : at + n]))
        at += n
    return made


def attention(call: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """call(q~, k~, v~), of which their codes are saved; None where that is not for us."""
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not in_flow(q, k, v):
        return None
    codes: list[Codes] = [encode(x) for x in (q, k, v)]
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (q, k, v)):
        with without_autocast(q):
            return call(*(each.form.decode(each.buffers) for each in codes))
    buffers = [buffer for each in codes for buffer in each.buffers]
    y: Tensor = apply(_Attention, q, k, v, call, tuple(each.form for each in codes), *buffers)
    remember(y, None)
    return y
