"""Gradient release: gradients are applied to their parameters, and freed, inside backward.

    autograd has added up p.grad -> p.grad = None -> is it finite? -> update p

A large gradient exists alone, not with all others. `step()` finds none; it ends the step. Where it
is known at once whether they are finite (not on CUDA), small ones wait until they are
`TOGETHER_NBYTES`, or until backward ends: an update takes as long to begin as for so many bytes.

1. Autograd calls a parameter's hook once a backward, when all that uses it has run backward: its
   gradient is whole, and nothing will ask for its value again. So tied and recomputed weights are
   right. What reads a value beside the graph (through `detach()`) is stopped by the versions.
2. A parameter is updated once between two `step()`s. A second backward that reaches it would be a
   second update, not a sum: it is refused before this parameter changes.
3. Nobody sees all gradients before the first is applied. So each parameter is skipped for itself
   where its gradient is not finite, and what needs all of them cannot work (`CANNOT`).
4. What waits when a backward fails is applied with what comes next, or by `step()`.
"""

import weakref
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, distributed
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from elbowroom.errors import InvalidSetting, UnsupportedGradient
from elbowroom.optim.formats import Group
from elbowroom.optim.sharded import is_sharded
from elbowroom.optim.verdict import is_read_later

TOGETHER_NBYTES = 1 << 18
CANNOT = (
    "with release_gradients() each gradient is applied inside backward, so that nothing can be "
    "accumulated, clipped or unscaled afterwards"
)


class Complete(NamedTuple):
    """A gradient that is whole, of a parameter of a group at its place among all."""

    place: int
    group: Group
    p: Tensor
    grad: Tensor


class Releasing(Protocol):
    """The interface that this file asks of an optimizer."""

    param_groups: list[Group]
    released: "GradientRelease | None"

    def apply(self, complete: list[Complete]) -> int:
        """Updates parameters; returns how many it has not, as their gradients are not finite."""
        ...

    def end_step(self, left: int) -> None:
        """Ends a step. left: how many of its gradients are known not to have been applied."""
        ...


class GradientRelease:
    """The handle that `release_gradients` returns; `remove()` or the end of its context ends it.

    watched  ids of the parameters whose gradients it applies
    """

    def __init__(self, optimizer: Releasing) -> None:
        # Weak: a parameter outlives its optimizer, and its hook must not train on for it.
        self._optimizer = weakref.ref(optimizer)
        self._hooks: list[RemovableHandle] = []
        self.watched: set[int] = set()  # ids of parameters
        self._applied: set[int] = set()  # places of parameters, in this step; some still wait
        self._skipped = 0  # of them
        self._waiting: list[Complete] = []
        self._waiting_nbytes = 0
        self._backward = -1  # the one at whose end what waits is applied
        for number in range(len(optimizer.param_groups)):
            self.watch(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Ends the release: gradients stay until `step()` again. It can be called twice."""
        for hook in self._hooks:
            hook.remove()
        self.apply_waiting()
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.released is self:
            optimizer.end_step(self.end_step())
            optimizer.released = None

    def watch(self, number: int) -> None:
        """Releases the gradients of another parameter group, too, given its number."""
        optimizer = self._optimizer()
        assert optimizer is not None
        index = sum(len(group["params"]) for group in optimizer.param_groups[:number])
        for place, p in enumerate(optimizer.param_groups[number]["params"], index):
            if p.requires_grad:  # one that is unfrozen later is updated by `step()`
                hook = partial(self._apply, number, place)
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))
                self.watched.add(id(p))

    def check(self, index: int, p: Tensor) -> None:
        """Raises InvalidSetting if this parameter was already updated in this step."""
        if index in self._applied:
            raise InvalidSetting(
                f"{CANNOT}. A parameter of shape {tuple(p.shape)} has been updated, and has a "
                "second gradient before step(). Call step() after each backward, also after one "
                "that did not finish; or remove() what release_gradients() has returned, and "
                "accumulate without it"
            )

    def end_step(self) -> int:
        """Ends a step; returns the number of its gradients that were not applied."""
        skipped, self._skipped = self._skipped, 0
        self._applied.clear()
        return skipped

    @_disable_dynamo
    @torch.no_grad()
    def _apply(self, number: int, index: int, p: Tensor) -> None:
        """Applies and frees p.grad, which is whole."""
        optimizer, grad = self._optimizer(), p.grad
        if optimizer is None or grad is None:
            return
        self.check(index, p)
        if grad.requires_grad:
            raise UnsupportedGradient(
                f"{CANNOT}, and not differentiated either: use backward() without create_graph, "
                "or remove() what release_gradients() has returned"
            )
        self._applied.add(index)
        p.grad = None
        complete = Complete(index, optimizer.param_groups[number], p, grad)
        if not (_may_wait(grad) and self._will_end()):
            self._update([complete])
            return
        self._waiting.append(complete)
        self._waiting_nbytes += grad.nbytes
        if self._waiting_nbytes >= TOGETHER_NBYTES:
            self.apply_waiting()

    def _will_end(self) -> bool:
        """Has what waits applied as this backward ends; returns whether that is possible."""
        backward = torch._C._current_graph_task_id()
        if backward < 0:
            return False
        if backward != self._backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self.apply_waiting)
        return True

    @_disable_dynamo
    @torch.no_grad()
    def apply_waiting(self) -> None:
        """Applies the gradients that wait for others."""
        waiting, self._waiting, self._waiting_nbytes = self._waiting, [], 0
        if waiting:
            self._update(waiting)

    def _update(self, complete: list[Complete]) -> None:
        """Updates parameters. After an error their gradients are in `p.grad` again."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        try:
            self._skipped += optimizer.apply(complete)
        except BaseException:
            for place, _, p, grad in complete:
                p.grad = grad
                self._applied.discard(place)
            raise


def _may_wait(grad: Tensor) -> bool:
    """Returns whether an update waits for no device and no other process."""
    return grad.layout is torch.strided and not is_read_later(grad) and not is_sharded(grad)


def check_alone(params: list[Tensor]) -> None:
    """Raises InvalidSetting where gradients are summed over processes after they are complete."""
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1 and not all(map(is_sharded, params)):
            raise InvalidSetting(
                f"{CANNOT}; DistributedDataParallel sums them over its {size} processes only then. "
                "Shard the model by torch.distributed.fsdp.fully_shard, or do without"
            )
