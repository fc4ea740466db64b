"""Finds how an error in a gradient grows on its way down the graph, by energies alone.

    gain(node) = variance that reaches the weights / energy of an error in what the node receives
               = own(node) + sum over edges |g_edge|^2 / |g|^2 * gain(node below)

|g|^2 is the energy of the gradient that the node receives, |g_edge|^2 of what it passes on. So an
error shrinks and grows as the gradient does, and the errors of two paths add up as energies, while
gradients may cancel. The weights that a node reads are not edges: the gradients of tokens add up in
them, and errors without a mean do not. What an op adds there is `own`.

Nothing is held for it but two numbers a node.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import Node

from elbowroom.measure.sensitivity import energy
from elbowroom.runtime.second_pass import second_pass

_Below = list[tuple[int, Tensor]]  # by autograd's number of a node below, the energy that it gets


class Paths:
    """The graph of one step, and the energies of the gradients in its backward."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._passed: dict[int, tuple[Tensor, _Below]] = {}  # in the order of backward
        self._energies: dict[int, tuple[float, list[tuple[int, float]]]] = {}

    def follow(self, root: Node) -> frozenset[int]:
        """Follows the nodes that lead to this one and are not followed yet.

        Returns their numbers.
        """
        new, waiting = set(), [root]
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            if hasattr(node, "variable") or number in self._seen:
                continue
            self._seen.add(number)
            new.add(number)
            below = [one for one, _ in node.next_functions]
            leads = [
                None if one is None or hasattr(one, "variable") else one._sequence_nr()
                for one in below
            ]
            node.register_hook(self._reader(number, leads))
            waiting += [one for one in below if one is not None]
        return frozenset(new)

    def _reader(
        self, number: int, leads: Sequence[int | None]
    ) -> Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], None]:
        @torch.no_grad()
        def read(passed: Sequence[Tensor | None], received: Sequence[Tensor | None]) -> None:
            if second_pass.runs:
                return
            gets = [energy(grad) for grad in received if is_dense(grad)]
            if not gets:
                return
            pairs = zip(leads, passed, strict=False)
            below = [(n, energy(grad)) for n, grad in pairs if n is not None and is_dense(grad)]
            self._passed[number] = torch.stack(gets).sum(), below

        return read

    def end(self) -> None:
        """Brings all energies to the CPU. Call this when backward is over."""
        energies = [e for received, below in self._passed.values() for e in (received, *_of(below))]
        values = iter(_numbers(energies))
        self._energies = {
            number: (next(values), [(n, next(values)) for n, _ in below])
            for number, (_, below) in self._passed.items()
        }
        self._passed.clear()

    def received(self, number: int) -> float:
        """Returns the energy of the gradient that a node got; 0 if it got none."""
        return self._energies.get(number, (0.0, []))[0]

    def gains(self, own: Mapping[int, float]) -> dict[int, float]:
        """Returns the gains of all nodes. own: of what the op that ends with a node reads."""
        found: dict[int, float] = {}
        for number in reversed(self._energies):  # those below first
            received, below = self._energies[number]
            sent = sum(each * found.get(n, 0.0) for n, each in below)
            found[number] = own.get(number, 0.0) + (sent / received if received > 0 else 0.0)
        return found

    def sent_on(self, nodes: Collection[int], gains: Mapping[int, float], spared: int) -> float:
        """Returns the variance that an error as large as what these nodes pass on would add.

        spared: a node whose own gradient has no error
        """
        return sum(
            each * gains.get(n, 0.0)
            for number in nodes
            for n, each in self._energies.get(number, (0.0, []))[1]
            if n not in nodes and n != spared
        )


def is_dense(x: Tensor | None) -> TypeGuard[Tensor]:
    """Returns whether this is a tensor with all of its elements."""
    return x is not None and x.layout is torch.strided and x.numel() > 0


def _of(below: _Below) -> list[Tensor]:
    return [each for _, each in below]


def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    if not scalars:
        return []
    found: list[float] = torch.stack([one.double().cpu() for one in scalars]).tolist()
    return found
