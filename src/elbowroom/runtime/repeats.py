"""Trial of whether a module may run a second time, before it is recomputed at all.

Its known inputs are restored for the second run (`recompute.py`). Any other input would differ in
backward, and gradients would be silently wrong: a list that it changes, the clock, an unknown
generator. So its first calls run once more before, without holding tensors, as backward would run
them. Both results must have the same bits, and neither run may change an argument in place. It runs
twice more where the forward cannot begin again once its own result is known, and where the first
run changes a persistent object, which the second may not. This reads values: on a GPU the host
waits for each trial. Code that happens to give equal results in all trials is not detected.

A trial has no effect outside of itself: it works on copies of the arguments and of buffers, and all
objects that can be reached from the module, its hooks and the functions that run are restored
(`reach.py`). The function mode that examines the forward does not see the trial, so the forward can
be profiled.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from elbowroom.errors import NothingHeld, PlanError
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.changed_parameters import ChangedParameters
from elbowroom.runtime.exhaustion import is_out_of_memory
from elbowroom.runtime.node_hooks import NodeHooks, note_node_hooks
from elbowroom.runtime.own_hooks import OwnHooks
from elbowroom.runtime.reach import Reach, behind_calls
from elbowroom.runtime.recompute import ForwardState
from elbowroom.runtime.tensor_values import LARGE, TensorValues
from elbowroom.runtime.transforms import is_transformed
from elbowroom.runtime.unread import (
    NoteReads,
    may_be_unread,
    never_leave_out,
    note_unread,
    with_stand_ins,
)
from elbowroom.runtime.waiting import end_waiting

TESTED_CALLS = 2  # calls
_PART = 2**16  # elements of a tensor that are cast at once to be summed
_MAX_PARTS = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ANOTHER = (
    "it gave another result when it was run again from the same inputs (it may count in Python, or "
    "draw from a generator that is no attribute of it)"
)
_left: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_failed: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


class Trials:
    """Counter of trials in this process. A step with trials needs more memory than later ones."""

    count = 0  # of all models: a trial of another one has a step measured once more, at worst


def why_not_again(
    module: nn.Module, call: Callable[..., Any], arguments: Arguments, bits: list[Any] | None = None
) -> str:
    """Returns why a module's call may not be run a second time in backward; "": it may.

    bits: takes what the result of the call itself must have, if that is still to be compared
    (`why_another`); None: it cannot be, since the forward could not begin again then
    """
    if arguments.why_not:
        return arguments.why_not
    if is_transformed():
        return "it is traced, transformed by torch.func, or runs in forward mode"
    if parametrize._cache_enabled:
        return "it runs inside torch.nn.utils.parametrize.cached()"
    if will_be_tested(module):
        Trials.count += 1
        _left[module] = _left.get(module, TESTED_CALLS) - 1
        with unobserved():
            why, leaves = _tested(module, call, arguments, bits)
            if why and leaves:  # code that function modes do not see may read them
                never_leave_out(module)
                why, _ = _tested(module, call, arguments, leave=False)
        if why:
            _failed[module] = why
    return _failed.get(module, "")


def why_another(module: nn.Module, out: Any, bits: list[Any]) -> str:
    """Returns why a module may not run a second time after all, as its call gave `out`; or "".

    bits: from `why_not_again`
    """
    if bits == _bits_of(out):
        return ""
    _failed[module] = _ANOTHER
    return _ANOTHER


def will_be_tested(module: nn.Module) -> bool:
    """Returns whether its next call will be a trial."""
    return _left.get(module, TESTED_CALLS) > 0 and module not in _failed


class Observing(TorchFunctionMode):
    """Function mode that examines a forward, or replays its script; it does not see trials."""


@contextmanager
def unobserved() -> Iterator[None]:
    """Takes the modes that examine the forward off the stack; the user's stay, in their order."""
    end_waiting()
    modes = _all_popped()
    for mode in modes:
        if not isinstance(mode, Observing):
            torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        _all_popped()
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)


def _all_popped() -> list[TorchFunctionMode]:
    """Empties the stack of function modes; returns them, the outermost first."""
    length = torch._C._len_torch_function_stack()
    modes = [torch._C._pop_torch_function_stack() for _ in range(length)]
    return modes[::-1]


class Unrepeatable(BaseException):
    """Raised if a module that was to be recomputed cannot be: the forward has to begin again.

    It is raised only where `er.fit` handles it around the whole forward (`Fitting`). It is not an
    Exception, so that no error handler inside forward catches it.
    """


def _tested(
    module: nn.Module,
    call: Callable[..., Any],
    arguments: Arguments,
    bits: list[Any] | None = None,
    *,
    leave: bool = True,
) -> tuple[str, bool]:
    """Runs the module on copies, once or twice; returns in words why it cannot run again, or "".

    bits: takes those of its result if it has run once; None: it runs twice
    leave: tensors in objects that it is given are copied once an op reads them, for the keys and
    values of all blocks may be large; those that are not read are no arguments the second time.
    Also returns whether there were any.
    """
    state = ForwardState(module, arguments.sources)
    state.take(all_of_them=True)
    candidates = may_be_unread(arguments) if leave else frozenset[int]()
    unread = frozenset[int]()
    devices = sorted({x.get_device() for x in arguments.tensors if x.is_cuda})
    given = []
    before = Reach([*behind_calls(module), *arguments.shared])
    if kinds := before.not_set_back:
        return f"what it can reach cannot be set back after a second run (a '{kinds[0]}')", False
    nodes = NodeHooks()
    with _put_back(module, before) as (parameters, kept):
        for _ in range(2):
            tensors: list[Tensor] = []  # without those of the run before
            tensors = with_stand_ins(arguments.tensors, candidates, module)
            reads = NoteReads(arguments, tensors, candidates - unread)
            reach = Reach([*behind_calls(module), *arguments.shared])
            try:
                with torch.random.fork_rng(devices), state.again(), _holding_nothing(), nodes:
                    args, kwargs = arguments.again(tensors)
                    with reads if candidates else nullcontext():
                        out = call(*args, **kwargs)
                    unread |= reads.unread(out)
                    given.append(_bits_of(out, reads.real))
                    del out
            except NothingHeld:
                return "", False  # no trial is possible; the plan decides what may be recomputed
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                kind = type(error).__name__
                return f"it raised {kind} when it was tried on copies of its inputs", bool(
                    candidates
                )
            finally:
                if nodes.any:
                    note_node_hooks(module)
                nodes.remove()
            if parameters.first:
                return f"it changes its parameter '{parameters.first}'", False
            if parameters.first_gradient:
                name = parameters.first_gradient
                return f"it changes the gradient of its parameter '{name}'", False
            if reads.has_changed:
                return "it changes a tensor in place that it is given", False
            if state.changed_buffer:
                return f"it changes its buffer '{state.changed_buffer}', which is large", False
            changed = reach.changed() or ["tensor"] * kept.have_changed
            if bits is not None and not changed:
                break
    if changed:
        return f"it changes what outlives its call (a '{changed[0]}')", False
    if bits is not None and len(given) == 1:
        bits += given[0]
    elif given[0] != given[1]:
        return _ANOTHER, bool(candidates)
    if leave:
        note_unread(module, arguments, unread)
    return "", False


@contextmanager
def _put_back(module: nn.Module, reach: Reach) -> Iterator[tuple[ChangedParameters, TensorValues]]:
    """Restores, on exit, all objects that can be reached from a module and its hooks (`reach`).

    Yields the record of changes of its parameters, and the values of tensors in reach.
    """
    parameters = ChangedParameters(module)
    tensors = TensorValues(reach.tensors, LARGE)
    try:
        with parameters:
            yield parameters, tensors
    finally:
        changed = parameters.changed
        parameters.restore()
        reach.restore()
        tensors.restore()
    if changed is not None:
        raise PlanError(
            f"'{type(module).__name__}' changes its parameter '{changed}' in place in forward, so "
            "it cannot be run a second time; leave it out of what is recomputed"
        )


def _holding_nothing() -> OwnHooks:
    """Returns hooks that hold nothing, for a trial with gradients as in the real run.

    Without gradients, autocast would cache its casts, and the real run would use them.
    """

    def unpack(_: None) -> Tensor:
        raise NothingHeld(
            "this is the graph of a trial, by which er.fit finds out whether a module gives the "
            "same twice; it holds nothing, so backward cannot run on it. Something has kept a "
            "tensor of it: keep no tensors of a forward outside of what it returns."
        )

    return OwnHooks(lambda _: None, unpack)


def _bits_of(out: Any, real: Callable[[Any], Any] = lambda x: x) -> list[Any]:
    """Returns a digest of a module's result: of each tensor's bits, and their positions.

    real: gives the tensor that another one stands in for
    """
    nested = Arguments((out,), {})
    tensors = nested.tensors if not nested.why_not else tree_leaves(out)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return [nested.structure, *map(_digest, map(real, tensors))]


def _digest(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, int | float | str) else type(leaf)
    if leaf.layout is not torch.strided or leaf.is_quantized:
        return leaf.shape, leaf.dtype
    x = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    bits = x.view(_INTEGERS[x.element_size()])
    sums = [_sums(*part) for part in _parts(bits)]
    return leaf.shape, leaf.dtype, torch.stack(sums).sum(0).tolist()


def _parts(bits: Tensor) -> Iterator[tuple[Tensor, list[int]]]:
    """Yields parts of a tensor as 64-bit integers, each with the index that it begins at.

    One is there at a time. On a CPU a sum of int32 as int64 casts the tensor as a whole, to twice
    its bytes, while all that forward has saved is held.
    """
    if bits.dim() == 0:
        bits = bits[None]
    dim = max(range(bits.dim()), key=bits.size)
    length, numel = bits.size(dim), max(bits.numel(), 1)
    rows = max(length * _PART // numel, length // _MAX_PARTS, 1)
    for at in range(0, max(length, 1), rows):
        part = bits.narrow(dim, at, min(rows, length - at)).to(torch.int64)
        yield part, [at if d == dim else 0 for d in range(bits.dim())]


def _sums(part: Tensor, begin: list[int]) -> Tensor:
    """Returns for each dimension the sum of its elements times their position in it."""
    sums = []
    for dim, first in enumerate(begin):
        others = [d for d in range(part.dim()) if d != dim]
        line = part.sum(others) if others else part
        places = torch.arange(first + 1, first + 1 + line.numel(), device=line.device)
        sums.append((line * places).sum())
    return torch.stack(sums)
