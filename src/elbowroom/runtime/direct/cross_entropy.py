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
says so, or the log-probabilities of the labels, which forward has noted: those that backward makes
have to be the same. Then the linear layer that made the logits makes them again, from what it has
saved, under the same test.

There are two nodes, as torch has them. The tensor between them has no memory: the second node
computes its own gradient of logp.
"""

from collections.abc import Callable, Iterable, Iterator
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
from elbowroom.runtime.direct.linear_again import linear_again
from elbowroom.runtime.handles import EncodeHandle, KeepHandle, RebuildHandle
from elbowroom.runtime.node import Node, itself
from elbowroom.runtime.slot import View
from elbowroom.runtime.storage import WeakStorage, untouchable

_aten: Any = torch.ops.aten
_MIN_NBYTES = 1 << 16  # of logits: fewer are not worth two nodes of ours
_MIN_LAUNCHED = 1 << 26  # ... nor more launches
_PARTS = 16  # of the rows, within these bytes of one
_PART_NBYTES = 1 << 16, 1 << 20  # what a processor's cache holds
_LAUNCHED_PART_NBYTES = 1 << 24, 1 << 62
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
    least = _MIN_NBYTES if is_cpu else _MIN_LAUNCHED
    if x.dim() != 2 or not x.is_contiguous() or x.nbytes < least:
        return False
    if not isinstance(target, Tensor) or target.dtype is not torch.int64:
        return False
    if target.shape != x.shape[:1]:  # torch's own error differs from its kernel's
        return False
    if weight is not None and (weight.requires_grad or weight.shape != x.shape[1:]):
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
        return _has_bits_of_torch(x.device, dtype, x.shape[1])


@cache
def _has_bits_of_torch(device: torch.device, dtype: torch.dtype, classes: int) -> bool:
    """Tries it with a few rows, one by one. The host waits for the answer."""
    rows = 5
    steps = torch.arange(rows * classes, device=device, dtype=torch.float64)
    x = (steps * 0.618034).frac().mul_(16).to(dtype).view(rows, classes)
    target = torch.arange(rows, device=device) * 7 % classes
    ours, torchs = (_Labels(target, None, _REDUCTIONS["mean"], -100, dtype) for _ in range(2))
    ours.loss_of_rows(x, parts := [slice(n, n + 1) for n in range(rows)])
    torchs.loss(torch.log_softmax(x, 1))
    (loss, _), (whole, total) = ours.made, torchs.made  # type: ignore[misc]
    came = _Came(torch.ones_like(whole), target, None, total)
    by_row, at_once = (
        _gradient(ours, came, torch.empty_like(x), each, lambda part: ours.normalized(x[part]))
        for each in (parts, [slice(rows)])
    )
    return torch.equal(loss, whole) and torch.equal(by_row, at_once)


class _Came(NamedTuple):
    """The gradient of the loss, the labels, their weights and what these add up to."""

    grad: Tensor
    target: Tensor
    weight: Tensor | None
    total: Tensor


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

    def normalized(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the log-probabilities of rows of logits [rows, classes], in `out` if given."""
        if out is None:
            return torch.log_softmax(x.to(self.dtype), 1)
        made: Tensor = _aten._log_softmax.out(x.to(self.dtype), 1, False, out=out)
        return made

    def loss(self, logp: Tensor) -> None:
        """Computes the loss of all log-probabilities."""
        self.made = _aten.nll_loss_forward(
            logp, self.target, self.weight, self.reduction, self.ignore_index
        )

    def loss_of_rows(
        self, x: Tensor, parts: Iterable[slice], use: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Computes the loss of logits, of which one part of the rows is normalized at a time.

        use: takes the log-probabilities of each part, which are its own
        Returns the log-probabilities of the labels [rows, 1]; of rows without one, that of class 0.
        torch's own kernel adds them up, as those of a single class: the order of its sum depends on
        the rows alone.
        """
        target = self.target
        assert target is not None
        asked = self.asked(target, x.shape[1])
        if self.weight is not None:
            self.loss(logp := self.normalized(x))
            picked = logp.gather(1, asked)
            if use is not None:
                for rows in parts:
                    use(logp[rows].clone())
            return picked
        picked = x.new_empty(len(x), 1, dtype=self.dtype)
        room = _Reused()
        for rows in parts:
            out = room.like(x[rows], self.dtype) if use is None else None
            logp = self.normalized(x[rows], out)
            torch.gather(logp, 1, asked[rows], out=picked[rows])
            if use is not None:
                use(logp)
        only, ignored = 0, self.ignore_index
        is_class = self._is_class(target, x.shape[1])
        if ignored == only:
            target, ignored = target.where(target != ignored, _NO_CLASS), _NO_CLASS
        # A number that is no class stays, for torch's own error.
        target = torch.where(is_class, only, target)
        self.made = _aten.nll_loss_forward(picked, target, None, self.reduction, ignored)
        return picked

    def asked(self, target: Tensor, classes: int) -> Tensor:
        """The labels as indices of classes [rows, 1]; 0 for what is none."""
        return target.where(self._is_class(target, classes), 0)[:, None]

    def _is_class(self, target: Tensor, classes: int) -> Tensor:
        return (target != self.ignore_index) & (target >= 0) & (target < classes)

    def gradient(self, came: _Came, logp: Tensor) -> Tensor:
        """The gradient of logp, whose values do not matter."""
        made: Tensor = _aten.nll_loss_backward(came.grad, logp, *self._settings(came))
        return made

    def gradient_of_rows(self, came: _Came, logp: Tensor, rows: slice, out: Tensor) -> None:
        """Writes the gradient of some rows of logp to `out`."""
        grad = came.grad[rows] if came.grad.dim() else came.grad
        came = came._replace(target=came.target[rows])
        _aten.nll_loss_backward.grad_input(grad, logp, *self._settings(came), grad_input=out)

    def _settings(self, came: _Came) -> tuple[Any, ...]:
        return came.target, came.weight, self.reduction, self.ignore_index, came.total


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
        nothing, came = grad.new_zeros(()).expand(ctx.shape), _Came(grad, target, weight, total)
        ctx.labels.came = came
        if _is_whole(grad):
            return ctx.labels.gradient(came, nothing), None, None, None
        return nothing, None, None, None


class _Logits(Node):
    """Saves the logits themselves. Parts of them are normalized as forward and backward ask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: _Labels) -> Tensor:
        ctx.picked = labels.loss_of_rows(x, _parts(x))
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.labels = labels
        part_nbytes = min(_rows(x), len(x)) * x.shape[1] * labels.dtype.itemsize
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
            logp = labels.normalized(x)
            if not _is_known(logp, labels.asked(came.target, x.shape[1]), ctx.picked):
                raise RestoreError(_CHANGED)
            return _aten._log_softmax_backward_data(grad, logp, 1, logp.dtype).to(x.dtype), None
        logits = _UnchangedLogits(ctx, came.target)
        return _gradient(labels, came, logits.place(), _parts(logits.x), logits.normalized), None


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
        ctx.rows, ctx.held = [*_coded_parts(x, labels.dtype)], []

        def hold(logp: Tensor) -> None:
            ctx.held.append(pack(logp.clamp_(min=MIN_LOG_PROBABILITY)))

        labels.loss_of_rows(x, ctx.rows, hold)
        ctx.shape, ctx.dtype, ctx.labels = x.shape, x.dtype, labels
        between = x.new_zeros((), dtype=labels.dtype).expand(x.shape)
        ctx.save_for_backward(between)
        ctx.set_materialize_grads(False)
        part_nbytes = x[ctx.rows[0]].numel() * labels.dtype.itemsize
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
            logp = torch.cat([ctx.unpack(one).detach() for one in held]) + between
            made: Tensor = _aten._log_softmax_backward_data(grad, logp, 1, logp.dtype)
            return made.to(ctx.dtype), None

        def rows_of(rows: slice) -> Tensor:
            at = ctx.rows.index(rows)
            logp: Tensor = ctx.unpack(held[at]).detach()
            held[at] = held[at] if held is ctx.held else None
            return logp

        made = torch.empty(ctx.shape, dtype=ctx.dtype, device=grad.device)
        return _gradient(labels, came, made, ctx.rows, rows_of), None


coded_cross_entropy = partial(cross_entropy, node=_LogProbabilities)


def _is_whole(grad: Tensor) -> bool:
    """Returns whether the gradient has to come from torch's ops as a whole.

    A gradient of the gradient is wanted, or there are several at once (`is_grads_batched`).
    """
    return torch.is_grad_enabled() or bool(untouchable(grad))


class _UnchangedLogits:
    """Logits that are those of forward, part by part."""

    def __init__(self, ctx: Any, target: Tensor) -> None:
        self._ctx, self._labels, self._picked = ctx, ctx.labels, ctx.picked
        self._is_again, self._room = False, _Reused()
        try:
            self.x, self._is_private = _restored(ctx)
        except NothingHeld:
            raise
        except RestoreError as error:  # the logits were changed in place
            self._make_again(error)
        self._asked = self._labels.asked(target, self.x.shape[1])

    def place(self) -> Tensor:
        """Returns memory for the gradient: that of the logits, where nobody else has them."""
        return self.x if self._is_private else torch.empty_like(self.x)

    def normalized(self, rows: slice) -> Tensor:
        """Returns the log-probabilities of some rows [rows, classes].

        Raises RestoreError if the logits were changed, and cannot be made again.
        """
        x, labels = self.x[rows], self._labels
        logp: Tensor = labels.normalized(x, self._room.like(x, labels.dtype))
        if not _is_known(logp, self._asked[rows], self._picked[rows]):
            self._make_again()
            return self.normalized(rows)
        return logp

    def _make_again(self, cause: RestoreError | None = None) -> None:
        x = None if self._is_again else linear_again(self._ctx.next_functions[0][0])
        shape, dtype = self._ctx.shape, self._ctx.dtype
        if x is None or x.numel() != shape.numel():
            raise RestoreError(_CHANGED) from cause
        self.x, self._is_private, self._is_again = x.view(shape).to(dtype), True, True


def _is_known(logp: Tensor, asked: Tensor, picked: Tensor) -> bool:
    """Returns whether the log-probabilities of the labels are, bit by bit, those of forward.

    On a GPU it is the device that ends the program, since the host does not wait for it.
    """
    if type(logp) is not Tensor:  # a stand-in, which has no values
        return True
    bits = _BITS[logp.element_size()]
    now, then = logp.gather(1, asked).view(bits), picked.view(bits)
    if logp.device.type != "cpu":
        torch._assert_async((now == then).all(), _CHANGED)
        return True
    return torch.equal(now, then)


def _gradient(
    labels: _Labels,
    came: _Came,
    made: Tensor,
    parts: Iterable[slice],
    logp_of: Callable[[slice], Tensor],
) -> Tensor:
    """Returns the gradient of the logits in `made`, which may be the memory of what was saved.

    logp_of: log-probabilities of a part
    """
    room = _Reused()
    for rows in parts:
        logp, part = logp_of(rows), made[rows]
        labels.gradient_of_rows(came, logp, rows, of_logp := room.like(logp))
        if part.dtype is logp.dtype:
            _aten._log_softmax_backward_data.out(of_logp, logp, 1, logp.dtype, out=part)
        else:
            part.copy_(_aten._log_softmax_backward_data(of_logp, logp, 1, logp.dtype))
    return made


class _Reused:
    """Memory of one part of the rows after the other: no page of it is new after the first.

    An allocator that gives pages back (glibc) would have each part fault its pages in again.
    """

    def __init__(self) -> None:
        self._room: Tensor | None = None

    def like(self, part: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns memory for a part [rows, classes], whose values are undefined."""
        if self._room is None or len(self._room) < len(part):
            self._room = torch.empty_like(part, dtype=dtype)
        return self._room[: len(part)]


def _parts(x: Tensor) -> Iterator[slice]:
    """All rows of x, a few at a time."""
    return _slices(len(x), _rows(x))


def _coded_parts(x: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """All rows of x in at most `_PARTS` parts: equal ones, and the rest.

    Their number does not depend on that of the rows, if these are many, so that one script serves
    them all. A part has as many bytes as a tensor that is worth a code.
    """
    least = -(-_MIN_NBYTES // (x.shape[1] * dtype.itemsize))
    return _slices(len(x), max(-(-len(x) // _PARTS), least))


def _slices(length: int, part: int) -> Iterator[slice]:
    starts = range(0, length, part)
    return (slice(start, min(start + part, length)) for start in starts)


def _rows(x: Tensor) -> int:
    """The rows of a part."""
    least, most = _PART_NBYTES if x.device.type == "cpu" else _LAUNCHED_PART_NBYTES
    nbytes = min(max(x.nbytes // _PARTS, least), most)
    return max(nbytes // (x.shape[1] * x.element_size()), 1)


def _restored(ctx: Any) -> tuple[Tensor, bool]:
    """Returns the saved tensor, and whether it may be overwritten: it has no other reader."""
    held = packed(ctx._raw_saved_tensors[0])
    handle = held.slot.value if isinstance(held, View) else None
    is_code = isinstance(handle, EncodeHandle) and handle.is_needed()
    is_made = isinstance(handle, RebuildHandle)
    is_kept = isinstance(handle, KeepHandle) or not isinstance(held, View)
    (saved,) = ctx.saved_tensors
    x: Tensor = saved.detach()
    del saved
    # Its holder, and `x` here.
    known = 2 if is_kept else is_made + is_code * (1 + ARENA.owns(x))
    alone = WeakStorage(x).holders() <= known
    return x, alone and not torch._C._autograd._get_current_graph_task_keep_graph()
