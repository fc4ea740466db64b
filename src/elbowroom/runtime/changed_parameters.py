"""Parameters that a forward changes: a momentum encoder follows its twin, a weight is normalized.

    p.mul_(m), torch._foreach_lerp_, init.normal_   write to its memory, by any tensor that lies
                                                    there; `p.data` has a version of its own
    p.data = x                                      puts other memory behind it
    module.weight = p                               puts another parameter in its place

Copies of all parameters would double the memory of a model whose weights are frozen. So calls are
intercepted, and a parameter is copied just before a call writes to it. A change by a kernel of the
user shows in the parameter's version alone, and cannot be undone.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elbowroom.runtime.storage import version_of
from elbowroom.runtime.transforms import untransformed, unwrapped

_PLAIN = (Tensor, nn.Parameter)


class ChangedParameters(TorchFunctionMode):
    """Parameters of a module as they are now; inside, those that a call writes to are copied."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters = [
            (name, p, p.detach(), version_of(p)) for name, p in module.named_parameters()
        ]
        self._owned = [
            (one._parameters, dict(one._parameters))
            for one in module.modules()
            if type(one._parameters) is dict
        ]
        self._lies_at: dict[int, list[Tensor]] = {}
        for _, p, memory, _ in self._parameters:
            if _has_memory(p):
                self._lies_at.setdefault(memory.untyped_storage()._cdata, []).append(memory)
        self._copies: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by storage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _writes(func, kwargs):
            self._copy(args[:1], kwargs)
        return func(*args, **(kwargs or {}))

    def _copy(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        given = kwargs or {}
        # Modes around see the call alone, and transforms of torch.func do not wrap the copies.
        with torch._C.DisableTorchFunction(), torch.no_grad(), untransformed():
            for x in written(args, given):
                at = x.untyped_storage()._cdata
                if at in self._lies_at and at not in self._copies:
                    self._copies[at] = [(one, one.clone()) for one in self._lies_at[at]]

    @property
    def changed(self) -> str | None:
        """The first parameter that has been changed since, and was not copied before, if any."""
        found = (
            name
            for name, _, memory, version in self._parameters
            if version_of(memory) != version and not self._is_copied(memory)
        )
        return next(found, None)

    @property
    def nbytes(self) -> int:
        """The bytes of all copies."""
        return sum(copy.nbytes for copies in self._copies.values() for _, copy in copies)

    def _is_copied(self, memory: Tensor) -> bool:
        return _has_memory(memory) and memory.untyped_storage()._cdata in self._copies

    @property
    def first(self) -> str | None:
        """The first parameter that was written to or replaced, or has other memory, if any."""
        found = (
            name
            for name, p, memory, _ in self._parameters
            if self._is_copied(memory) or _has_moved(p, memory)
        )
        replaced = (name for held, before in self._owned for name in _replaced(held, before))
        return next(chain(found, replaced), None)

    @torch.no_grad()
    def restore(self) -> None:
        """Makes the parameters what they were, their versions too; new ones are removed."""
        for held, before in self._owned:
            if _replaced(held, before):
                held.clear()
                held.update(before)
        for _, p, memory, _ in self._parameters:
            if _has_moved(p, memory):
                p.data = memory
        for copies in self._copies.values():
            for memory, copy in copies:
                memory.copy_(copy)
        copied = [(x, version) for _, _, x, version in self._parameters if self._is_copied(x)]
        counted = [(x, version) for x, version in copied if not x.is_inference()]
        torch._C._autograd._unsafe_set_version_counter(
            tuple(x for x, _ in counted), tuple(version for _, version in counted)
        )
        self._copies.clear()


def _replaced(held: Mapping[str, Tensor | None], before: Mapping[str, Tensor | None]) -> list[str]:
    """Returns the names of what a module holds in place of its parameters before, and of new ones.

    A parameter of another class belongs to a library that exchanges it, and knows which one is
    there: FSDP2 puts a gathered weight in the place of a DTensor, and takes it back itself.
    """
    if [*held] == [*before] and all(map(is_, held.values(), before.values())):
        return []
    names = [name for name in {**before, **held} if held.get(name) is not before.get(name)]
    values = (one.get(name) for one in (held, before) for name in names)
    return names if all(x is None or _has_memory(x) for x in values) else []


def _has_memory(x: Tensor) -> bool:
    return type(x) in _PLAIN and x.layout is torch.strided


def _has_moved(p: Tensor, memory: Tensor) -> bool:
    """Returns whether p has other memory than this, and this was not freed.

    FSDP frees the memory of gathered weights.
    """
    if not _has_memory(p) or p.data_ptr() == memory.data_ptr():
        return False
    return memory.untyped_storage().nbytes() >= memory.nbytes


def _writes(func: Callable[..., Any], kwargs: dict[str, Any] | None) -> bool:
    """Returns whether a call may write to its first argument, or to its `out`."""
    by_name = _writes_by_name(func)
    if by_name is None:
        return bool(kwargs and ("out" in kwargs or "inplace" in kwargs))
    return by_name


@lru_cache(1024)  # it is asked of each op of an examined forward
def _writes_by_name(func: Callable[..., Any]) -> bool | None:
    """Returns whether calls of a function write to their first argument; None: some may."""
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    return True if name.endswith("_") else None


def written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yields what a call that writes may write to. args: its first argument, if any."""
    return _tensors((*args, kwargs.get("out"), kwargs.get("input"), kwargs.get("self")))


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yields the tensors among values, and in lists of them (of torch's foreach functions)."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(tuple(value))
        elif isinstance(value, Tensor) and _has_memory(value):
            yield unwrapped(value)
