"""Record of what a forward changes besides its outputs, so that it can run again identically.

Rewind      all of it, of a module and its arguments
Generators  random numbers besides those of PyTorch's default generators: from Python's
`random`, from NumPy's global state, and from generators among the arguments, or that are attributes
of the module or of one inside it (torch.Generator, random.Random, NumPy's Generator and
RandomState). Generators that are kept elsewhere are not found
"""

import ctypes
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elbowroom.errors import PlanError
from elbowroom.runtime.changed_parameters import ChangedParameters
from elbowroom.runtime.reach import (
    LARGE,
    SMALL,
    Reach,
    TensorValues,
    behind_calls,
    is_left_alone,
    leave_graph,
    nbytes_of,
)
from elbowroom.runtime.storage import version_of


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
KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Generators:
    """Random generators that a module may draw from, and their states as they are now."""

    def __init__(self, modules: Iterable[nn.Module], given: Iterable[Any]) -> None:
        """given: generators among the arguments."""
        self._states = [(source, _state_of(source)) for source in _sources(modules, given)]

    def forget_unchanged(self) -> None:
        """Drops states that have not changed."""
        self._states = [(one, state) for one, state in self._states if not _is_at(one, state)]

    def restore(self) -> None:
        """Sets the generators back to the recorded states."""
        for source, state in self._states:
            _set_state(source, state)

    @property
    def any(self) -> bool:
        """True if there are states to be set."""
        return bool(self._states)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Sets the generators as they were recorded, and on exit back to what they are now."""
        now = [(source, _state_of(source)) for source, _ in self._states]
        self.restore()
        try:
            yield
        finally:
            for source, state in now:
                _set_state(source, state)


def _sources(modules: Iterable[nn.Module], given: Iterable[Any]) -> list[Any]:
    """Returns each generator once: modules that are functions of one state, or objects."""
    own = [module.__dict__ for module in modules]
    kinds = {*map(type, chain.from_iterable(map(dict.values, own)))}  # few, of many attributes
    held: list[Any] = [*given]
    if any(map(_may_be_generator, kinds - _PLAIN)):
        held += [x for each in own for x in each.values() if type(x) not in _PLAIN]
    found: dict[int, Any] = {id(x): x for x in held if _is_generator(x.__class__)}
    return [random, np.random, *found.values()]


# Types of most of a module's attributes.
_PLAIN = frozenset((dict, OrderedDict, set, bool, int, float, str, tuple, list, type(None)))


@lru_cache(4096)
def _is_generator(kind: type) -> bool:
    return issubclass(kind, KINDS)


@lru_cache(4096)
def _may_be_generator(kind: type) -> bool:
    """Returns whether an object of this type may be a generator, or stand for one as its proxy."""
    says_other = any("__class__" in vars(base) for base in kind.__mro__[:-1])
    return issubclass(kind, KINDS) or says_other or kind in weakref.ProxyTypes


class _GeneratorState(NamedTuple):
    """State of a global generator, and the memory of the MT19937 that it was read from."""

    source: Any
    memory: bytes
    state: Any


_UNKNOWN = _GeneratorState(None, b"", None)
_known: dict[Any, _GeneratorState] = {}  # of `random` and `np.random`
_MT19937_NBYTES = 624 * 4 + 4  # its key (uint32) and position (int32)
_MEMORY = ctypes.c_char * _MT19937_NBYTES


def _state_of_numpy() -> Any:
    """Returns the state of NumPy's global generator, the same object while it does not change.

    NumPy copies it number by number, in 60 us; its memory is compared in 1. Beside that memory
    there is a second normal number that waits to be drawn: where there is one, all is read.
    """
    source = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(source) is not np.random.MT19937:
        return np.random.get_state(legacy=False)
    place = _place_of_numpy(source)
    memory, known = place.raw, _known.get(np.random, _UNKNOWN)
    if known.source is source and known.memory == memory:
        return known.state
    state: Any = np.random.get_state(legacy=False)
    if not state["has_gauss"] and place.raw == memory:
        # No other thread has drawn meanwhile.
        _known[np.random] = _GeneratorState(source, memory, state)
    return state


def _state_of_python() -> Any:
    """Returns the state of Python's global generator, in the same way: to read it takes 35 us."""
    source: Any = getattr(random.getstate, "__self__", None)
    place = _place_of_python(source)
    if place is None or source.gauss_next is not None:  # which waits to be drawn
        return random.getstate()
    memory, known = place.raw, _known.get(random, _UNKNOWN)
    if known.source is source and known.memory == memory:
        return known.state
    state = random.getstate()
    if state[-1] is None and place.raw == memory:
        _known[random] = _GeneratorState(source, memory, state)
    return state


@lru_cache(4)  # which holds the generator, too
def _place_of_numpy(source: Any) -> Any:
    return _MEMORY.from_address(source.ctypes.state_address)


@lru_cache(4)
def _place_of_python(source: Any) -> Any:
    """Returns the memory of a `random.Random`; None: it is not where CPython has had it.

    There the position and the key follow the head of the object. As this is not documented, it is
    compared with what the generator says of itself.
    """
    kind = random.Random.__base__
    head = object.__basicsize__
    if type(source) is not random.Random or kind is None:
        return None
    if kind.__basicsize__ < head + _MT19937_NBYTES:
        return None
    place = _MEMORY.from_address(id(source) + head)
    *key, position = random.Random.getstate(source)[1]
    return place if np.frombuffer(place.raw, np.uint32).tolist() == [position, *key] else None


def _state_of(source: Any) -> Any:
    if source is np.random:
        return _state_of_numpy()
    if source is random:
        return _state_of_python()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    if isinstance(source, torch.Generator):
        return source.get_state()
    return source.getstate() if hasattr(source, "getstate") else source.get_state(legacy=False)


def _set_state(source: Any, state: Any) -> None:
    if source is np.random:
        _known.pop(source, None)  # another normal number may wait, at the same memory
    if isinstance(source, np.random.Generator):
        source.bit_generator.state = state
    elif hasattr(source, "setstate"):
        source.setstate(state)
    else:
        source.set_state(state)


def _is_at(source: Any, state: Any) -> bool:
    return _same_state(_state_of(source), state)


def _same_state(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return all(_same_state(value, other[name]) for name, value in one.items())
    return bool(one == other)
