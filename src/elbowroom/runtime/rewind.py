"""Record of what a forward changes besides its outputs, so that it can run again as at first."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elbowroom.errors import PlanError
from elbowroom.runtime.generators import Generators
from elbowroom.runtime.handles.keep import version_of
from elbowroom.runtime.reach import (
    LARGE,
    SMALL,
    Reach,
    Values,
    behind_calls,
    is_left_alone,
    nbytes_of,
)


class Rewind:
    """RNG states, buffers and attributes of a module, and what its forward is given.

    All as they are now. Attributes, arguments and hooks are walked through (`reach.py`): caches,
    dictionaries, collected outputs.
    Buffers get their versions back, too: an earlier forward of the same step may have saved them.
    Parameters are not copied: a forward that changes them (a momentum encoder) cannot be undone.
    Large tensors are copied until a forward has left them alone (`let_go`), for copies stand in the
    step's own budget: the attention masks of four layers of GPT-Neo are 16 MiB.
    """

    def __init__(
        self, module: nn.Module, given: Iterable[Any] = (), *, copies: bool = True
    ) -> None:
        """given: what the forward is handed. copies: it may change large tensors in place."""
        self._generators = Generators(module, tree_leaves(given))
        self._given, self._beside = Reach(given), Reach(behind_calls(module))
        self._values = (
            Values(self._given.tensors, sys.maxsize if copies else SMALL),
            Values(self._beside.tensors, LARGE if copies else SMALL),
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
            for is_copied in (copies or nbytes_of(buffer) <= SMALL or _is_unversioned(owner),)
        ]
        self._parameters = [
            (name, p.detach(), version_of(p)) for name, p in module.named_parameters()
        ]

    @property
    def changed_large(self) -> bool:
        """True if a tensor that forward was handed, or a large one in reach, has been changed."""
        tensors = [*self._given.tensors, *self._beside.tensors]
        tensors += [(x, version) for _, _, x, _, version in self._buffers if nbytes_of(x) > SMALL]
        return any(version_of(x) != version for x, version in tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of all copies."""
        buffers = sum(nbytes_of(copy) for _, _, _, copy, _ in self._buffers if copy is not None)
        return buffers + sum(values.nbytes for values in self._values)

    def let_go(self) -> None:
        """Drops copies of large tensors that a forward, which has ended, has left alone.

        The same forward will leave it alone when it runs again; if not, `back` raises.
        """
        for values in self._values:
            values.let_go()
        self._buffers = [
            (owner, name, x, None if _is_left_alone(owner, x, version, copy) else copy, version)
            for owner, name, x, copy, version in self._buffers
        ]

    @property
    def is_possible(self) -> bool:
        """True if forward can be given the same arguments again: none of them is an iterator."""
        return not self._given.iterators

    @property
    def changed(self) -> str | None:
        """The first parameter that has been changed since, if any."""
        found = (name for name, p, version in self._parameters if version_of(p) != version)
        return next(found, None)

    @torch.no_grad()
    def back(self) -> None:
        """Makes them what they were. Raises PlanError if a parameter was changed."""
        self._generators.restore()
        for reach, values in zip((self._given, self._beside), self._values, strict=True):
            reach.restore()
            values.restore()
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for owner, name, buffer, before, version in self._buffers:
            if before is not None:
                buffer.copy_(before)
            elif version_of(buffer) != version:
                raise PlanError(
                    f"forward had to be run a second time, and the first has changed the buffer "
                    f"'{name}' in place, which the forwards before it had left alone; that cannot "
                    "be undone. Assign a changed clone of it instead."
                )
            owner._buffers[name] = buffer
        _set_versions([(buffer, version) for _, _, buffer, _, version in self._buffers])
        if self.changed is not None:
            raise PlanError(
                f"this budget needs the first forward to be run again, and it changes the "
                f"parameter '{self.changed}' in place, which cannot be undone. Give a larger "
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
