"""Bytes that code between compiled regions, as at graph breaks, holds for backward.

uncompiled_nbytes   after a forward, by autograd's graph
Examined            during the first forward of its kind, which may hold more than there is: of
                    a model in which Dynamo finds nothing, all that it saves
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elbowroom.compiled import held_by as held_by_holder
from elbowroom.compiled import is_in_region
from elbowroom.errors import RestoreError
from elbowroom.fitting.why_eager import NothingCompiled
from elbowroom.runtime.own_hooks import OwnHooks
from elbowroom.runtime.readers import held_by

UNCOMPILED = "held by uncompiled code"  # name of these bytes in messages


def uncompiled_nbytes(results: Sequence[Tensor], resident: Iterable[Tensor]) -> int:
    """Returns the bytes that nodes of autograd which no compiler has made hold for backward.

    Of what hooks of the program have packed, tensors count: a checkpoint's regions hold none.

    results: of a forward; resident: tensors that exist anyway
    """
    storages: dict[int, int] = {}
    pending = [x.grad_fn for x in results if x.grad_fn is not None]
    seen: set[Any] = set(pending)
    while pending:
        node: Any = pending.pop()
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)
        if type(node).__name__ == "CompiledFunctionBackward":
            continue
        packed = (one.x if isinstance(one, _SavedTensor) else one for one in held_by(node))
        for x in tensors_in(list(packed)):
            if x.layout is torch.strided:
                storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    for x in resident:
        if x.layout is torch.strided:
            storages.pop(x.untyped_storage()._cdata, None)
    return sum(storages.values())


class Examined(OwnHooks):
    """Context that drops what a forward saves once that is more than may be held.

    A forward that was dropped counts bytes to its end, and has no backward.

    nbytes   what uncompiled code has saved, except what stands anyway
    is_over  whether all that was saved is more than may be held
    """

    def __init__(self, allowed_nbytes: float, resident: Iterable[Tensor]) -> None:
        self.nbytes, self.is_over = 0, False
        self._in_regions = 0
        self._allowed_nbytes = allowed_nbytes
        self._seen = {_address(x) for x in resident}
        self._held: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
        # Dynamo would compile them, as all that runs inside of a model that it has not compiled.
        disable: Any = torch.compiler.disable
        super().__init__(disable(self.pack), disable(self.unpack))
        self._first_runs = held_by_holder(self)

    def __enter__(self) -> None:
        super().__enter__()
        self._first_runs.__enter__()

    def __exit__(self, *given: Any) -> None:
        self._first_runs.__exit__(*given)
        super().__exit__(*given)

    def pack(self, x: Tensor) -> "_SavedTensor":
        """Holds a saved tensor, if there is room for it."""
        held, address = _SavedTensor(x.detach(), x._version), _address(x)
        if address in self._seen:
            return held
        nbytes = 0 if address is None else x.untyped_storage().nbytes()
        if is_in_region():
            self._in_regions += nbytes
        else:
            self.nbytes += nbytes
        self._held.add(held)
        if not self.is_over:
            self._seen.add(address)
            self.expect(0)
        if self.is_over:
            self._drop()
        return held

    def unpack(self, held: "_SavedTensor") -> Tensor:
        """Returns a saved tensor to a backward that begins in this forward."""
        return _unpack(held)

    def expect(self, nbytes: int) -> None:
        """Drops all if there is no room for so many bytes more."""
        if not self.is_over:
            self.is_over = self.nbytes + self._in_regions + nbytes > self._allowed_nbytes
            if self.is_over:
                self._drop()

    def _drop(self) -> None:
        for one in self._held:
            one.x = None
        self._held.clear()


@dataclass(eq=False)
class _SavedTensor:
    """A saved tensor, or None once it was dropped, and its version."""

    x: Tensor | None
    version: int


def _unpack(held: _SavedTensor) -> Tensor:
    x = held.x
    if x is None:  # by a forward that asks for gradients itself
        raise NothingCompiled
    if x._version != held.version:
        raise RestoreError(
            f"a tensor of shape {tuple(x.shape)} that backward needs was changed in place after it "
            f"was saved (version {held.version}, now {x._version}). Change a copy of it, as in "
            "x = x + 1."
        )
    return x


def _address(x: Tensor) -> int | None:
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else None


def tensors_in(out: Any) -> list[Tensor]:
    """Returns all tensors in a nested structure, such as the results of a model."""
    return [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]


def holds(node: Any) -> bool:
    """Returns whether a node of a compiled forward has its saved tensors still."""
    if node is None:
        return False
    try:
        return bool(node._raw_saved_tensors)
    except RuntimeError:  # backward has freed them
        return False
