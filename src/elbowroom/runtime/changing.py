"""Handles parameters that a program changes between the op that reads them and backward.

    with torch.no_grad():
        self.bias.mul_(0.999)       in a forward: weight normalization, an average, a codebook
    layer.requires_grad_(False)     between forward and backward

Plain autograd accepts this of whatever backward does not read: a bias, or the weight of a first
layer. A module that runs again reads them, and so does an op that does. Both get the values of
forward from copies. These cost time and memory, so they are made only

    where a forward is examined   of small parameters, and of those that the forward is about to
                                  change itself
    where a parameter is known    of a module that runs again, in every forward. Nothing is rebuilt
    to change                     from such a parameter

Otherwise backward raises RestoreError, and the parameter is known to change from then on. A forward
that is not examined finds out by fingerprints (`fingerprints.py`).

Which ones are known is noted in `storage.py`.
"""

import weakref
from typing import TypeAlias

import torch
from torch import Tensor, nn

from elbowroom.errors import RestoreError
from elbowroom.kernels.fakes import would_wait
from elbowroom.runtime.changed_parameters import BITS, sample_of
from elbowroom.runtime.fingerprints import Fingerprints, changed_unseen
from elbowroom.runtime.storage import (
    PLAIN,
    changed_in_place,
    changing_of,
    is_small,
    is_touchable,
    note_changing_of,
    storage_nbytes,
    version_of,
    versions_of,
)

# The last copies of a module's parameters, which its next call shares while they are in use.
_Copies: TypeAlias = "weakref.WeakValueDictionary[int, Tensor]"
_latest: "weakref.WeakKeyDictionary[nn.Module, _Copies]" = weakref.WeakKeyDictionary()


def has_same_values(x: Tensor, copy: Tensor) -> bool:
    """Returns whether a parameter has the values of its copy; True where the host would wait."""
    if would_wait(x):
        return True
    with torch._C.DisableTorchFunction(), torch.no_grad():
        bits = BITS.get(x.element_size(), x.dtype)
        return torch.equal(x.view(bits), copy.view(bits))


class ParametersAsRead:
    """The parameters of a module that runs again, as they are now.

    They are lent their former memory for the second run: `p.data` is replaced, and put back. So
    whatever refers to a parameter reads it, such as the list of an LSTM's weights.
    """

    __slots__ = (
        *("_all", "_copies", "_fingerprints", "_has_run", "_lent", "_memory", "_module"),
        *("_samples", "_versions", "_wants"),
    )

    def __init__(
        self,
        module: nn.Module,
        parameters: list[Tensor],
        fingerprints: Fingerprints | None,
        *,
        is_examined: bool,
    ) -> None:
        """is_examined: what is not known to change is copied, too, if it is small.

        fingerprints: of a forward that is not examined
        """
        self._module, self._all = weakref.ref(module), parameters
        self._has_run = False  # again: what is changed from then on is the update of the step
        self._versions = versions_of(parameters)
        self._wants = [p.requires_grad for p in parameters]
        self._copies: dict[int, Tensor] = {}
        self._memory: list[Tensor] = []
        self._samples: dict[int, int] = {}  # of large parameters
        # By the storage that is lent: the parameter, what it is now, its version in forward, and
        # whether it has other memory now.
        self._lent: dict[int, tuple[Tensor, Tensor, int, bool]] = {}
        if is_examined:
            self._memory = [p.detach() if type(p) in PLAIN else p for p in parameters]
            for i, p in enumerate(parameters):
                if not is_touchable(p):
                    continue
                if is_small(p):
                    self._copy(i)
                else:
                    self._samples[i] = sample_of(p)
        self._fingerprints = fingerprints
        if fingerprints is not None:
            fingerprints.note_module(parameters, self._module)
        for i in changing_of(module):
            if i < len(parameters):
                self._copy(i)

    def _copy(self, i: int) -> None:
        p = self._all[i]
        if i in self._copies or not is_touchable(p):
            return
        module, copy = self._module(), None
        if module is None or would_wait(p):  # a GPU's values are not compared
            known = weakref.WeakValueDictionary[int, Tensor]()
        else:
            known = _latest.setdefault(module, weakref.WeakValueDictionary())
            copy = known.get(i)
        alike = copy is not None and (copy.shape, copy.dtype) == (p.shape, p.dtype)
        if copy is None or not alike or not has_same_values(p, copy):
            copy = known[i] = torch.empty_like(p, requires_grad=False).copy_(p.detach())
        self._copies[i] = copy

    def keep(self, storages: set[int]) -> bool:
        """Copies the parameters that lie in these storages, which are about to be changed.

        Returns whether there are any. There are none once the module has run again.
        """
        if self._has_run:
            return False
        mine = [
            i
            for i, p in enumerate(self._all)
            if is_touchable(p) and p.untyped_storage()._cdata in storages
        ]
        for i in mine:
            if version_of(self._all[i]) == self._versions[i]:
                self._copy(i)
            note_changing_of(self._module(), i)
        return bool(mine)

    def lend(self) -> None:
        """Makes the parameters what they were; `take_back` undoes it.

        Raises RestoreError if one was changed in place, and has no copy.
        """
        self._set_wants(self._wants)
        if self._fingerprints is not None:
            self._check(self._fingerprints.changed(self._all))
        if versions_of(self._all) == self._versions and not (self._copies or self._memory):
            return
        for i, (p, version) in enumerate(zip(self._all, self._versions, strict=True)):
            before = self._before(i, p, version)
            if before is not None:
                has_moved = bool(self._memory) and self._memory[i].data_ptr() != p.data_ptr()
                self._lent[before.untyped_storage()._cdata] = p, p.detach(), version, has_moved
                note_changing_of(self._module(), i)
                p.data = before

    def _check(self, changed: list[int]) -> None:
        """Raises RestoreError if a changed parameter has no copy. changed: their indices."""
        unseen = [
            i
            for i in changed
            if i not in self._copies and version_of(self._all[i]) == self._versions[i]
        ]
        if unseen:
            raise self._unseen(unseen[0])

    def _unseen(self, i: int) -> RestoreError:
        name = type(self._module()).__name__
        return changed_unseen(self._all[i], f"'{name}' reads it when it runs again in backward")

    def _before(self, i: int, p: Tensor, version: int) -> Tensor | None:
        """Returns the former memory of a parameter; None: its values are what they were."""
        copy, now = self._copies.get(i), version_of(p)
        if now != version and copy is None:
            note_changing_of(self._module(), i)
            error = changed_in_place(tuple(p.shape), p.dtype, version, now)
            if not is_small(p):
                raise error
            raise RestoreError(f"{error} Or run this step again: it is copied from now on.")
        if now != version:
            return copy
        if copy is not None and storage_nbytes(p) >= p.nbytes:  # FSDP may have freed its memory
            is_known = i in changing_of(self._module())
            return copy if is_known or not has_same_values(p, copy) else None
        memory = self._memory[i] if self._memory else p
        if memory is p or memory.data_ptr() == p.data_ptr():
            if self._samples.get(i, 0) != (sample_of(p) if i in self._samples else 0):
                note_changing_of(self._module(), i)
                raise self._unseen(i)
            return None
        return memory if storage_nbytes(memory) >= memory.nbytes else None

    def take_back(self, wants: list[bool]) -> None:
        """Undoes `lend`. wants: whether each parameter wants a gradient now."""
        for p, now, *_ in self._lent.values():
            p.data = now
        self._lent, self._has_run = {}, True
        self._set_wants(wants)

    @property
    def gradients(self) -> tuple[list[Tensor | None], list[int]]:
        """The gradient of each parameter, and the versions of those that there are."""
        found = [p.grad if p.is_leaf else None for p in self._all]
        return found, versions_of([one for one in found if one is not None])

    def expect_gradients(self, before: tuple[list[Tensor | None], list[int]]) -> None:
        """Raises RestoreError if a second run has changed them."""
        (found, versions), (known, known_versions) = self.gradients, before
        changed = [i for i, one in enumerate(found) if one is not known[i]]
        if not changed and versions == known_versions:
            return
        name = type(self._module()).__name__
        raise RestoreError(
            f"'{name}' runs again in backward, and changes the gradients of its parameters each "
            "time that it runs; leave it out of what is recomputed"
        )

    @property
    def wants(self) -> list[bool]:
        """For each parameter, True if it wants a gradient."""
        return [p.requires_grad for p in self._all]

    def _set_wants(self, wants: list[bool]) -> None:
        if wants != self.wants:
            for p, flag in zip(self._all, wants, strict=True):
                if p.requires_grad is not flag and p.is_leaf:
                    p.requires_grad = flag

    def current(self, x: Tensor) -> Tensor:
        """Returns x, which the second run saves; for a parameter that was lent, what it is now.

        Plain autograd reads it so, too, but for views of memory that the parameter has left. Raises
        RestoreError if it was changed in place.
        """
        if not self._lent:
            return x
        found = self._lent.get(x.untyped_storage()._cdata)
        if found is None:
            return x
        p, now, version, has_moved = found
        if version_of(now) != version:
            raise changed_in_place(tuple(now.shape), now.dtype, version, version_of(now))
        if has_moved and x is not p:
            return x
        offset = x.storage_offset() - p.storage_offset() + now.storage_offset()
        return now.as_strided(x.shape, x.stride(), offset)
