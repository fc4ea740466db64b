"""The highest level of a GPU's allocator over a stretch of the user's program.

The allocator has one counter, which a program may reset at any time: many do in each step, to print
its peak. What the counter held before is lost then. So it is also read before and after each
optimizer's step, and wherever the owner asks, and the highest of all readings counts. A reset
between backward and the optimizer's step would still hide the peak of that backward.
"""

import weakref
from functools import partial

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def allocated_nbytes(device: torch.device) -> tuple[int, int]:
    """Returns what is allocated on a device now, and at most since its counter was reset, in bytes.

    `torch.cuda.max_memory_allocated` sorts 160 numbers to return one of them, a thousand times in a
    step that is written down.
    """
    found = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return found["current"], found["peak"]


class CudaPeak:
    """Bytes that are allocated on a device at most, from now until `close`. Resets the counter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest_nbytes = 0
        read = partial(_read, weakref.ref(self))
        registers = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        self._hooks = [register(read) for register in registers]
        torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> int:
        """Returns the highest level so far, in bytes."""
        if self._hooks:
            self._highest_nbytes = max(self._highest_nbytes, allocated_nbytes(self._device)[1])
        return self._highest_nbytes

    def restart(self) -> tuple[int, int]:
        """Returns the highest level so far, and forgets it; and the level now."""
        now, peak = allocated_nbytes(self._device)
        highest, self._highest_nbytes = max(self._highest_nbytes, peak), 0
        torch.cuda.reset_peak_memory_stats(self._device)
        return highest, now

    def close(self) -> int:
        """Stops reading; returns the highest level until then, also when called again."""
        found = self.read()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return found

    def __del__(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _read(peak: weakref.ref[CudaPeak], *_: object) -> None:
    found = peak()
    if found is not None and not torch.compiler.is_compiling():
        found.read()
