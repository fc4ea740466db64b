"""Steps that a GPU counts for itself, so that a CUDA graph may launch the update again.

    steps [P] += 1, if no gradient was refused  -->  factors [P, 8], the upper halves of seeds

A graph launches kernels with the numbers that they were captured with. So what depends on the step
is computed where the kernel runs, in float64, as the host does it. The host, which counts along,
sets the device's steps only where they are not what it expects: at first, after a state was loaded,
or where other parameters have gradients. What a graph has launched the host does not see: once a
step was captured, the host asks the device before it counts on.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from elbowroom.optim.formats import Group

Step = int | Tensor  # a number, or float64 [P] where parameters are counted on the device
_MAX_SETS = 16  # of parameters whose steps are known at a time
Places = tuple[int, ...]


class _StepCounts(NamedTuple):
    there: Tensor  # int64 [P]
    here: list[int]  # what the host takes them to be


class DeviceSteps:
    """The steps of sets of parameters, by their places among all; was_captured: by a graph."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[torch.device, Places], _StepCounts] = OrderedDict()
        self.was_captured = False

    def advance(self, p: Tensor, places: Places, steps: list[int], skip: Tensor | None) -> Tensor:
        """Returns the steps (int64 [P], on the device of p) that the host counts as `steps`.

        skip: not 0 if there is no step; then they stay as they were.
        """
        key = p.device, places
        known = self._known.pop(key, None)
        if known is None or [n + 1 for n in known.here] != steps:
            there = torch.tensor([n - 1 for n in steps]).to(p.device)
        else:
            there = known.there
        there += 1 if skip is None else skip == 0
        self._known[key] = _StepCounts(there, steps)
        while len(self._known) > _MAX_SETS:
            self._known.popitem(last=False)
        self.was_captured |= is_capturing(p.device)
        return there

    def read(self) -> Iterator[tuple[Places, list[int]]]:
        """Yields the steps that the devices have counted. The host waits for them."""
        for key, known in list(self._known.items()):
            here = known.there.tolist()
            self._known[key] = known._replace(here=here)
            yield key[1], here


def counts_for_itself(p: Tensor) -> bool:
    """Returns whether the steps of p are counted where p lies."""
    return p.is_cuda


def is_capturing(device: torch.device) -> bool:
    """Returns whether a CUDA graph is being captured on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def rate_of(group: Group, step: Step) -> float | Tensor:
    """Returns the learning rate of a group: where steps are a tensor, one that is stays one."""
    rate = group["lr"]
    if isinstance(step, Tensor) and isinstance(rate, Tensor):
        return rate.to(step.device, torch.float64)
    return float(rate)


def table_of(factors: list[float | Tensor], steps: Tensor, columns: int) -> Tensor:
    """Returns factors, each of them a number or [P], as rows [P, columns] of float32."""
    table = torch.zeros(len(steps), columns, dtype=torch.float32, device=steps.device)
    for column, factor in zip(table.unbind(1), factors, strict=False):
        if isinstance(factor, Tensor):
            column.copy_(factor.expand(len(steps)))
        else:
            column.fill_(factor)
    return table
