"""Parameters that a forward changes: a momentum encoder follows its twin, a weight is normalized.

    p.mul_(m), torch._foreach_lerp_, init.normal_   write to its memory, by any tensor that lies
                                                    there; `p.data` has a version of its own
    p.data = x                                      puts other memory behind it
    module.weight = p                               puts another parameter in its place
    p.grad.mul_(m), p.grad = None                   change its gradient, or drop it
    nn.Embedding(..., max_norm=1)                   scales down the rows that it looks up

Copies of all parameters would double the memory of a model whose weights are frozen. So calls are
intercepted, and a parameter is copied just before a call writes to it. A change by a kernel of the
user shows in the parameter's version alone, and cannot be undone.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from elbowroom.errors import PlanError
from elbowroom.kernels.fakes import would_wait
from elbowroom.runtime.storage import version_of
from elbowroom.runtime.transforms import untransformed, unwrapped

_PLAIN = (Tensor, nn.Parameter)
_EMBEDDINGS = frozenset({F.embedding, F.embedding_bag})  # they hand all options on by keyword
_STRIDE = 61  # elements: no power of two, as rows have
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        self._gradients = [_GradientNow(name, p) for name, p, *_ in self._parameters]
        self._gradients_at: dict[int, _GradientNow] = {}  # by storage; inside

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunction():  # modes around see the program's calls alone
            for one in self._gradients:
                found = one.hold()
                if found is not None and _has_memory(found):
                    self._gradients_at[found.untyped_storage()._cdata] = one
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._gradients_at.clear()
        with torch._C.DisableTorchFunction():
            for one in self._gradients:
                one.let_go()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _writes(func, kwargs):
            self._copy(args[:1], kwargs)
        elif func in _EMBEDDINGS and kwargs and kwargs.get("max_norm") is not None:
            self._copy(args[:2], None)  # indices, weight
        return func(*args, **(kwargs or {}))

    def _copy(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        given = kwargs or {}
        # Modes around see the call alone, and transforms of torch.func do not wrap the copies.
        with torch._C.DisableTorchFunction(), torch.no_grad(), untransformed():
            for x in written(args, given):
                at = x.untyped_storage()._cdata
                if at in self._lies_at and at not in self._copies:
                    self._copies[at] = [(one, one.clone()) for one in self._lies_at[at]]
                if at in self._gradients_at:
                    self._gradients_at[at].copy()

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
    def first_gradient(self) -> str | None:
        """The first parameter whose gradient was changed or replaced, if any."""
        return next((one.name for one in self._gradients if one.has_changed), None)

    def has_copy_of_gradient(self, p: Tensor) -> bool:
        """Returns whether the gradient of p was copied before a call has written to it."""
        return any(one.parameter is p and one.is_copied for one in self._gradients)

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
        """Makes the parameters what they were, their versions too; new ones are removed.

        Gradients that calls have written to, or that were replaced, are what they were as well.
        """
        for one in self._gradients:
            one.back()
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


class _GradientNow:
    """The gradient of a parameter as it is now.

    It is held while a call runs, which may drop it, and from then on if it does.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name, self.parameter = name, parameter
        now = gradient_of(parameter)
        self._ref = None if now is None else weakref.ref(now)
        self._version, self._sample = (0, 0) if now is None else (version_of(now), _sample(now))
        self._held: Tensor | None = None
        self._copy: Tensor | None = None

    def hold(self) -> Tensor | None:
        """Holds it, and returns it."""
        self._held = None if self._ref is None else self._ref()
        return self._held

    def let_go(self) -> None:
        """Holds it no longer if it is still there."""
        if self._held is gradient_of(self.parameter) and self._copy is None:
            self._held = None

    def copy(self) -> None:
        """Copies it, as something is about to write to it."""
        if self._copy is None and self._held is not None and not self.has_changed:
            self._copy = self._held.detach().clone()

    @property
    def is_copied(self) -> bool:
        """True if there is a copy."""
        return self._copy is not None

    @property
    def has_changed_unseen(self) -> bool:
        """True if its values, by a sample of them, are others than they were."""
        before = None if self._ref is None else self._ref()
        return before is not None and _sample(before) != self._sample

    @property
    def has_changed(self) -> bool:
        """True if it was written to, dropped or replaced."""
        now = gradient_of(self.parameter)
        if now is not (None if self._ref is None else self._ref()):
            return True
        is_written = now is not None and version_of(now) != self._version
        return is_written or self.has_changed_unseen

    def back(self) -> None:
        before = None if self._ref is None else self._ref()
        is_seen = self._copy is not None or before is None or version_of(before) != self._version
        if not is_seen and self.has_changed_unseen:
            raise PlanError(
                "forward had to be run a second time, and the first has changed the gradient of "
                f"'{self.name}' in a way that PyTorch does not see, as NumPy can; that cannot be "
                "undone. Change it by an op of PyTorch."
            )
        if before is not None and self._copy is not None:
            before.copy_(self._copy)
            torch._C._autograd._unsafe_set_version_counter((before,), (self._version,))
        if gradient_of(self.parameter) is not before:
            self.parameter.grad = before
        self._held = self._copy = None


def _sample(gradient: Tensor) -> int:
    return sample_of(gradient) if _has_memory(gradient) else 0


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Returns the gradient that backward has left in `.grad`.

    A parameter that an op made, as `torch.func.functional_call` may be given, gets none, and torch
    warns if its `.grad` is read.
    """
    return parameter.grad if parameter.is_leaf or parameter.retains_grad else None


def sample_of(p: Tensor) -> int:
    """Returns the sum of the bits of one in `_STRIDE` elements; 0 where the host would wait.

    A change through `p.data` has no version to show it.
    """
    if would_wait(p) or not p.is_contiguous():
        return 0
    bits = BITS.get(p.element_size())
    if bits is None:
        return 0
    some = p.detach().as_strided((p.numel() // _STRIDE,), (_STRIDE,))
    return int(some.view(bits).sum(dtype=torch.int64))


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
