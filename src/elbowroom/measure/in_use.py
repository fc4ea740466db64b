"""Reads how many bytes are in use, in microseconds: for forwards in which nothing is examined.

Of a GPU it is the count of its caching allocator. On a CPU nothing counts without a profiler, so it
is the memory of the process that lies in RAM: Linux tells it in 3 us (11 us between other work).
Memory that malloc kept when it was freed counts too, and shows no growth as it is used again.
"""

import os

import torch

from elbowroom.measure.cuda_peak import allocated_nbytes

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
_LINE_NBYTES = 128  # seven numbers: the second is that of pages in RAM


class _Statm:
    """The file in which Linux tells the memory of this process; it stays open."""

    def __init__(self) -> None:
        self._file: int | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.open)  # the parent's tells of the parent

    def open(self) -> None:
        """Opens the file of this process, if there is one."""
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, AttributeError):  # not Linux
            self._file = -1

    def nbytes(self) -> int:
        """Returns the bytes of this process that lie in RAM; 0 if that is not known."""
        if self._file is None:
            self.open()
        if self._file is None or self._file < 0:
            return 0
        return int(os.pread(self._file, _LINE_NBYTES, 0).split()[1]) * _PAGE_NBYTES


_statm = _Statm()


def in_use_nbytes(device: torch.device) -> int:
    """Returns the bytes in use on a device now, or by this process on a CPU; 0: not known."""
    return allocated_nbytes(device)[0] if device.type == "cuda" else _statm.nbytes()
