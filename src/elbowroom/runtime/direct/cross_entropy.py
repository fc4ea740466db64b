"""Cross entropy that takes one tensor of the size of its logits, in place of up to four.

    forward    logp = log_softmax(x), some rows at a time; loss = nll_loss(logp, target); x is saved
    backward   grad_x = grad - exp(logp) sum(grad), some rows at a time, in the place of x

torch's own ops save logp, which stands beside the logits as forward ends. At the first op of
backward all saved tensors are alive, and torch adds the gradient of logp, zero except for one
element a row, and that of x. A vocabulary of 100,000 words makes this the largest part of a step.
torch's kernels treat each row alone: the bits are theirs. The gradient of x takes the place of x
where that cannot be read again: nothing else holds it, and the graph is being freed.

Where the saved tensor may get a lossy code, it is logp, from -24 up (`plan/precision_floor.py`):
exp would make a factor of an error in logits. Then logp is made, encoded and decoded part by part.

A program may change its logits after the loss: torch has no need of them any more. Their version
says so, or a checksum of the log-probabilities of each part's labels: what backward makes has to
have the same. Then the layer that made the logits makes them again, from what it has saved, under
the same test.

Logits of maps, [samples, classes, ...], are taken as [samples, classes, places]: a part has all
classes of some places, of one sample or of several.

There are two nodes, as torch has them. The tensor between them has no memory: the second node
computes its own gradient of logp.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elbowroom.codecs.base import FLOATS
from elbowroom.errors import NothingHeld, RestoreError
from elbowroom.plan.precision_floor import MIN_LOG_PROBABILITY
from elbowroom.runtime.arena import ARENA
from elbowroom.runtime.consumers import Call
from elbowroom.runtime.direct.held import packed
from elbowroom.runtime.direct.logit_parts import (
    MIN_NBYTES,
    Part,
    Reused,
    coded_parts,
    flattened,
    flattened_labels,
    parts_of,
)
from elbowroom.runtime.direct.product_again import product_again
from elbowroom.runtime.handles import EncodeHandle, KeepHandle, RebuildHandle
from elbowroom.runtime.node import Node, itself
from elbowroom.runtime.slot import View
from elbowroom.runtime.storage import WeakStorage, untouchable

_aten: Any = torch.ops.aten
_MIN_LAUNCHED = 1 << 26  # of logits on a GPU: fewer are not worth more launches
_NO_CLASS = -(1 << 62)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHANGED = (
    "the logits of a cross entropy were changed after its loss was computed, and they cannot be "
    "made again: change a copy of them (logits.clone()) instead"
)
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # as torch numbers them


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
    node: "type[_Logits | _LogProbabilities] | None" = None,
) -> Tensor:
    """Computes torch.nn.functional.cross_entropy of arguments that pass `fits_cross_entropy`.

    node: what saves the logits, or their log-probabilities
    """
    dtype = torch.float32 if _is_cast(input) else input.dtype
    labels = _Labels(target, weight, _REDUCTIONS[reduction], ignore_index, dtype)
    between: Tensor = (node or _Logits).apply(input, labels)
    loss: Tensor = _NegativeLogLikelihood.apply(between, target, weight, labels)
    labels.target = labels.weight = None  # as the graph holds them
    return loss


def fits_cross_entropy(call: Call, x: Tensor) -> bool:
    """Returns whether a call takes rows of floating-point logits and class numbers."""
    target, weight = call.arg(1, "target"), call.arg(2, "weight")
    is_cpu = x.device.type == "cpu"
    if x.dtype not in (*FLOATS, torch.float64) or not (is_cpu or x.device.type == "cuda"):
        return False
    least = MIN_NBYTES if is_cpu else _MIN_LAUNCHED
    if x.dim() < 2 or not x.is_contiguous() or x.nbytes < least:
        return False
    if not isinstance(target, Tensor) or target.dtype is not torch.int64:
        return False
    if target.shape != x.shape[:1] + x.shape[2:]:  # torch's own error differs from its kernel's
        return False
    if weight is not None and (weight.requires_grad or weight.shape != x.shape[1:2]):
        return False
    if weight is not None and _is_cast(x):
        return False
    old = (call.arg(3, "size_average"), call.arg(5, "reduce"))
    smooth, how = call.arg(7, "label_smoothing", 0.0), call.arg(6, "reduction", "mean")
    if old != (None, None) or how not in _REDUCTIONS or smooth != 0.0:
        return False
    return is_cpu or _are_rows_alone(x)


def _is_cast(x: Tensor) -> bool:
    """Returns whether autocast has the op compute in fp32 what is in half precision."""
    return x.element_size() == 2 and torch.is_autocast_enabled(x.device.type)


def _are_rows_alone(x: Tensor) -> bool:
    """Returns whether kernels of x's device give a row the same bits without the other rows."""
    if torch._C._len_torch_dispatch_stack() or torch.cuda.is_current_stream_capturing():
        return False  # stand-ins have no bits, and a capture cannot wait for them
    dtype = torch.float32 if _is_cast(x) else x.dtype
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        return _has_bits_of_torch(x.device, dtype, x.shape[1], x.dim() > 2)


@cache
def _has_bits_of_torch(
    device: torch.device, dtype: torch.dtype, classes: int, has_places: bool
) -> bool:
    """Tries it with a few rows, or places, one by one. The host waits for the answer."""
    rows = 5
    steps = torch.arange(rows * classes, device=device, dtype=torch.float64)
    x = (steps * 0.618034).frac().mul_(16).to(dtype)
    target = torch.arange(rows, device=device) * 7 % classes
    each = [slice(n, n + 1) for n in range(rows)]
    if has_places:
        x, target = x.view(1, classes, rows), target.view(1, rows)
        parts, whole_part = [Part(slice(1), one) for one in each], Part(slice(1), slice(rows))
    else:
        x = x.view(rows, classes)
        parts, whole_part = [Part(one) for one in each], Part(slice(rows))
    ours, torchs = (_Labels(target, None, _REDUCTIONS["mean"], -100, dtype) for _ in range(2))
    ours.loss_of_parts(x, parts)
    torchs.loss(torch.log_softmax(x, 1))
    (loss, _), (whole, total) = ours.made, torchs.made  # type: ignore[misc]
    came = _Came(torch.ones_like(whole), target, None, total)
    by_part, at_once = (
        _gradient(ours, came, torch.empty_like(x), cut, lambda part: ours.normalized(part.of(x)))
        for cut in (parts, [whole_part])
    )
    return torch.equal(loss, whole) and torch.equal(by_part, at_once)


class _Came(NamedTuple):
    """The gradient of the loss, the labels, their weights and what these add up to."""

    grad: Tensor
    target: Tensor
    weight: Tensor | None
    total: Tensor

    def flat(self) -> "_Came":
        """Returns it with at most one dimension of places."""
        return self._replace(grad=flattened_labels(self.grad), target=flattened_labels(self.target))

    def as_maps(self) -> "_Came":
        """Returns it with places in two dimensions, of which the first has one element."""
        flat = self.flat()
        grad = flat.grad[:, None] if flat.grad.dim() else flat.grad
        return flat._replace(grad=grad, target=flat.target[:, None])


class _Labels:
    """State shared by both nodes: settings of the loss, and what the second passes to the first.

    dtype  in which the op computes
    made   the loss, and what weights add up to
    came   what the second node has received
    """

    def __init__(
        self,
        target: Tensor,
        weight: Tensor | None,
        reduction: int,
        ignore_index: int,
        dtype: torch.dtype,
    ) -> None:
        self.target: Tensor | None = target
        self.weight = weight
        self.reduction, self.ignore_index = reduction, ignore_index
        self.dtype = dtype
        self.made: tuple[Tensor, Tensor] | None = None
        self.came: _Came | None = None

    def normalized(self, x: Tensor, room: "Reused | None" = None) -> Tensor:
        """Returns the log-probabilities of logits [rows, classes, ...], in `room` if given."""
        if room is None:
            return torch.log_softmax(x.to(self.dtype), 1)
        x = x.to(self.dtype) if x.is_contiguous() else room.like(x, self.dtype, "copy").copy_(x)
        made: Tensor = _aten._log_softmax.out(x, 1, False, out=room.like(x, self.dtype))
        return made

    def loss(self, logp: Tensor) -> None:
        """Computes the loss of all log-probabilities."""
        assert self.target is not None
        self.made = self._loss(logp, flattened_labels(self.target), self.weight, self.ignore_index)

    def _loss(
        self, logp: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor]
        if logp.dim() == 2:
            made = _aten.nll_loss_forward(logp, target, weight, self.reduction, ignore_index)
            return made
        maps = logp[:, :, None], target[:, None]  # as torch has those of 3 or 5 dimensions
        loss, total = _aten.nll_loss2d_forward(*maps, weight, self.reduction, ignore_index)
        return loss[:, 0] if loss.dim() else loss, total

    def loss_of_parts(
        self, x: Tensor, parts: Iterable[Part], use: Callable[[Tensor], None] | None = None
    ) -> list[Tensor]:
        """Computes the loss of logits, of which one part is normalized at a time.

        x: [rows, classes], or [samples, classes, places]
        use: takes the log-probabilities of each part, which are its own
        Returns the checksum of each part's log-probabilities of labels, if `use` is None.
        torch's own kernel adds these up, as those of a single class: the order of its sum depends
        on the number of labels alone.
        """
        assert self.target is not None
        target, sums, room = flattened_labels(self.target), [], Reused()
        picked = x.new_empty((len(x), 1, *x.shape[2:]), dtype=self.dtype)
        at_once = None if self.weight is None else self.normalized(x)
        for part in parts:
            if at_once is not None:
                logp = part.of(at_once)
            else:
                logp = self.normalized(part.of(x), room if use is None else None)
            chosen = self.chosen(logp, part.of_labels(target))
            part.of(picked).copy_(chosen)
            if use is None:
                sums.append(_checksum(chosen))
            else:
                use(logp if at_once is None else logp.clone(memory_format=torch.contiguous_format))
        if at_once is not None:
            self.loss(at_once)
            return sums
        only, ignored = 0, self.ignore_index
        is_class = self._is_class(target, x.shape[1])
        if ignored == only:
            target, ignored = target.where(target != ignored, _NO_CLASS), _NO_CLASS
        # A number that is no class stays, for torch's own error.
        target = torch.where(is_class, only, target)
        self.made = self._loss(picked, target, None, ignored)
        return sums

    def chosen(self, logp: Tensor, target: Tensor) -> Tensor:
        """Returns the log-probabilities of labels; where a label is no class, that of any.

        logp: of one part [rows, classes] or [samples, classes, places]
        target: of that part [rows] or [samples, places]
        """
        return logp.gather(1, target.clamp(0, logp.shape[1] - 1)[:, None])

    def _is_class(self, target: Tensor, classes: int) -> Tensor:
        return (target != self.ignore_index) & (target >= 0) & (target < classes)

    def gradient(self, came: _Came, logp: Tensor) -> Tensor:
        """The gradient of logp, whose values do not matter."""
        made: Tensor
        if logp.dim() == 2:
            made = _aten.nll_loss_backward(came.grad, logp, *self._settings(came))
            return made
        maps, came = flattened(logp)[:, :, None], came.as_maps()
        made = _aten.nll_loss2d_backward(came.grad, maps, *self._settings(came))
        return made.view(logp.shape)

    def gradient_of_part(self, came: _Came, logp: Tensor, part: Part, out: Tensor) -> None:
        """Writes the gradient of some part of logp to `out`; `came` is flat."""
        grad = part.of_labels(came.grad) if came.grad.dim() else came.grad
        came = came._replace(grad=grad, target=part.of_labels(came.target))
        op = _aten.nll_loss_backward
        if logp.dim() > 2:
            op, came = _aten.nll_loss2d_backward, came.as_maps()
            logp, out = logp[:, :, None], out[:, :, None]
        op.grad_input(came.grad, logp, *self._settings(came), grad_input=out)

    def _settings(self, came: _Came) -> tuple[Any, ...]:
        return came.target, came.weight, self.reduction, self.ignore_index, came.total


class _NegativeLogLikelihood(Node):
    @staticmethod
    def forward(
        ctx: Any, logp: Tensor, target: Tensor, weight: Tensor | None, labels: _Labels
    ) -> Tensor:
        assert labels.made is not None
        (loss, total), labels.made = labels.made, None
        loss = loss.view(target.shape) if loss.dim() else loss
        ctx.save_for_backward(target, weight, total)
        ctx.set_materialize_grads(False)
        ctx.labels, ctx.shape = labels, logp.shape
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,), (target, weight, total) = grads, ctx.saved_tensors
        if grad is None:
            return (None,) * 4
        nothing, came = grad.new_zeros(()).expand(ctx.shape), _Came(grad, target, weight, total)
        ctx.labels.came = came
        if _is_whole(grad):
            return ctx.labels.gradient(came, nothing), None, None, None
        return nothing, None, None, None


class _Logits(Node):
    """Saves the logits themselves. Parts of them are normalized as forward and backward ask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: _Labels) -> Tensor:
        flat = flattened(x)
        parts = [*parts_of(flat)]
        ctx.sums = labels.loss_of_parts(flat, parts)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.labels = labels
        part_nbytes = parts[0].of(flat).numel() * labels.dtype.itemsize
        ctx.workspace_nbytes = 3 * part_nbytes - x.nbytes
        return x.new_zeros((), dtype=labels.dtype).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,), labels = grads, ctx.labels
        came, labels.came = labels.came, None
        if grad is None:
            return None, None
        if _is_whole(grad):
            (x,) = ctx.saved_tensors
            logp, target = labels.normalized(x), flattened_labels(came.target)
            for part, known in zip(parts_of(flattened(x)), ctx.sums, strict=True):
                chosen = labels.chosen(part.of(flattened(logp.detach())), part.of_labels(target))
                if not _is_known(chosen, known):
                    raise RestoreError(_CHANGED)
            return _aten._log_softmax_backward_data(grad, logp, 1, logp.dtype).to(x.dtype), None
        logits = _UnchangedLogits(ctx, came.target)
        return _gradient(labels, came, logits.place(), logits.parts, logits.normalized), None


class _LogProbabilities(Node):
    """Saves log-probabilities, which may get a code, part by part.

    They are cut at `MIN_LOG_PROBABILITY`. A part is packed as soon as it is made, by the hooks
    that pack what autograd saves. Its result has no memory, but is saved, too: a gradient of the
    gradient comes back to this node through it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: _Labels) -> Tensor:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, ctx.unpack = hooks if hooks is not None else (itself, itself)
        flat = flattened(x)
        ctx.parts, ctx.held = [*coded_parts(flat, labels.dtype)], []

        def hold(logp: Tensor) -> None:
            ctx.held.append(pack(logp.clamp_(min=MIN_LOG_PROBABILITY)))

        labels.loss_of_parts(flat, ctx.parts, hold)
        ctx.shape, ctx.dtype, ctx.labels = x.shape, x.dtype, labels
        between = x.new_zeros((), dtype=labels.dtype).expand(x.shape)
        ctx.save_for_backward(between)
        ctx.set_materialize_grads(False)
        part_nbytes = ctx.parts[0].of(flat).numel() * labels.dtype.itemsize
        ctx.workspace_nbytes = x.nbytes + 2 * part_nbytes
        return between

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        (grad,), labels = grads, ctx.labels
        came, labels.came = labels.came, None
        if grad is None:
            return None, None
        (between,), held = ctx.saved_tensors, ctx.held
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.held = []
        if came is None or _is_whole(grad):  # None: it comes from a gradient's own backward
            logp = _joined(ctx.parts, (ctx.unpack(one).detach() for one in held), between)
            made: Tensor = _aten._log_softmax_backward_data(grad, logp, 1, logp.dtype)
            return made.to(ctx.dtype), None

        def logp_of(part: Part) -> Tensor:
            at = ctx.parts.index(part)
            logp: Tensor = ctx.unpack(held[at]).detach()
            held[at] = held[at] if held is ctx.held else None
            return logp

        made = torch.empty(ctx.shape, dtype=ctx.dtype, device=grad.device)
        return _gradient(labels, came, made, ctx.parts, logp_of), None


def _joined(parts: Iterable[Part], held: Iterable[Tensor], between: Tensor) -> Tensor:
    """Returns all log-probabilities, as a function of `between`."""
    made = torch.empty_like(between, memory_format=torch.contiguous_format)
    with torch.no_grad():
        for part, logp in zip(parts, held, strict=True):
            part.of(made.view(flattened(made).shape)).copy_(logp)
    return made + between


coded_cross_entropy = partial(cross_entropy, node=_LogProbabilities)


def _is_whole(grad: Tensor) -> bool:
    """Returns whether the gradient has to come from torch's ops as a whole.

    A gradient of the gradient is wanted, or there are several at once (`is_grads_batched`).
    """
    return torch.is_grad_enabled() or bool(untouchable(grad))


class _UnchangedLogits:
    """Logits that are those of forward, part by part."""

    def __init__(self, ctx: Any, target: Tensor) -> None:
        self._ctx, self._labels, self._target = ctx, ctx.labels, flattened_labels(target)
        self._is_again, self._room = False, Reused()
        try:
            self.x, self._is_private = _restored(ctx)
        except NothingHeld:
            raise
        except RestoreError as error:  # the logits were changed in place
            self._make_again(error)
        self.parts = [*parts_of(flattened(self.x))]
        self._sums = ctx.sums

    def place(self) -> Tensor:
        """Returns memory for the gradient: that of the logits, where nobody else has them."""
        return self.x if self._is_private else torch.empty_like(self.x)

    def normalized(self, part: Part) -> Tensor:
        """Returns the log-probabilities of some part.

        Raises RestoreError if the logits were changed, and cannot be made again.
        """
        x, labels = part.of(flattened(self.x)), self._labels
        logp: Tensor = labels.normalized(x, self._room)
        chosen = labels.chosen(logp, part.of_labels(self._target))
        if not _is_known(chosen, self._sums[self.parts.index(part)]):
            self._make_again()
            return self.normalized(part)
        return logp

    def _make_again(self, cause: RestoreError | None = None) -> None:
        x = None if self._is_again else product_again(self._ctx.next_functions[0][0])
        shape, dtype = self._ctx.shape, self._ctx.dtype
        if x is None or x.numel() != shape.numel():
            raise RestoreError(_CHANGED) from cause
        self.x, self._is_private, self._is_again = x.view(shape).to(dtype), True, True


def _checksum(chosen: Tensor) -> Tensor:
    """Returns a number of the bits of log-probabilities, and of their order."""
    bits = chosen.view(_BITS[chosen.element_size()]).flatten().to(torch.int64)
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()


def _is_known(chosen: Tensor, checksum: Tensor) -> bool:
    """Returns whether the log-probabilities of labels are, bit by bit, those of forward.

    On a GPU it is the device that ends the program, since the host does not wait for it.
    """
    if type(chosen) is not Tensor:  # a stand-in, which has no values
        return True
    now = _checksum(chosen)
    if now.device.type != "cpu":
        torch._assert_async(now == checksum, _CHANGED)
        return True
    return torch.equal(now, checksum)


def _gradient(
    labels: _Labels,
    came: _Came,
    made: Tensor,
    parts: Iterable[Part],
    logp_of: Callable[[Part], Tensor],
) -> Tensor:
    """Returns the gradient of the logits in `made`, which may be the memory of what was saved.

    logp_of: log-probabilities of a part
    """
    room, came, flat = Reused(), came.flat(), made.view(flattened(made).shape)
    for part in parts:
        logp, place = logp_of(part), part.of(flat)
        labels.gradient_of_part(came, logp, part, of_logp := room.like(logp))
        is_there = place.dtype is logp.dtype and place.is_contiguous()
        out = place if is_there else room.like(logp, use="copy")
        _aten._log_softmax_backward_data.out(of_logp, logp, 1, logp.dtype, out=out)
        if not is_there:
            place.copy_(out)
    return made


def _restored(ctx: Any) -> tuple[Tensor, bool]:
    """Returns the saved tensor, and whether it may be overwritten: it has no other reader."""
    held = packed(ctx._raw_saved_tensors[0])
    handle = held.slot.value if isinstance(held, View) else None
    is_code = isinstance(handle, EncodeHandle) and handle.is_needed()
    is_made = isinstance(handle, RebuildHandle)
    is_kept = isinstance(handle, KeepHandle) or not isinstance(held, View)
    is_shared = is_kept and isinstance(held, View) and not held.is_alone
    (saved,) = ctx.saved_tensors
    x: Tensor = saved.detach()
    del saved
    # Its holder, and `x` here.
    known = 2 if is_kept else is_made + is_code * (1 + ARENA.owns(x))
    alone = not is_shared and WeakStorage(x).holders() <= known
    return x, alone and not torch._C._autograd._get_current_graph_task_keep_graph()
