"""Recompute: a module's forward runs again in backward, so that its saved tensors are not held.

`rerun.py` does this, as PyTorch's non-reentrant checkpoint does, with RNG and autocast as they
were. The inputs are saved through the hooks around it, so they can be kept, rebuilt or offloaded
like anything else. A plan that may be lossy may hold them as codes, from the end of the first run
on (`checkpoints.py`). This module handles what checkpoint leaves to its user:

    buffers      those that forward changes (BatchNorm's statistics, spectral_norm's vectors) get
                 their former values for the second run, which works on copies: statistics are
                 updated once
    random       Python's and NumPy's states, and those of generators that are attributes,
                 likewise
    attributes   those that forward sets (counters, the state of the last call), likewise
    parameters   the same as in forward, also if they were replaced for this call
                 (`torch.func.functional_call`), frozen, or changed since (`changing.py`); likewise
                 large buffers. Changed in place without a copy: RestoreError
    training     the flags of forward hold for the second run
    arguments    lists, dictionaries, caches and other objects are passed as they were before the
                 first run (`arguments.py`); tensors inside them are inputs as well
    identity     arguments that are the same tensor remain so: attention checks whether q is k
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from elbowroom.errors import PlanError
from elbowroom.runtime.arguments import Arguments
from elbowroom.runtime.attributes import Attributes, are_same
from elbowroom.runtime.calls import undisturbed
from elbowroom.runtime.changing import ParametersAsRead
from elbowroom.runtime.fingerprints import Fingerprints
from elbowroom.runtime.generators import Generators
from elbowroom.runtime.modules import cut_short
from elbowroom.runtime.node_hooks import REGISTERING, without_node_hooks
from elbowroom.runtime.opened_checkpoints import as_now
from elbowroom.runtime.rerun import DroppedCall
from elbowroom.runtime.rewind import modules_of
from elbowroom.runtime.storage import version_of, versions_of
from elbowroom.runtime.unread import leave_out_unread, noting_unread

# Bytes. Up to this size a buffer is always copied: BatchNorm writes to its statistics without
# raising their version. Larger ones are not, and must not change.
LARGEST_BUFFER = 1 << 16
_COPY, _VALUES = methodcaller("copy"), methodcaller("values")


def recomputed(
    module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    arguments: Arguments,
    begin: Callable[[], None] = lambda: None,
    ended: Callable[[int], None] = lambda saves: None,
    reading: list[ParametersAsRead] | None = None,
    fingerprints: Fingerprints | None = None,
    *,
    is_exact: bool = True,
) -> Any:
    """Calls call(*args, **kwargs), which runs again in backward.

    arguments: the same as they are now. begin: called once inputs are saved. ended: called when it
    has run, with the number of tensors that it has saved, none of which is held. reading: takes
    the parameters that the second run reads, if the forward is examined. fingerprints: if not.
    is_exact: no code adds errors, so that the second run makes the same values
    """
    with torch._C.DisableTorchFunction():  # not for ops of other code
        state = ForwardState(
            module, arguments.sources, fingerprints, is_examined=reading is not None
        )
        if reading is not None:
            reading.append(state.parameters)
        large = state.take()
        is_known = leave_out_unread(module, arguments)
    first = call if is_known else noting_unread(module, arguments, call)
    tensors, opened = arguments.let_go(), as_now()

    def again(tensors: list[Tensor]) -> None:
        again_args, again_kwargs = arguments.again(_outside_of_graph(tensors))
        registers = REGISTERING and id(module) in REGISTERING
        gradients = state.parameters.gradients
        try:
            with cut_short(), opened(), state.again():
                if registers:
                    with without_node_hooks():
                        call(*again_args, **again_kwargs)
                else:
                    call(*again_args, **again_kwargs)
        finally:
            state.parameters.expect_gradients(gradients)

    with torch._C.DisableTorchFunction():
        current = state.parameters.current
        region = DroppedCall(type(module).__name__, tensors, again, current, compares=is_exact)
    del tensors
    begin()
    out = region.first(first, args, kwargs)
    with torch._C.DisableTorchFunction():
        state.ended(large)
    ended(region.saves)
    return out


def _outside_of_graph(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the inputs for a second run.

    Hooks that it registers on them, or on their nodes, are not those of forward's graph, whose
    backward is running. So what has a node gets another one.
    """
    apart = list(tensors)
    for i, x in enumerate(tensors):
        if type(x) is Tensor and x.requires_grad:
            leaf = apart[i] = x.detach().requires_grad_()
            if x.grad_fn is not None:
                apart[i] = leaf.view_as(leaf)
    return apart


def state_nbytes(module: nn.Module) -> int:
    """Bytes that are held for the second run besides its inputs: small buffers, the RNG's state."""
    buffers = (b for one in modules_of(module) if one._buffers for b in one._buffers.values())
    held = {id(b): b.numel() * b.element_size() for b in buffers if b is not None}
    return _rng_nbytes() + sum(n for n in held.values() if n <= LARGEST_BUFFER)


@cache
def _rng_nbytes() -> int:
    return torch.get_rng_state().nbytes


class ForwardState:
    """State that a module's forward reads besides its inputs, as it was before it ran.

    changed_buffer  the name of a large buffer that a run inside of `again` has changed
    """

    def __init__(
        self,
        module: nn.Module,
        given: Iterable[Any],
        fingerprints: Fingerprints | None = None,
        *,
        is_examined: bool = False,
    ) -> None:
        """given: generators of random numbers among its arguments."""
        self._name = type(module).__name__
        self._modules = modules_of(module)
        self._training = [child.training for child in self._modules]
        parameters: list[Any] = [p for child in self._modules if (p := child._parameters)]
        buffers: list[Any] = [b for child in self._modules if (b := child._buffers)]
        children: list[Any] = [child._modules for child in self._modules]  # some may be added
        # Those of TorchScript are no dictionaries, and cannot get other tensors.
        tables = parameters + buffers + children
        self._tables = [table for table in tables if isinstance(table, dict)]
        self._read: list[dict[str, Any]] = [*map(_COPY, self._tables)]
        found = [p for p in chain.from_iterable(map(_VALUES, parameters)) if p is not None]
        self.parameters = ParametersAsRead(module, found, fingerprints, is_examined=is_examined)
        self.changed_buffer = ""
        self._buffers: list[tuple[dict[str, Any], str]] = []
        self._before: list[Tensor] = []  # their copies
        self._generators = Generators(self._modules, given)
        self._attributes = Attributes(self._modules)

    def take(self, *, all_of_them: bool = False) -> list[tuple[str, Tensor, int]]:
        """Copies small buffers, or all of them; the others are noted with their versions."""
        tables = [owner._buffers for owner in self._modules if owner._buffers]
        held = [(own, name, x) for own in tables for name, x in own.items() if x is not None]
        nbytes = [x.numel() * x.element_size() for _, _, x in held]
        is_small = [all_of_them or each <= LARGEST_BUFFER for each in nbytes]
        small = [x for (_, _, x), copied in zip(held, is_small, strict=True) if copied]
        self._buffers += [one[:2] for one, copied in zip(held, is_small, strict=True) if copied]
        large = [
            (name, x, version_of(x))
            for (_, name, x), copied in zip(held, is_small, strict=True)
            if not copied
        ]
        if small:
            self._before = copies_of(small)
        return large

    def ended(self, large: list[tuple[str, Tensor, int]]) -> None:
        """Notes what the first run has changed. Raises PlanError if it was a large buffer."""
        self._generators.forget_unchanged()
        for name, buffer, version in large:
            if version_of(buffer) != version:
                raise PlanError(
                    f"'{self._name}' changes its buffer '{name}' of "
                    f"{tuple(buffer.shape)} in forward, so it cannot be run a second time; "
                    "leave it out of what is recomputed"
                )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context around a second run: all is as it was, and nothing that it changes is seen."""
        now, wants = [child.training for child in self._modules], self.parameters.wants
        others = self._others()
        buffers: list[Tensor | None] = []
        try:
            self.parameters.lend()
            for table, _, before in others:
                _fill(table, before)
            buffers = [held[name] for held, name in self._buffers]
            self._set_training(self._training)
            lent = copies_of(self._before) if buffers else []
            versions = versions_of(lent)
            for (held, name), copy in zip(self._buffers, lent, strict=True):
                held[name] = copy
            with undisturbed():
                if self._generators.any or self._attributes.have_changed:
                    with self._generators.replayed(), self._attributes.replayed():
                        yield
                else:
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
            for (held, name), buffer in zip(self._buffers, buffers, strict=bool(buffers)):
                held[name] = buffer
            for table, current, _ in others:
                _fill(table, current)
            self.parameters.take_back(wants)

    def _others(self) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
        """Returns tables of parameters, buffers and children that are others now.

        Each as it is, a copy of that, and as it was.
        """
        if are_same(self._read, self._tables):
            return []
        return [
            (table, table.copy(), before)
            for table, before in zip(self._tables, self._read, strict=True)
            if not are_same([before], [table])
        ]

    def _set_training(self, flags: list[bool]) -> None:
        for child, training in zip(self._modules, flags, strict=True):
            if child.training != training:
                child.training = training


def _fill(table: dict[str, Any], contents: dict[str, Any]) -> None:
    table.clear()
    table.update(contents)


def copies_of(tensors: list[Tensor]) -> list[Tensor]:
    """Returns a copy of each, with one call for those of a device and dtype: a kernel on a GPU."""
    kinds = [
        None
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_quantized
        else (x.device, x.dtype)
        for x in tensors
    ]
    with torch.no_grad():
        copies = [
            torch.empty_like(x) if kind else x.detach().clone()
            for x, kind in zip(tensors, kinds, strict=True)
        ]
        for kind in filter(None, dict.fromkeys(kinds)):
            to = [x for x, own in zip(copies, kinds, strict=True) if own == kind]
            of = [x for x, own in zip(tensors, kinds, strict=True) if own == kind]
            torch._foreach_copy_(to, of)
    return copies
