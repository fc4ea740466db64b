"""Tells whether a gradient is not finite, so that the step is skipped (`found_inf` of torch.amp).

The flag is a tensor. In host memory it is read at once. On a CUDA device the host does not wait for
it: the kernels of the step read it themselves and write nothing if it is set, and the host reads it
when the next step begins. Until then the counters of steps are advanced; if the step was skipped,
they are set back.
"""

import torch
from torch import Tensor

from elbowroom.kernels import ops


def joined(flags: list[Tensor]) -> Tensor | None:
    """Returns the largest of flags (int32 []), in host memory if one of them is there.

    None: there are no flags.
    """
    if not flags:
        return None
    where = min(flags, key=lambda flag: flag.device.type != "cpu").device
    found = flags[0].to(where)
    for flag in flags[1:]:
        found = torch.maximum(found, flag.to(where))
    return found


def is_read_later(flag: Tensor) -> bool:
    """Returns whether the host would have to wait for the value of a flag."""
    return flag.is_cuda


class Verdict:
    """The flag of a step, which the host reads later.

    counters  steps of the parameters (float32 [] each), which have been advanced already
    """

    def __init__(self, flag: Tensor, counters: list[Tensor]) -> None:
        self.counters = counters
        self._known: bool | None = None
        self._flag, self._event = flag, None
        if flag.is_cuda:
            self._flag = torch.empty((), dtype=flag.dtype, pin_memory=True)
            self._flag.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(flag.device))

    def refused(self) -> bool:
        """Returns whether nothing was done. At the first call the counters are put back."""
        if self._known is None:
            if self._event is not None:
                self._event.synchronize()  # long past, unless the host is a whole step ahead
            self._known = bool(self._flag.numpy())
            if self._known:
                ops.advance(self.counters, -1)
        return self._known
