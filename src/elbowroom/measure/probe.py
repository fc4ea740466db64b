"""Measures, in a few steps, the variance that the error of one op's saved tensors adds.

If an op is not linear in what it saves (norms, GELU, attention), the error reaches every layer
below through dx, and there is no closed form. A probe keeps the exact tensors of one op for one
step. When backward has passed the op, the probe runs the op again on them:

    error of dx = dx from the decoded tensors - dx from the exact ones

where "from the decoded ones" is what backward made, or what it makes where only what the op saves
is replaced: its statistics are those of the exact tensors, as they are in the step itself. It then
sends that alone through the rest of the graph, which is linear in it: the sum of squares that
arrives at the parameters is what the error adds, everything counted. That costs the tensors of
one op and a part of one backward. Backward hooks of the user's on tensors and modules below see
this second pass; gradients are not accumulated by it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_map

from elbowroom.measure.sensitivity import energy, is_weight
from elbowroom.plan.precision_floor import ATTENTION
from elbowroom.runtime.consumers import BUFFERS, TOLERANT, Call, tolerant_arguments
from elbowroom.runtime.node import itself
from elbowroom.runtime.second_pass import second_pass
from elbowroom.runtime.slot import View

_log = logging.getLogger("elbowroom.measure")
RESULT = "<result>"  # in place of an argument's keyword: what the op has made, and saves
_CANNOT = (RuntimeError, ValueError, TypeError, NotImplementedError)


class Probe:
    """A probe of one call, made when it has ended; `on_done` gets what the errors add.

    That is two numbers: by all, or the upper one of two codes, and by the lower (`channel_errors`).

    node      of the graph that it made, and which output of it counts
    exact     copies of the call's tolerant arguments, by position or keyword, or of its RESULT
    views     what is held instead of them
    weights   parameters met in forward so far: those below are among them
    only_weights  the op is linear in what it saves, so that dx has no error
    """

    def __init__(
        self,
        call: Call,
        node: Node,
        output: int,
        exact: dict[int | str, Tensor],
        views: dict[int | str, View],
        weights: Sequence[Tensor],
        on_done: Callable[[Tensor], None],
        *,
        only_weights: bool,
    ) -> None:
        self._only_weights = only_weights
        self._func, self._name = call.func, call.name
        self._exact, self._views = exact, views
        self._arguments = _out_of_place(call, _without_buffers(call))
        self._weights = list(weights)
        self._on_done = on_done
        self._autocast = _autocast(next(iter(exact.values())).device.type)
        self._edges = {
            key: _edge_into(value, node)
            for key, value in self._arguments.items()
            if isinstance(value, Tensor) and value.requires_grad
        }
        # What is no parameter must be free to go: it may be held by a code, here or elsewhere.
        arguments = dict.fromkeys(key for key in exact if key != RESULT)
        self._arguments = tree_map(_copy_of, self._arguments | arguments)
        self._grad: Tensor | None = None
        self._watch(node, output)

    def _watch(self, node: Node, output: int) -> None:
        """Waits for backward to come to the op."""
        before, after = node.register_prehook, node.register_hook
        wanted = [_place(node, edge) for edge in self._edges.values()]
        # One node, of which each gradient goes its own way.
        single = None not in wanted and len({*wanted}) == len(wanted)
        single = single and self._name != "rms_norm"  # whose last node is not all of it

        def note(grads: Sequence[Tensor | None]) -> None:
            grad = grads[output]
            if self._exact and grad is not None and not second_pass.runs:
                self._grad = grad.detach()

        def measure(made: Sequence[Tensor | None], _: Any) -> None:
            grad = self._grad
            if grad is None or second_pass.runs:
                return
            real = [made[place] for place in wanted if place is not None] if single else None
            try:
                self._on_done(self._measure(grad, real))
            except _CANNOT as error:
                _log.info("%s cannot be probed: %s", self._func, error)
            # Once: what a second backward finds is another gradient, and the copies are let go.
            self._exact, self._views, self._arguments, self._grad = {}, {}, {}, None

        before(note)
        after(measure)

    def _measure(self, grad: Tensor, real: list[Tensor | None] | None) -> Tensor:
        exact, mixed = self._backward(grad, {}), self._mixed()
        if real is None:  # several nodes
            real = self._backward(grad, {key: self._held(key) for key in self._views})
        if mixed is None:
            fine = self._arriving(real, exact)
            return torch.stack([fine, torch.zeros_like(fine)])
        between = self._backward(grad, mixed)
        return torch.stack([self._arriving(between, exact), self._arriving(real, between)])

    def _held(self, key: int | str) -> Tensor:
        """Returns what is held; an op may have saved another shape of its argument."""
        return self._views[key].restore().reshape(self._exact[key].shape)

    def _mixed(self) -> dict[int | str, Tensor] | None:
        """Returns what the upper of two codes holds, exact elsewhere; None: there is one code."""
        masks = {key: view.restore_side() for key, view in self._views.items()}
        if all(mask is None for mask in masks.values()):
            return None
        return {
            key: self._held(key)
            if mask is None
            else torch.where(mask.reshape(exact.shape) > 0, self._held(key), exact)
            for (key, exact), mask in zip(self._exact.items(), masks.values(), strict=True)
        }

    def _arriving(self, ones: list[Tensor | None], others: list[Tensor | None]) -> Tensor:
        """Returns what arrives at all parameters of the difference of two backwards of the op."""
        arrived, cotangents, edges = [], [], []
        for one, other, edge in zip(ones, others, self._edges.values(), strict=True):
            if one is None or other is None:
                continue
            error = one.detach() - other
            if _leads_to_weight(edge):
                arrived.append(energy(error))
            elif not self._only_weights:
                edges.append(edge)
                cotangents.append(error)
        if edges:
            # Several errors at once: they are independent, so their energies add.
            with second_pass, _buffers_as_before():
                arrived += [energy(part) for part in self._send(edges, cotangents)]
        return torch.stack(arrived).sum() if arrived else torch.zeros(())

    def _send(self, edges: list[GradientEdge], errors: list[Tensor]) -> list[Tensor]:
        """Returns what arrives at the parameters below."""
        parts = torch.autograd.grad(
            edges, self._weights, errors, retain_graph=True, allow_unused=True
        )
        return [part for part in parts if part is not None]

    def _backward(self, grad: Tensor, held: dict[int | str, Tensor]) -> list[Tensor | None]:
        """Returns the gradients of all differentiable arguments.

        Backward runs with these saved tensors instead.
        """
        given = self._arguments | {k: x for k, x in self._exact.items() if k != RESULT}
        if self._name == ATTENTION:  # which runs again from what is held
            given |= {key: x.to(given[key].dtype) for key, x in held.items()}
            held = {}
        leaves = {key: given[key].detach().requires_grad_() for key in self._edges}
        given |= leaves
        args = tuple(value for key, value in given.items() if isinstance(key, int))
        kwargs = {key: value for key, value in given.items() if isinstance(key, str)}
        call = Call(self._func, args, kwargs, self._name)
        is_rms = self._name == "rms_norm" and bool(held)

        def instead(x: Tensor) -> Tensor:
            key = next((key for key in keys_of(x, call) if key in held), None)
            if key is not None and x.shape.numel() == held[key].numel():
                return held[key].to(x.dtype).reshape(x.shape)
            return _scaled_as(x, *self._exact.values(), *held.values()) if is_rms else x

        with ExitStack() as plain:
            plain.enter_context(torch._C.DisableTorchFunction())
            plain.enter_context(saved_tensors_hooks(instead, itself))
            plain.enter_context(self._autocast())
            plain.enter_context(torch.enable_grad())
            out = self._func(*args, **kwargs)
            out = out[0] if isinstance(out, tuple) else out
        return list(torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True))


def keys_of(x: Tensor, call: Call) -> list[int | str]:
    """Returns which of its arguments, that may carry an error, an op saves as x; or its RESULT."""
    found = tolerant_arguments(x, call)
    is_made = x.grad_fn is not None and call.name not in TOLERANT and call.name != "rms_norm"
    return [RESULT] if is_made and not found else found


def can_probe(call: Call) -> bool:
    """Returns whether the op may run a second time and do the same again."""
    if call.name == ATTENTION and call.arg(4, "dropout_p", 0.0):
        return False
    # Of a view that was changed in place, the graph has other nodes.
    return not (_works_in_place(call) and call.arg(0, "input")._is_view())


def arguments(call: Call) -> dict[int | str, Any]:
    """Returns all arguments, by their positions or keywords."""
    return dict(enumerate(call.args)) | call.kwargs


def _without_buffers(call: Call) -> dict[int | str, Any]:
    """Returns the arguments without running statistics, which a second run must not move."""
    given = arguments(call)
    if call.name not in BUFFERS:  # whose sixth argument may be anything: that of a cell is a tensor
        return given
    training = call.arg(5, "training", False) or call.arg(5, "use_input_stats", False)
    for position, name in BUFFERS[call.name] if training else ():
        given[position if position < len(call.args) else name] = None
    return given


def _works_in_place(call: Call) -> bool:
    return call.name == "silu" and bool(call.arg(1, "inplace", False))


def _out_of_place(call: Call, given: dict[int | str, Any]) -> dict[int | str, Any]:
    if not _works_in_place(call):
        return given
    return given | {"inplace" if "inplace" in given else 1: False}


def _edge_into(value: Tensor, node: Node) -> GradientEdge:
    """Returns where an argument's gradient goes; one that the op overwrote is its output now."""
    below, number = node.next_functions[0] if value.grad_fn is node else (None, 0)
    return get_gradient_edge(value) if below is None else GradientEdge(below, number)


def _scaled_as(made: Tensor, exact: Tensor, held: Tensor) -> Tensor:
    """Returns the x / rms(x) that rms_norm saves, made from what is held of x; else `made` itself.

    That is x / rms(x), whose rows are so many times those of x.
    """
    if made.shape != exact.shape or not made.is_floating_point():
        return made
    norms = (torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True) for x in (made, exact))
    factor = torch.div(*norms).nan_to_num(0.0)
    return (held * factor).to(made.dtype)


def _copy_of(value: Any) -> Any:
    """Returns a copy of a tensor that is no parameter, and anything else as it is."""
    is_other = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return value.detach().clone() if is_other else value


@contextmanager
def _buffers_as_before() -> Iterator[None]:
    """Gives modules that a checkpoint runs again their buffers back once that is over."""
    before: dict[int, tuple[Tensor, Tensor]] = {}

    def note(module: nn.Module, _: Any) -> None:
        for buffer in module.buffers(recurse=False):
            before.setdefault(id(buffer), (buffer, buffer.detach().clone()))

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()
        for buffer, value in before.values():
            buffer.data.copy_(value)  # unseen: what autograd saved of it has not changed


def _autocast(device_type: str) -> Callable[[], Any]:
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled)


def _place(node: Node, edge: GradientEdge) -> int | None:
    """Returns which of a node's gradients goes along this edge."""
    for place, (below, number) in enumerate(node.next_functions):
        if below is edge.node and number == edge.output_nr:
            return place
    return None


def _leads_to_weight(edge: GradientEdge) -> bool:
    return is_weight(getattr(edge.node, "variable", None))
