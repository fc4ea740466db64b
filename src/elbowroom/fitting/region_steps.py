"""Peaks of steps whose compiled regions the program calls by itself, measured until one has kept.

    step = torch.compile(step, backend="elbowroom", options={"budget": "6 GiB"})

No call of a fitted model tells where such a step begins. So its regions tell when they are called,
and when their backward has ended. A step goes from the first region that is called after a backward
to the end of its last region's backward, or of the optimizer's step if states are in the budget:

    peak = what stands as it begins      that regions are given, their gradients, held outputs
         + what is allocated until it ends

Code between the regions is a part of it, though no plan knows that. No region is compiled again for
less, as Dynamo has handed over its graph: a step above the budget is said, once for each size.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from elbowroom.fitting.previous_outputs import PreviousOutputs
from elbowroom.fitting.uncompiled import holds, tensors_in
from elbowroom.measure.allocations import is_in_backward
from elbowroom.measure.interval import Interval
from elbowroom.runtime.undo import gradient_of
from elbowroom.units import show_at_least, show_nbytes

FIRST = 1.05  # of the budget: a step in which something is compiled may take it unsaid
EXACTLY = 1.001  # of the budget: a settled step is above it
_MAX_TRIES = 16  # steps that could not be measured, after which none is any more
Region = Callable[..., Any]
_measuring: "weakref.ref[RegionSteps] | None" = None  # the one whose step runs, if one does


@dataclass
class _RegionStep:
    """A step that is measured.

    region, numel  the region that began it, and the elements that this was given
    waiting        nodes of its regions
    is_settled     nothing was compiled in it
    """

    interval: Interval
    region: int
    numel: int
    waiting: list[weakref.ref[Any]]
    is_settled: bool = True
    ran_backward: bool = False


class RegionSteps:
    """Measures the steps in which some regions run, and warns of those above the budget.

    resident  gives what stands besides, as the states of an optimizer do; None: states are not in
              the budget, and the optimizer's step is not measured
    """

    def __init__(
        self, budget_nbytes: int, resident: Callable[[], Iterable[Tensor]] | None = None
    ) -> None:
        self.last_nbytes: int | None = None
        self._budget_nbytes, self._resident = budget_nbytes, resident
        self._kept: list[int] = []  # of each region: elements of the largest step that is known
        self._tries = 0
        self._given: list[weakref.ref[Tensor]] = []  # what regions were given in the last step
        self._outputs = PreviousOutputs()
        self._step: _RegionStep | None = None
        self._hook: RemovableHandle | None = None

    def watch(self, region: Region) -> Region:
        """Returns a region that was compiled now, whose calls are seen."""
        number = len(self._kept)
        self._kept.append(-1)
        if self._step is not None:
            self._step.is_settled = False

        def run(*args: Any) -> Any:
            if not torch.is_grad_enabled() or is_in_backward():
                return region(*args)
            self._begin(number, args)
            is_measured, is_first = self._step is not None, self._kept[number] < 0
            if self._step is not None and is_first:  # its backward is compiled as it is called
                self._kept[number], self._step.is_settled = 0, False
            try:
                out = region(*args)
            except BaseException:
                self._drop()
                raise
            if is_measured:
                self._note(out)
            return out

        return run

    def _begin(self, region: int, args: Sequence[Any]) -> None:
        """Begins a step, if none runs and it may be larger than those that are known."""
        if self._step is None and self._hook is not None:
            self._hook.remove()  # not as it runs
            self._hook = None
        global _measuring
        if self._step is not None:
            self._step.waiting = [one for one in self._step.waiting if holds(one())]
            if not self._step.waiting:
                self._end()
        given = [x for x in args if isinstance(x, Tensor)]
        if self._step is not None:
            self._given += map(weakref.ref, given)
            return
        numel = sum(x.numel() for x in given)
        if numel <= self._kept[region] or self._tries >= _MAX_TRIES or not given:
            return
        known = [x for one in self._given if (x := one()) is not None]
        self._given = [weakref.ref(x) for x in given]
        passing = [*_gradients([*given, *known]), *self._outputs.alive()]
        besides = [] if self._resident is None else list(self._resident())
        stands = _nbytes_of([*given, *known, *besides, *passing])
        if _measuring is not None and (other := _measuring()) is not None:
            other.let_go()
        interval = Interval.start(stands, given[0].device, passing)
        if interval is None:
            self._tries += 1
            return
        _measuring, self._step = weakref.ref(self), _RegionStep(interval, region, numel, [])
        self._hook = register_optimizer_step_post_hook(partial(_updated, weakref.ref(self)))

    def _note(self, out: Any) -> None:
        """Notes a region of the step, which waits for its backward."""
        step = self._step
        assert step is not None
        self._outputs.note(out)
        node = next((n for x in tensors_in(out) if (n := x.grad_fn) is not None), None)
        if not isinstance(node, torch._C._FunctionBase):
            return

        def ended(*_: object) -> None:
            step.ran_backward = True
            if self._resident is None:
                step.interval.leave()

        step.waiting.append(weakref.ref(node))
        node.register_hook(torch.compiler.disable(ended))

    def updated(self) -> None:
        """Ends a step as an optimizer has stepped after its backward."""
        step = self._step
        if step is None or is_in_backward() or torch.compiler.is_compiling():
            return
        if step.ran_backward and not any(holds(one()) for one in step.waiting):
            self._end()

    def let_go(self) -> None:
        """Ends a step of which nothing waits, because another program's begins."""
        if self._step is not None and not any(holds(one()) for one in self._step.waiting):
            self._end()

    def _drop(self) -> None:
        """Ends a step that has raised."""
        step, self._step = self._step, None
        if step is not None:
            step.interval.close()

    def _end(self) -> None:
        """Compares the step with the budget."""
        step, self._step = self._step, None
        assert step is not None
        peak = step.interval.stop()
        if peak is None or not step.ran_backward:
            self._tries += 1
            return
        self.last_nbytes = peak
        limit = EXACTLY if step.is_settled else FIRST
        if peak > limit * self._budget_nbytes:
            warnings.warn(self._says_above(peak, step), stacklevel=4)
        if step.is_settled:
            self._kept[step.region] = max(step.numel, self._kept[step.region])

    def _says_above(self, peak: int, step: _RegionStep) -> str:
        above = show_nbytes(peak - self._budget_nbytes)
        budget = f"{above} more than its budget of {show_nbytes(self._budget_nbytes)}"
        if not step.is_settled:
            return (
                f"a step in which a region was compiled has taken {show_nbytes(peak)}, which is "
                f"{budget}. The next one is measured, too."
            )
        return (
            f"a compiled step takes {show_nbytes(peak)} (measured), which is {budget}: library "
            "calls, or code outside of the compiled regions, take more than was planned. Give "
            f"{show_at_least(peak)}, halve the batch, or use er.fit(torch.compile(model), "
            "budget=...), which plans for less after such a step."
        )


def _updated(steps: weakref.ref[RegionSteps], *_: object) -> None:
    found = steps()
    if found is not None:
        found.updated()


def _gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    found = (gradient_of(x) for x in tensors if x.requires_grad)
    return [gradient for gradient in found if gradient is not None]


def _nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of these tensors, in which no byte counts twice.

    Of a batch that is a part of a data set, it alone counts.
    """
    parts: dict[int, dict[int, int]] = {}
    whole: dict[int, int] = {}
    for x in tensors:
        if x.layout is torch.strided:
            storage = x.untyped_storage()
            whole[storage._cdata] = storage.nbytes()
            parts.setdefault(storage._cdata, {})[x.data_ptr()] = x.numel() * x.itemsize
    return sum(min(whole[key], sum(found.values())) for key, found in parts.items())
