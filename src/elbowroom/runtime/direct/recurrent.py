"""LSTM, GRU and RNN, whose backward recomputes forward by layers and stretches of time.

torch's ops save every gate of every time step: ten or more times their inputs. Here a layer saves
its input, the states that it begins with and those at the beginning of each stretch of time,
[stretches, states, directions, batch, hidden]; its weights are the user's. In backward the layer
runs again, one stretch at a time, the last one first:

    for each stretch, from the last:  gates again from x~ and its states, by torch's own op
                                      gradients of x and states; those of weights are summed

So all parts of a stretch are consistent, however x is held, and only one stretch of one layer is
alive at a time. It costs a second forward, about a third of the op's step. Dropout between layers
belongs to the layer above it, and is drawn again from the state of the random numbers.

Rounding differs from torch's where there are several stretches, by the order of the sum. With one
(packed sequences, both directions, exact=True) all bits are torch's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elbowroom.runtime.consumers import Call
from elbowroom.runtime.node import Node, itself, nothing
from elbowroom.runtime.storage import untouchable

STRETCHES = 8  # at most: the gates of an eighth of the time are alive at once
_MIN = 8  # time steps of a stretch: shorter ones lose time in small products
# How many tensors as large as its output torch's op saves (CPU, measured).
_GATES = {torch.lstm: 17, torch.gru: 8, torch.rnn_tanh: 2, torch.rnn_relu: 2}
# How many such tensors a layer's backward takes beside its gradients as it runs again (CPU,
# measured). oneDNN's LSTM also takes some as wide as the wider one of its input and its output, a
# copy of its weights, and a gradient of its input that nobody may ask for.
_AGAIN = {torch.lstm: 15, torch.gru: 10, torch.rnn_tanh: 3, torch.rnn_relu: 3}
_WIDE = 7
_ARGUMENTS = 9  # of torch.lstm and its like, in both of their forms

_Tensors = tuple[Tensor, ...]
_Grads = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class _Layer:
    """Settings by which one layer runs.

    op          torch.lstm, torch.gru, ...
    states      number of states that it carries: 2 for an LSTM
    drop        the share of its input that it drops first
    stretches   number of stretches that its time is cut into
    """

    op: Any
    states: int
    has_biases: bool
    drop: float
    training: bool
    is_bidirectional: bool
    stretches: int

    def run(self, x: Tensor, sizes: Tensor | None, tensors: _Tensors) -> _Tensors:
        """Runs the layer; returns output and last states. tensors: states and weights."""
        states, weights = tensors[: self.states], list(tensors[self.states :])
        hx = states if self.states > 1 else states[0]
        how = (self.has_biases, 1, 0.0, self.training, self.is_bidirectional)
        if sizes is None:
            made: _Tensors = self.op(x, hx, weights, *how, False)
        else:
            made = self.op(x, sizes, hx, weights, *how)
        return made

    def dropped(self, x: Tensor) -> Tensor:
        return torch.dropout(x, self.drop, True) if self.drop else x

    def cuts(self, length: int) -> list[tuple[int, int]]:
        """Returns the stretches, from .. to."""
        each = -(-length // self.stretches)
        return [(at, min(at + each, length)) for at in range(0, length, each)]


def recurrent(op: Any, max_stretches: int) -> Any:
    """Returns a function to run in place of torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu.

    max_stretches: the maximum number of stretches of time that a layer is cut into
    """

    def run(*args: Any) -> _Tensors:
        x, sizes, states, weights, rest = _arguments(args)
        has_biases, layers, dropout, training, is_bidirectional = rest[:5]
        batch_first = sizes is None and rest[5]
        if batch_first:
            x = x.transpose(0, 1)
        directions = 2 if is_bidirectional else 1
        each = len(weights) // layers
        alone = sizes is not None or is_bidirectional
        stretches = 1 if alone else max(1, min(max_stretches, x.shape[0] // _MIN))
        last = []
        for i in range(layers):
            drop = dropout if i and training else 0.0
            how = _Layer(op, len(states), has_biases, drop, training, is_bidirectional, stretches)
            own = [state[i * directions : (i + 1) * directions] for state in states]
            made = _RunAgain.apply(how, x, sizes, *own, *weights[i * each : (i + 1) * each])
            x = made[0]
            last.append(made[1:])
        ends = [torch.cat(parts) if layers > 1 else parts[0] for parts in zip(*last, strict=True)]
        return (x.transpose(0, 1) if batch_first else x, *ends)

    return run


def saved_nbytes(call: Call) -> int:
    """Bytes that torch's own op saves, about, in a call that `recurrent` could take over."""
    x, _, states, _, rest = _arguments(call.args)
    is_bidirectional = bool(rest[4])
    return layers_of(call) * (1 + is_bidirectional) * _gates_nbytes(call.func, x, states)


def layers_of(call: Call) -> int:
    """Returns the number of layers that a call runs, one after the other."""
    return int(_arguments(call.args)[4][1])


def _backward_nbytes(how: _Layer, x: Tensor, sizes: Tensor | None, tensors: _Tensors) -> int:
    """Returns the bytes that a layer's backward takes beside the gradients that it returns."""
    directions = 1 + how.is_bidirectional
    each = directions * _output_nbytes(x, tensors)
    weights_nbytes = sum(one.nbytes for one in tensors[how.states :])
    if sizes is not None:  # oneDNN has no packed ones
        return _GATES[how.op] * each
    once, always = _AGAIN[how.op] * each, 0
    if how.op is torch.lstm:
        once += _WIDE * max(each, directions * x.nbytes)
        always = weights_nbytes + (not x.requires_grad) * x.nbytes
    if how.stretches == 1:
        return once + always
    # Gradients of the other stretches wait to be joined, and sums for those of one more.
    return once // how.stretches + always + x.nbytes + weights_nbytes


def _gates_nbytes(op: Any, x: Tensor, states: Sequence[Tensor]) -> int:
    """Returns the bytes of one layer in one direction.

    x [time, batch, ...], or [sum of lengths, ...].
    """
    return _GATES[op] * _output_nbytes(x, states)


def _output_nbytes(x: Tensor, states: Sequence[Tensor]) -> int:
    """Returns the bytes of what one layer gives in one direction."""
    return x.numel() // x.shape[-1] * states[0].shape[-1] * x.itemsize


def fits_recurrent(call: Call, x: Tensor) -> bool:
    """Returns whether our node can run, which is only on a CPU.

    cuDNN draws its dropout from a state of its own, and wants all layers at once.
    """
    if call.kwargs or len(call.args) != _ARGUMENTS or x.device.type != "cpu" or not x.numel():
        return False
    _, _, states, weights, _ = _arguments(call.args)
    tensors = (*states, *weights)
    plain = all(isinstance(one, Tensor) and not untouchable(one) for one in tensors)
    return plain and any(one.requires_grad for one in (x, *tensors))


def _arguments(
    args: Sequence[Any],
) -> tuple[Tensor, Tensor | None, Sequence[Tensor], Sequence[Tensor], Sequence[Any]]:
    """Input, sizes of a packed one, states, weights, and the rest."""
    x, *others = args
    packed = isinstance(others[1], list | tuple) and isinstance(others[2], list | tuple)
    packed = packed or (isinstance(others[1], Tensor) and isinstance(others[2], list | tuple))
    sizes = others.pop(0) if packed else None
    hx, weights, *rest = others
    return x, sizes, [hx] if isinstance(hx, Tensor) else hx, weights, rest


class _RunAgain(Node):
    @staticmethod
    def forward(
        ctx: Any, how: _Layer, x: Tensor, sizes: Tensor | None, *tensors: Tensor
    ) -> _Tensors:
        ctx.how, ctx.random = how, torch.get_rng_state() if how.drop else None
        ctx.set_materialize_grads(False)
        ctx.workspace_nbytes = _backward_nbytes(how, x, sizes, tensors)
        begun: list[Tensor] = []
        with _as_in_training():
            taken = [_leaf(one, one.requires_grad) for one in tensors]
            dropped = how.dropped(_leaf(x, x.requires_grad))
            made = _forward(how, dropped, sizes, taken, begun)
        kept = torch.stack(begun) if begun else None
        ctx.save_for_backward(x, sizes, kept, *tensors)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> _Grads:
        if all(grad is None for grad in grads):
            return (None,) * (3 + len(ctx.needs_input_grad[3:]))
        x, sizes, begun, *tensors = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            if torch.is_grad_enabled():  # a gradient of the gradient is wanted: torch's own
                found = _whole(ctx, x, sizes, tuple(tensors), grads)
            else:
                with torch.autograd.graph.saved_tensors_hooks(itself, itself):  # private
                    found = _in_stretches(ctx, x, sizes, begun, tensors, grads)
        return None, found[0], None, *found[1:]


def _forward(
    how: _Layer, x: Tensor, sizes: Tensor | None, tensors: list[Tensor], begun: list[Tensor]
) -> _Tensors:
    """Runs a layer in stretches; returns output and last states.

    `begun` gets the states that stretches but the first begin with.
    """
    if how.stretches == 1:
        return tuple(one.detach() for one in how.run(x, sizes, tuple(tensors)))
    states, weights = tensors[: how.states], tensors[how.states :]
    out: Tensor | None = None
    for first, last in how.cuts(x.shape[0]):
        if first:
            begun.append(torch.stack(states))
        part, *made = how.run(x[first:last], None, (*states, *weights))
        states = [_leaf(state, True) for state in made]
        if out is None:
            out = part.new_empty((x.shape[0], *part.shape[1:]))
        out[first:last] = part.detach()
    assert out is not None
    return out, *(state.detach() for state in states)


def _in_stretches(
    ctx: Any,
    x: Tensor,
    sizes: Tensor | None,
    begun: Tensor | None,
    tensors: list[Tensor],
    grads: _Grads,
) -> list[Tensor | None]:
    """Computes the gradients of x, states and weights stretch by stretch."""
    how: _Layer = ctx.how
    wants_x, wanted = ctx.needs_input_grad[1], ctx.needs_input_grad[3:]
    with torch.enable_grad():
        leaf = _leaf(x, wants_x)
        with _drawing_from(ctx.random):
            dropped = how.dropped(leaf)
    weights = [
        _leaf(one, needed)
        for one, needed in zip(tensors[how.states :], wanted[how.states :], strict=True)
    ]
    sums: list[Tensor | None] = [None] * len(weights)
    grad_y, *carried = grads
    parts: list[Tensor | None] = []
    cuts = [(0, len(x))] if how.stretches == 1 else how.cuts(len(x))
    for i in reversed(range(len(cuts))):
        first, last = cuts[i]
        states = tensors[: how.states] if begun is None or not i else list(begun[i - 1])
        needed = [bool(i) or one for one in wanted[: how.states]]
        inputs = [_leaf(dropped[first:last], wants_x)]
        inputs += [_leaf(one, yes) for one, yes in zip(states, needed, strict=True)]
        with torch.enable_grad():
            made = how.run(inputs[0], sizes, (*inputs[1:], *weights))
        of_y = None if grad_y is None else grad_y[first:last]
        found = _gradients(made, (of_y, *carried), [*inputs, *weights])
        del made
        parts.append(found[0])
        carried = found[1 : len(inputs)]
        for at, part in enumerate(found[len(inputs) :]):
            total = sums[at]
            sums[at] = part if total is None else total if part is None else total.add_(part)
    grad_x = None
    if wants_x:
        pieces = [part for part in reversed(parts) if part is not None]
        grad_x = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if how.drop:
            (grad_x,) = torch.autograd.grad(dropped, leaf, grad_x)
    return [grad_x, *carried, *sums]


def _whole(
    ctx: Any, x: Tensor, sizes: Tensor | None, tensors: _Tensors, grads: _Grads
) -> list[Tensor | None]:
    """Computes the gradients in one run, as a graph that can be differentiated."""
    with _drawing_from(ctx.random):
        dropped = ctx.how.dropped(x)
    made = ctx.how.run(dropped, sizes, tensors)
    return _gradients(made, grads, [x, *tensors], create_graph=True)


def _gradients(
    made: _Tensors, grads: Sequence[Tensor | None], inputs: list[Tensor], **how: bool
) -> list[Tensor | None]:
    """Returns the gradient of each input; None where none is wanted or no output has one."""
    given = [
        (one, grad)
        for one, grad in zip(made, grads, strict=True)
        if grad is not None and one.requires_grad
    ]
    wanted = [one for one in inputs if one.requires_grad]
    if not given or not wanted:
        return [None] * len(inputs)
    outputs, of_outputs = zip(*given, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, of_outputs, allow_unused=True, **how))
    return [next(found) if one.requires_grad else None for one in inputs]


def _leaf(x: Tensor, needs_grad: bool) -> Tensor:
    return x.detach().requires_grad_(needs_grad)


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Runs ops by their training kernels inside this context; their saved tensors are dropped."""
    with (
        torch._C.DisableTorchFunction(),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(nothing, itself),
    ):
        yield


@contextmanager
def _drawing_from(state: Tensor | None) -> Iterator[None]:
    """Draws random numbers from this state inside; on exit the generator is restored."""
    if state is None:
        yield
        return
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(now)
