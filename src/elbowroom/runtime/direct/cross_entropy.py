"""Cross entropy whose backward takes no more memory than what it has saved.

    forward    logp = log_softmax(x); loss = nll_loss(logp, target); logp is saved, from -24 up
               where it may become a code (`plan/precision_floor.py`)
    backward   grad_x = grad - exp(logp) sum(grad), in the place of logp, some rows at a time

At the first op of backward all saved tensors are alive, and torch's own ops add the gradient of
logp, zero except for one element a row, and that of x: with logp, three times the logits. Here the
gradient of logp is computed for some rows at a time, by torch's own kernels, which treat each row
separately: the bits are theirs. The gradient of x takes the place of logp where that cannot be read
again: if it is kept, the graph is being freed, and nothing else holds it; or if it was decoded.

There are two nodes, as torch has them. The tensor between them has no memory: the second node
computes its own gradient of logp.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from elbowroom.codecs.base import FLOATS
from elbowroom.plan.precision_floor import LEAST_LOG_PROBABILITY
from elbowroom.runtime.arena import ARENA
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.held import packed
from elbowroom.runtime.direct.node import Node
from elbowroom.runtime.handles import EncodeHandle, KeepHandle, RebuildHandle
from elbowroom.runtime.slot import View
from elbowroom.runtime.storage import WeakStorage

_aten: Any = torch.ops.aten
_LEAST_NBYTES = 1 << 16  # of logits: fewer are not worth two nodes of ours
_ROWS_NBYTES = 1 << 20  # rows at a time
_REDUCTIONS = {"mean": 1, "sum": 2}  # as torch numbers them


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    least: float | None = None,
) -> Tensor:
    """Computes torch.nn.functional.cross_entropy of arguments that pass `fits_cross_entropy`.

    least: log-probabilities below are saved as this, for which a code needs no copy of them
    """
    labels = _Labels(target, weight, _REDUCTIONS[reduction], ignore_index, least)
    logp: Tensor = _LogProbabilities.apply(input, labels)
    loss: Tensor = _NegativeLogLikelihood.apply(logp, target, weight, labels)
    labels.target = labels.weight = None  # as the graph holds them
    return loss


coded_cross_entropy = partial(cross_entropy, least=LEAST_LOG_PROBABILITY)


def fits_cross_entropy(call: Call, x: Tensor) -> bool:
    """Returns whether a call takes rows of floating-point logits on a CPU and class numbers."""
    target, weight = call.arg(1, "target"), call.arg(2, "weight")
    on_cpu = x.device.type == "cpu" and x.dtype in (*FLOATS, torch.float64)
    if not on_cpu or x.dim() != 2 or not x.is_contiguous() or x.nbytes < _LEAST_NBYTES:
        return False
    if not isinstance(target, Tensor) or target.dtype is not torch.int64:
        return False
    if target.shape != x.shape[:1]:  # torch's own error differs from its kernel's
        return False
    if weight is not None and (weight.requires_grad or weight.shape != x.shape[1:]):
        return False
    old = (call.arg(3, "size_average"), call.arg(5, "reduce"))
    smooth, how = call.arg(7, "label_smoothing", 0.0), call.arg(6, "reduction", "mean")
    plain = old == (None, None) and how in _REDUCTIONS and smooth == 0.0
    return plain and (x.dtype is torch.float32 or not torch.is_autocast_enabled("cpu"))


class _Labels:
    """State shared by both nodes: settings of the loss, and what the second passes to the first.

    least  what is below is saved as this
    made   the loss, and what weights add up to
    came   the gradient of the loss, the labels, their weights and what these add up to
    """

    def __init__(
        self,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignore_index: int,
        least: float | None,
    ) -> None:
        self.target: Tensor | None = target
        self.weight = weight
        self.reduction, self.ignore_index = reduction, ignore_index
        self.least = least
        self.made: tuple[Tensor, Tensor] | None = None
        self.came: tuple[Tensor, Tensor, Tensor | None, Tensor] | None = None

    def gradient(
        self, grad: Tensor, logp: Tensor, target: Tensor, weight: Tensor | None, total: Tensor
    ) -> Tensor:
        """The gradient of these rows of logp, whose values do not matter."""
        made: Tensor = _aten.nll_loss_backward(
            grad, logp, target, weight, self.reduction, self.ignore_index, total
        )
        return made


class _NegativeLogLikelihood(Node):
    @staticmethod
    def forward(
        ctx: Any, logp: Tensor, target: Tensor, weight: Tensor | None, labels: _Labels
    ) -> Tensor:
        assert labels.made is not None
        (loss, total), labels.made = labels.made, None
        ctx.save_for_backward(target, weight, total)
        ctx.set_materialize_grads(False)
        ctx.labels, ctx.shape = labels, logp.shape
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,), (target, weight, total) = grads, ctx.saved_tensors
        if grad is None:
            return (None,) * 4
        nothing = grad.new_zeros(()).expand(ctx.shape)
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            return ctx.labels.gradient(grad, nothing, target, weight, total), None, None, None
        ctx.labels.came = grad, target, weight, total
        return nothing, None, None, None


class _LogProbabilities(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: _Labels) -> Tensor:
        logp = torch.log_softmax(x, 1)
        labels.made = _aten.nll_loss_forward(
            logp, labels.target, labels.weight, labels.reduction, labels.ignore_index
        )
        if labels.least is not None:
            logp.clamp_(min=labels.least)
        ctx.save_for_backward(logp)
        ctx.set_materialize_grads(False)
        ctx.labels = labels
        ctx.workspace_nbytes = min(2 * _ROWS_NBYTES, 2 * logp.nbytes) - logp.nbytes
        return logp

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,), labels = grads, ctx.labels
        came, labels.came = labels.came, None
        if grad is None:
            return None, None
        if came is None:
            (logp,) = ctx.saved_tensors
            return _aten._log_softmax_backward_data(grad, logp, 1, logp.dtype), None
        held = packed(ctx, 0)
        is_coded = isinstance(held, View) and not held.slot.exact
        logp, is_private = _restored(ctx)
        made = logp if is_private else torch.empty_like(logp)
        loss_grad, target, weight, total = came
        rows = max(_ROWS_NBYTES // (logp.shape[1] * logp.element_size()), 1)
        for start in range(0, len(logp), rows):
            some, end = logp[start : start + rows], start + rows
            if is_coded:  # as in `softmax.py`
                some = some - some.logsumexp(1, keepdim=True)
            of_logp = labels.gradient(loss_grad, some, target[start:end], weight, total)
            made[start:end] = _aten._log_softmax_backward_data(of_logp, some, 1, logp.dtype)
        return made, None


def _restored(ctx: Any) -> tuple[Tensor, bool]:
    """Returns the saved tensor, and whether it may be overwritten: it has no other reader."""
    held = packed(ctx, 0)
    handle = held.slot.value if isinstance(held, View) else None
    is_code = isinstance(handle, EncodeHandle) and handle.is_needed()
    is_made = isinstance(handle, RebuildHandle)
    is_kept = isinstance(handle, KeepHandle) or not isinstance(held, View)
    (saved,) = ctx.saved_tensors
    logp: Tensor = saved.detach()
    del saved
    # Its holder, and `logp` here.
    known = 2 if is_kept else is_made + is_code * (1 + ARENA.owns(logp))
    alone = WeakStorage(logp).holders() <= known
    return logp, alone and not torch._C._autograd._get_current_graph_task_keep_graph()
