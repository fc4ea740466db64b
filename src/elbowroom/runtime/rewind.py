"""What a forward changes besides its outputs, so that it can be run as if for the first time."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elbowroom.errors import PlanError
from elbowroom.runtime.generators import Generators
from elbowroom.runtime.handles.keep import version_of
from elbowroom.runtime.reach import LARGE, SMALL, Reach, Values, behind_calls


class Rewind:
    """RNG states, buffers and attributes of a module, and what its forward is given.

    All as they are now. Attributes, arguments and hooks are walked through (`reach.py`): caches,
    dictionaries, collected outputs.
    Buffers get their versions back, too: an earlier forward of the same step may have saved them.
    Parameters are not copied: a forward that changes them (a momentum encoder) cannot be undone.
    """

    def __init__(
        self, module: nn.Module, given: Iterable[Any] = (), *, copies: bool = True
    ) -> None:
        """given: what the forward is handed. copies: it may change large tensors of it in place."""
        self._generators = Generators(module, tree_leaves(given))
        self._given, self._beside = Reach(given), Reach(behind_calls(module))
        self._values = (
            Values(self._given.tensors, sys.maxsize if copies else SMALL),
            Values(self._beside.tensors, LARGE),
        )
        self._cpu = torch.get_rng_state()
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state_all() if in_use else []
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor, int]] = [
            (owner, name, buffer, buffer.detach().clone(), version_of(buffer))
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._parameters = [
            (name, p.detach(), version_of(p)) for name, p in module.named_parameters()
        ]

    @property
    def changed_given(self) -> bool:
        """Whether a tensor that forward was handed has been changed in place."""
        return any(version_of(x) != version for x, version in self._given.tensors)

    @property
    def is_possible(self) -> bool:
        """Whether forward can be given the same again: it is handed no iterator."""
        return not self._given.iterators

    @property
    def changed(self) -> str | None:
        """The first parameter that has been changed since, if any."""
        found = (name for name, p, version in self._parameters if version_of(p) != version)
        return next(found, None)

    @torch.no_grad()
    def back(self) -> None:
        """Make them what they were. Raises PlanError if a parameter was changed."""
        self._generators.restore()
        for reach, values in zip((self._given, self._beside), self._values, strict=True):
            reach.restore()
            values.restore()
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for owner, name, buffer, before, _ in self._buffers:
            buffer.copy_(before)
            owner._buffers[name] = buffer
        _set_versions([(buffer, version) for _, _, buffer, _, version in self._buffers])
        if self.changed is not None:
            raise PlanError(
                f"this budget needs the first forward to be run again, and it changes the "
                f"parameter '{self.changed}' in place, which cannot be undone. Give a larger "
                "budget, or change parameters outside of forward."
            )


def _set_versions(tensors: list[tuple[Tensor, int]]) -> None:
    counted = [(x, version) for x, version in tensors if not x.is_inference()]
    torch._C._autograd._unsafe_set_version_counter(
        tuple(x for x, _ in counted), tuple(version for _, version in counted)
    )
