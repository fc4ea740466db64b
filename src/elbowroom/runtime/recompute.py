"""Recompute: a module's forward runs again in backward, so that its saved tensors are not held.

PyTorch's own non-reentrant checkpoint does this: it saves placeholders in forward; when the first
one is restored, the module runs again from its inputs, with RNG and autocast as they were. The
inputs are saved through the hooks around it, so they can be kept, rebuilt or offloaded like
anything else. A plan that may be lossy may hold them as codes, from the end of the first run on
(`checkpoints.py`). This module handles what checkpoint leaves to its user:

    buffers      those that forward changes (BatchNorm's statistics, spectral_norm's vectors) get
                 their former values for the second run, which works on copies: statistics are
                 updated once
    random       Python's and NumPy's states, and those of generators that are attributes,
                 likewise
    attributes   those that forward sets (counters, the state of the last call), likewise
    parameters   the same as in forward, also if they were replaced for this call
                 (`torch.func.functional_call`); likewise large buffers. Changed in place since:
                 RestoreError, as in plain autograd
    training     the flags of forward hold for the second run
    arguments    lists, dictionaries, caches and other objects are passed as they were before the
                 first run (`arguments.py`); tensors inside them are inputs as well
    identity     arguments that are the same tensor remain so: attention checks whether q is k
"""

import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import is_
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elbowroom.errors import PlanError
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.calls import undisturbed
from elbowroom.runtime.rewind import Attributes, Generators, modules_of
from elbowroom.runtime.storage import check_version, version_of, versions_of
from elbowroom.runtime.unread import leave_out_unread, noting_unread

# Bytes. Up to this size a buffer is always copied: BatchNorm writes to its statistics without
# raising their version. Larger ones are not, and must not change.
LARGEST_BUFFER = 1 << 16


def recomputed(
    module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    arguments: Arguments,
    begin: Callable[[], None] = lambda: None,
) -> Any:
    """Calls call(*args, **kwargs), which runs again in backward.

    arguments: the same as they are now. begin: called once inputs are saved.
    """
    _import_dynamo()
    with torch._C.DisableTorchFunction():  # not for ops of other code
        state = State(module, arguments.sources)
    # Released after use: objects that are held until backward must not refer to outputs in a cache,
    # whose graph refers to this one. Such a cycle would never be freed.
    first = [(args, kwargs)]
    del args, kwargs
    run_first = (
        call if leave_out_unread(module, arguments) else noting_unread(module, arguments, call)
    )

    def run(*tensors: Tensor) -> Any:
        if first:
            run_args, run_kwargs = first.pop()
            return run_first(*run_args, **run_kwargs)
        run_args, run_kwargs = arguments.again(list(tensors))
        return call(*run_args, **run_kwargs)

    tensors = arguments.let_go()
    return checkpoint(
        run, *tensors, use_reentrant=False, context_fn=lambda: (state.first(begin), _Again(state))
    )


def _import_dynamo() -> None:
    """Imports what torch's checkpoint imports at its first call, and frees what that leaves.

    `torch.fx.wrap`, at the top of some of these modules, holds its own frame in a variable. That
    is a cycle, which refers to the frames of all functions that run now, and so to tensors of this
    forward: as memory of this step and the next ones, until the collector runs.
    """
    if "torch._dynamo" not in sys.modules:
        importlib.import_module("torch._dynamo")
        gc.collect()


def state_nbytes(module: nn.Module) -> int:
    """Bytes that are held for the second run besides its inputs: small buffers, the RNG's state."""
    sizes = [b.numel() * b.element_size() for b in module.buffers()]
    return torch.get_rng_state().nbytes + sum(n for n in sizes if n <= LARGEST_BUFFER)


class _Again:
    """Context `State.again` for any number of runs: checkpoint enters one object at each of them.

    Twice under retain_graph and in double backward.
    """

    def __init__(self, state: "State") -> None:
        self._state = state
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        again = self._state.again()
        again.__enter__()
        self._open.append(again)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._open.pop().__exit__(kind, error, trace)


class State:
    """State that a module's forward reads besides its inputs, as it was before it ran.

    changed_buffer  the name of a large buffer that a run inside of `again` has changed
    """

    def __init__(self, module: nn.Module, given: Iterable[Any] = ()) -> None:
        """given: generators of random numbers among its arguments."""
        self._name = type(module).__name__
        self._modules = modules_of(module)
        self._training = [child.training for child in self._modules]
        parameters = [list(child._parameters.values()) for child in self._modules]
        self._parameters = [p for some in parameters for p in some if p is not None]
        self._versions = versions_of(self._parameters)
        self._read: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (tensors, tensors.copy())
            for owner in self._modules
            for tensors in (owner._parameters, owner._buffers)
            if tensors
        ]
        self.changed_buffer = ""
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._before: list[Tensor] = []  # their copies
        self._generators = Generators(self._modules, given)
        self._attributes = Attributes(self._modules)

    def take(self, *, all_of_them: bool = False) -> list[tuple[str, Tensor, int]]:
        """Copies small buffers, or all of them; the others are noted with their versions."""
        large, small = [], []
        for owner in self._modules:
            held = owner._buffers
            for name, buffer in held.items():
                if buffer is None:
                    continue
                is_small = buffer.numel() * buffer.element_size() <= LARGEST_BUFFER
                if all_of_them or is_small:
                    self._buffers.append((held, name))
                    small.append(buffer)
                else:
                    large.append((name, buffer, version_of(buffer)))
        self._before = copies_of(small)
        return large

    @contextmanager
    def first(self, begin: Callable[[], None]) -> Iterator[None]:
        """Context around the first run, which checks that large buffers do not change."""
        with torch._C.DisableTorchFunction():
            large = self.take()
        begin()
        yield
        with torch._C.DisableTorchFunction():
            self._generators.forget_unchanged()
            self._attributes.forget_unchanged()
            changed = [name for name, buffer, version in large if version_of(buffer) != version]
        for name, buffer, _ in large:
            if name in changed:
                raise PlanError(
                    f"'{self._name}' changes its buffer '{name}' of "
                    f"{tuple(buffer.shape)} in forward, so it cannot be run a second time; "
                    "leave it out of what is recomputed"
                )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context around a second run: all is as it was, and nothing that it changes is seen."""
        if versions_of(self._parameters) != self._versions:
            for parameter, version in zip(self._parameters, self._versions, strict=True):
                check_version(parameter, version)
        now = [child.training for child in self._modules]
        buffers = [held[name] for held, name in self._buffers]
        others = [
            (tensors, name, x, tensors[name])
            for tensors, before in self._read
            if not all(map(is_, tensors.values(), before.values()))
            for name, x in before.items()
            if name in tensors and tensors[name] is not x
        ]
        try:
            for tensors, name, x, _ in others:
                tensors[name] = x
            self._set_training(self._training)
            lent = copies_of(self._before)
            versions = versions_of(lent)
            for (held, name), copy in zip(self._buffers, lent, strict=True):
                held[name] = copy
            with undisturbed(), self._generators.replayed(), self._attributes.replayed():
                yield
            after = versions_of(lent)
            if after != versions:
                every = zip(self._buffers, lent, versions, after, strict=True)
                large = (
                    name
                    for (_, name), copy, one, other in every
                    if one != other and copy.nbytes > LARGEST_BUFFER
                )
                self.changed_buffer = next(large, "")
        finally:
            self._set_training(now)
            for (held, name), buffer in zip(self._buffers, buffers, strict=True):
                held[name] = buffer
            for tensors, name, _, x in others:
                tensors[name] = x

    def _set_training(self, flags: list[bool]) -> None:
        for child, training in zip(self._modules, flags, strict=True):
            if child.training != training:
                child.training = training


def copies_of(tensors: list[Tensor]) -> list[Tensor]:
    """Returns a copy of each, with one call for those of a device and dtype: a kernel on a GPU."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    copies = []
    with torch.no_grad():
        for x in tensors:
            if type(x) is not Tensor or x.layout is not torch.strided or x.is_quantized:
                copies.append(x.detach().clone())
                continue
            copy = torch.empty_like(x)
            copies.append(copy)
            key = x.device, x.dtype
            group = groups.get(key)
            if group is None:
                group = groups[key] = [], []
            group[0].append(copy)
            group[1].append(x)
        for to, of in groups.values():
            torch._foreach_copy_(to, of)
    return copies
