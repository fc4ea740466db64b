"""Record of what a forward changes besides its outputs, so that it can run again identically."""

import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elbowroom.errors import PlanError
from elbowroom.runtime.changed_parameters import ChangedParameters
from elbowroom.runtime.generators import Generators
from elbowroom.runtime.reach import Reach, behind_calls
from elbowroom.runtime.storage import version_of
from elbowroom.runtime.tensor_values import (
    LARGE,
    SMALL,
    TensorValues,
    is_left_alone,
    leave_graph,
    nbytes_of,
)


class Rewind:
    """RNG states, buffers and attributes of a module, and the arguments of its forward.

    All as they are now. Attributes, arguments and hooks are walked through (`reach.py`): caches,
    dictionaries, collected outputs.
    Buffers get their versions back, too: an earlier forward of the same step may have saved them.
    Parameters are copied when a watched forward (`parameters`) is about to change them. Large
    tensors are copied until a forward has not changed them (`let_go`), because copies count against
    the budget: the attention masks of four layers of GPT-Neo are 16 MiB.
    """

    def __init__(self, module: nn.Module, given: Iterable[Any], *, copies: bool) -> None:
        """given: the arguments of the forward. copies: it may change large tensors in place."""
        self._generators = Generators(modules_of(module), tree_leaves(given))
        self._given, self._reachable = Reach(given), Reach(behind_calls(module))
        self._values = (
            TensorValues(self._given.tensors, sys.maxsize if copies else SMALL),
            TensorValues(self._reachable.tensors, LARGE if copies else SMALL),
        )
        self._cpu = torch.get_rng_state()
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if in_use else []
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor | None, int]] = [
            (owner, name, buffer, buffer.detach().clone() if is_copied else None, version)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
            for version in (version_of(buffer),)
            for is_small in (copies or nbytes_of(buffer) <= SMALL or _is_unversioned(owner),)
            for is_copied in (is_small and buffer.grad_fn is None,)
        ]
        self._names = [(owner, {*owner._buffers.keys()}) for owner in module.modules()]
        self.parameters = ChangedParameters(module)

    @property
    def changed_large(self) -> bool:
        """True if a tensor argument of forward, or a large one in reach, has been changed."""
        if any(values.have_changed_large for values in self._values):
            return True
        buffers = ((x, version) for _, _, x, _, version in self._buffers if nbytes_of(x) > SMALL)
        return any(version_of(x) != version for x, version in buffers)

    @property
    def nbytes(self) -> int:
        """The bytes of all copies."""
        buffers = sum(nbytes_of(copy) for _, _, _, copy, _ in self._buffers if copy is not None)
        return buffers + self.parameters.nbytes + sum(values.nbytes for values in self._values)

    def let_go(self) -> None:
        """Drops copies of large tensors that an ended forward has not changed.

        The same forward will not change them when it runs again; otherwise `back` raises.
        """
        for values in self._values:
            values.let_go()
        self._buffers = [
            (owner, name, x, None if _is_left_alone(owner, x, version, copy) else copy, version)
            for owner, name, x, copy, version in self._buffers
        ]

    @property
    def is_possible(self) -> bool:
        """True if forward can be called with equal arguments again: it can reach no iterator."""
        return not (self._given.not_set_back or self._reachable.not_set_back)

    @property
    def is_lost(self) -> bool:
        """True if a tensor has changed of which there is no copy: `back` would raise."""
        if any(values.is_lost for values in self._values):
            return True
        return any(c is None and version_of(x) != v for _, _, x, c, v in self._buffers)

    @property
    def changed(self) -> str | None:
        """The first parameter that has been changed irreversibly, if any."""
        return self.parameters.changed

    @torch.no_grad()
    def back(self) -> None:
        """Restores all of them. Raises PlanError if a parameter was changed without a copy."""
        self._generators.restore()
        for reach, values in zip((self._given, self._reachable), self._values, strict=True):
            reach.restore()
            values.restore()
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for owner, name, buffer, before, version in self._buffers:
            if before is not None and leave_graph(buffer):
                buffer.copy_(before)
            elif version_of(buffer) != version:
                raise PlanError(
                    f"forward had to be run a second time, and the first has changed the buffer "
                    f"'{name}' in place, which the forwards before it had left alone, or which has "
                    "a graph; that cannot be undone. Assign a changed clone of it instead."
                )
            owner._buffers[name] = buffer
        for owner, names in self._names:
            for name in {*owner._buffers.keys()} - names:
                del owner._buffers[name]
        _set_versions([(buffer, version) for _, _, buffer, _, version in self._buffers])
        changed = self.parameters.changed
        self.parameters.restore()
        if changed is not None:
            raise PlanError(
                f"this budget needs the first forward to be run again, and it changes the "
                f"parameter '{changed}' in place, which cannot be undone. Give a larger "
                "budget, or change parameters outside of forward."
            )


def _is_unversioned(owner: nn.Module) -> bool:
    """Returns whether forward may write to its buffers without raising their versions."""
    return isinstance(owner, nn.modules.batchnorm._NormBase)


def _is_left_alone(owner: nn.Module, x: Tensor, version: int, copy: Tensor | None) -> bool:
    return not _is_unversioned(owner) and is_left_alone(x, version, copy)


def _set_versions(tensors: list[tuple[Tensor, int]]) -> None:
    counted = [(x, version) for x, version in tensors if not x.is_inference()]
    torch._C._autograd._unsafe_set_version_counter(
        tuple(x for x, _ in counted), tuple(version for _, version in counted)
    )


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Returns a module and all modules inside it, each once, without torch's generators."""
    found = {module: None}
    level = [module]
    while level:
        inside = [one._modules.values() for one in level if one._modules]
        children: dict[Any, None] = dict.fromkeys(chain.from_iterable(inside))
        children.pop(None, None)
        level = [child for child in children if child not in found]
        found.update(children)
    return list(found)


def parameters_in(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a module and of all inside it, each once, in torch's order.

    Torch's generators take twice as long, and a step that is examined asks a dozen times.
    """
    kind: Any = type(module)
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _GIVE_PARAMETERS):
        return list(module.parameters())
    found: dict[int, Any] = {}
    seen: set[nn.Module] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        for p in one._parameters.values():
            if p is not None:
                found.setdefault(id(p), p)
        if one._modules:
            waiting += reversed([child for child in one._modules.values() if child is not None])
    return list(found.values())


_GIVE_PARAMETERS = ("parameters", "named_parameters", "named_modules", "_named_members")
