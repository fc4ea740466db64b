"""A step like the last one: what was found out about its parameters still holds.

    parameters, gradients   shapes, dtypes, layouts, devices and strides are the same
    states                  the same tensors, at the same addresses
    groups                  the same parameters, formats and seeds; rates are read in each step

All are compared at once, which takes half as long as to look at each anew. No state and no gradient
is kept alive.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, call, is_
from typing import Any, Self

from torch import Tensor

from elbowroom.optim.batch import Batches, States
from elbowroom.optim.formats import Group
from elbowroom.optim.sharded import is_sharded

_facts = attrgetter("shape", "dtype", "layout", "device")
_grads, _strides, _address = attrgetter("grad"), Tensor.stride, Tensor.data_ptr


class Prepared:
    """Holds the kernel calls of a step, which serve the next ones until something changes."""

    def __init__(
        self,
        groups: list[Group],
        states: dict[Tensor, States],
        batches: Batches,
        grads: list[Tensor],
    ) -> None:
        self.batches = batches
        self._groups, self._settings = list(groups), _settings(groups)
        self._params, self._due = _params(groups), [one.p for one in batches.due]
        self._without = _without([p.grad for p in self._params])
        self._facts, self._strides = (
            _each(_facts, self._due, grads),
            _each(_strides, self._due, grads),
        )
        self._names, held = _names(states), _held(states)
        self._states, self._addresses = [*map(weakref.ref, held)], [*map(_address, held)]

    @classmethod
    def of(
        cls,
        groups: list[Group],
        states: dict[Tensor, States],
        batches: Batches,
        grads: list[Tensor],
    ) -> Self | None:
        """Returns what the next step may use.

        None: a gradient is sparse, a parameter is a DTensor, or others have states.
        """
        due = [one.p for one in batches.due]
        ordinary = (
            _are_plain(grads)
            and not any(grad.is_sparse for grad in grads)
            and all(isinstance(x, Tensor) for x in _held(states))
            and not any(map(is_sharded, _params(groups)))
            and _are(states, due)
        )
        return cls(groups, states, batches, grads) if ordinary else None

    def grads(self, groups: list[Group], states: dict[Tensor, States]) -> list[Tensor] | None:
        """Returns the gradients of what is due; None if anything has changed."""
        params, held = _params(groups), _held(states)
        same = (
            _are(groups, self._groups)
            and _settings(groups) == self._settings
            and _are(params, self._params)
            and _are(states, self._due)
            and _names(states) == self._names
            and _are(held, [*map(call, self._states)])
            and [*map(_address, held)] == self._addresses
        )
        grads: list[Any] = [*map(_grads, params)]
        if not same or _without(grads) != self._without:
            return None
        if self._without:
            grads = [grad for grad in grads if grad is not None]
        same = (
            _are_plain(grads)
            and _each(_facts, self._due, grads) == self._facts  # a sparse one has no strides
            and _each(_strides, self._due, grads) == self._strides
        )
        return grads if same else None


def _settings(groups: list[Group]) -> list[tuple[Any, ...]]:
    return [(len(g["params"]), g["state"], g["weights"], g["seed"]) for g in groups]


def _params(groups: list[Group]) -> list[Tensor]:
    return [*chain.from_iterable(group["params"] for group in groups)]


def _names(states: dict[Tensor, States]) -> list[str]:
    return [*chain.from_iterable(states.values())]


def _held(states: dict[Tensor, States]) -> list[Tensor]:
    return [*chain.from_iterable(map(dict[str, Tensor].values, states.values()))]


def _without(grads: Sequence[Tensor | None]) -> list[int]:
    """Returns the places of parameters without a gradient."""
    return [i for i, grad in enumerate(grads) if grad is None]


def _are_plain(grads: list[Tensor]) -> bool:
    return {*map(type, grads)} == {Tensor}


def _each(of: Callable[[Tensor], Any], params: list[Tensor], grads: list[Tensor]) -> list[Any]:
    return [*map(of, params), *map(of, grads)]


def _are(some: Iterable[Any], others: Sequence[Any]) -> bool:
    """Returns whether these are the same objects in the same order."""
    some = [*some]
    return len(some) == len(others) and all(map(is_, some, others))
