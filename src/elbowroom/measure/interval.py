"""The peak between two moments of the user's program: from one forward of a model to the next.

Like `peak`, for code that is not ours to call. On CUDA: the caching allocator's counter
(`cuda_peak.py`). On a CPU: what the allocator reports (`allocations.py`). That belongs to one
thread and there is one in a process, so an interval runs only on the main thread, one at a time,
and never beside a profiler of the user's: `start` then gives None, and one tries again later. An
interval that is not needed any more must be closed. Where it cannot end (on another thread, or
within a backward, in which its model may be collected as garbage) it is abandoned: the next
measurement ends it, or the next collection of garbage that finds the main thread outside of a
backward. A peak that the user asks for (`er.peak`) and a profiler that the user starts end one that
runs; inside of such a peak one may begin.

The CPU's allocator does not report the release of what was there before. Of gradients it matters:
a script may call `zero_grad()` after the forward, and they would count twice; and of outputs of the
forward before, which go as this one ends. So those that stand at the start are watched, and each
marks the moment at which it goes.

If a model runs inside of another model's graph (a discriminator in the generator's step), backward
goes on into that graph, whose memory belongs to the other model. So an interval can end where
backward leaves the model (`until`). Likewise, what the program does after the model's optimizer has
stepped, such as the training of another model, is no part of the step (`until_updated`). How much
that took is known besides (`later_nbytes`).
"""

import atexit
import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from elbowroom.measure.allocations import Allocations, Freed, is_in_backward, may_begin
from elbowroom.measure.background import Background
from elbowroom.measure.cuda_peak import CudaPeak
from elbowroom.measure.peak import MemoryCurve, curve_of
from elbowroom.runtime.storage import WeakStorage, storage_nbytes

_numbers = count()


class Interval:
    """Measured stretch of time, from `start` to `stop` or `close`.

    later_nbytes  once it has stopped, the highest level after the optimizer's step, in bytes; 0:
                  there was no step, or nothing is known of what followed
    """

    def __init__(
        self, base_nbytes: int, device: torch.device, allocations: Allocations | None
    ) -> None:
        self._base_nbytes, self._device, self._allocations = base_nbytes, device, allocations
        self._curve: MemoryCurve | None = None
        self.later_nbytes, self._is_updated = 0, False
        self._watched: list[weakref.ref[Tensor]] = []
        self.is_abandoned = False
        self._left = f"left {next(_numbers)}"
        self._cuda = CudaPeak(device) if device.type == "cuda" else None
        self._left_nbytes: int | None = None  # the peak by then, on CUDA
        self._hooks: list[RemovableHandle] = []

    @classmethod
    def start(
        cls, base_nbytes: int, device: torch.device, passing: Iterable[Tensor] = ()
    ) -> "Interval | None":
        """Starts an interval.

        base_nbytes: what is held at this moment; a CPU interval adds its own peak to it.
        passing: those of it that may go before the interval ends: gradients, outputs
        """
        if device.type == "cuda":
            return cls(base_nbytes, device, None)
        if not may_measure(device):
            return None
        Background.running = found = cls(base_nbytes, device, Allocations())
        found._watch(passing)
        return found

    def _watch(self, passing: Iterable[Tensor]) -> None:
        """Has the last one of each storage mark its end.

        Parts of a buffer that others hold, too (DistributedDataParallel's), are left out: it stays.
        A view holds what it is a view of, which is watched, too.
        """
        sharing: dict[int, list[Tensor]] = {}
        for x in passing:
            if x.layout is torch.strided:
                sharing.setdefault(x.untyped_storage()._cdata, []).append(x)
        for tensors in sharing.values():
            storage, own = WeakStorage(tensors[0]), {id(x): x for x in tensors}
            bases = {id(x._base): x._base for x in tensors if x._base is not None}
            if storage.holders() == len(own | bases):
                ended = partial(_mark_end, storage, Freed(storage_nbytes(tensors[0]), self))
                # It goes with its last view, which counts until then.
                last = [weakref.ref(x, partial(ended, 2)) for i, x in bases.items() if i not in own]
                self._watched += [*last, *(weakref.ref(x, partial(ended, 1)) for x in own.values())]

    def until(self, inputs: Iterable[Tensor]) -> None:
        """Counts no further than to where backward has given the last of these its gradient.

        If it never comes there, all counts.
        """
        leave = partial(_leave, weakref.ref(self))
        made = {x.grad_fn: x for x in inputs if x.grad_fn is not None}
        self._hooks += [node.register_prehook(leave) for node in made]

    def until_updated(self, is_own: Callable[[Optimizer], bool]) -> None:
        """Counts no further than to the end of the last step of an optimizer that `is_own`.

        If none steps, all counts. One that steps within backward does not end it.
        """
        updated = partial(_updated, weakref.ref(self), is_own)
        self._hooks.append(register_optimizer_step_post_hook(updated))

    def leave(self) -> None:
        """Counts what follows only if it is left once more."""
        if self._cuda is not None:
            self._left_nbytes = self._cuda.read()
        elif Background.running is self:
            Allocations.mark(self._left)

    def stop(self) -> int | None:
        """The highest level since the start, in bytes; None if this thread cannot tell it."""
        if self._cuda is not None:
            self.close()
            if self._left_nbytes is None:
                return self._cuda.close()
            self.later_nbytes = self._cuda.close() if self._is_updated else 0
            return self._left_nbytes
        curve = self.curve()
        return None if curve is None else self._base_nbytes + curve.peak_nbytes

    def curve(self) -> MemoryCurve | None:
        """Ends the interval; returns, on a CPU, all that happened since its start."""
        return self._curve if self.close() else None

    def close(self) -> bool:
        """Stops counting, if that is possible here; returns whether this call stopped it."""
        self._unhook()
        if self._cuda is not None:
            self._cuda.close()
        if self._allocations is None or Background.running is not self:
            return False
        if threading.current_thread() is not threading.main_thread() or is_in_backward():
            self._abandon()
            return False
        Background.running = None
        self._watched.clear()
        if self._allocations.was_ended:
            return False
        curve = curve_of(*self._allocations.stop(), self._device.type, by=self)
        self._curve = curve.until(self._left)
        if self._is_updated:
            self.later_nbytes = self._base_nbytes + curve.after(self._left).peak_nbytes
        return True

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __del__(self) -> None:
        self._unhook()

    def _abandon(self) -> None:
        """Has it end as soon as it can."""
        if not self.is_abandoned:
            self.is_abandoned = True
            gc.callbacks.append(_end_abandoned)


def _leave(interval: weakref.ref[Interval], _: object) -> None:
    found = interval()
    if found is not None:
        found.leave()


def _updated(
    interval: weakref.ref[Interval], is_own: Callable[[Optimizer], bool], by: Optimizer, *_: object
) -> None:
    found = interval()
    if found is None or torch.compiler.is_compiling() or is_in_backward():
        return
    if is_own(by):
        found.leave()
        found._is_updated = True


def _mark_end(storage: WeakStorage, freed: Freed, last: int, _: object) -> None:
    """Marks this moment, unless other tensors hold the memory of the one that goes.

    last: the number of tensors that hold it as the last one goes
    """
    if storage.holders() <= last:
        Allocations.mark(freed)


def _end_abandoned(phase: str, info: object) -> None:
    """Ends an interval that was abandoned, after a collection of garbage."""
    running = Background.running
    waits = running is not None and running.is_abandoned
    if phase == "stop" and (running is None or not waits or running.close()):
        gc.callbacks.remove(_end_abandoned)


@atexit.register
def _close_running() -> None:
    """Closes a measurement that runs while the interpreter ends, which it would crash."""
    Background.interrupt()


def may_measure(device: torch.device) -> bool:
    """Returns whether an interval could start now, on this thread."""
    if device.type == "cuda":
        return True
    if threading.current_thread() is not threading.main_thread():
        return False
    if Background.running is not None and Background.running.is_abandoned:
        Background.interrupt()
    return Background.running is None and may_begin()
